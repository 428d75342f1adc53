"""Run containers in pods that tests/pod.py makes. Check the table of docs/howto/pods.md, and the errors it names."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
import yaml

from pyxis_py.admin import plugstack
from tests import images
from tests.images import entry
from tests.kernel.conftest import PREFIX, User, require

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/howto/pods.md"
EXAMPLES = ROOT / "examples/pods"
HIDDEN = "cannot mount proc on /proc: Operation not permitted"
# First column of the table -> options of tests/pod.py for such a pod
PODS = {
    "without a `securityContext`": (),
    "`/dev/fuse` of a device plugin": ("--device", "fuse"),
    "`/dev/fuse` as a `hostPath`": ("--host-path", "fuse"),
    "`allowPrivilegeEscalation: false`": ("--no-new-privileges",),
    "`readOnlyRootFilesystem: true`": ("--read-only-root",),
    "`hostUsers: false`": ("--own-users",),
    "`hostUsers: false`, `procMount: Unmasked`": ("--own-users", "--proc-unmasked"),
    "`privileged: true`": ("--privileged", "--device", "fuse"),
    "`seccompProfile: {type: RuntimeDefault}`": ("--seccomp",),
    "the same, and `capabilities: {add: [SYS_ADMIN]}`": ("--seccomp", "--sys-admin"),
    "AppArmor's profile of the runtime": ("--apparmor",),
    "`user.max_user_namespaces=0` on its machine": ("--no-users",),
    "no volume for the store": (),
}


def rows() -> list[list[str]]:
    """Return the cells of the page's table."""
    table = PAGE.read_text().partition("\n| the pod |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def pod(*options: str, volumes: tuple[os.PathLike[str], ...] = ()) -> tuple[str, ...]:
    """Return a command prefix with which root runs a command in a pod."""
    require(os.geteuid() == 0, "only root can make a pod")
    mounts = [f"--volume={path}" for path in (PREFIX, *map(os.fspath, volumes))]
    return ("env", f"--chdir={ROOT}", sys.executable, "-m", "tests.pod", *options, *mounts, "--")


@pytest.fixture
def layout(user: User) -> pathlib.Path:
    """Make an OCI layout in which one layer deletes a file of another layer."""
    directory = user.home / "layout"
    image = images.busybox(entry("data/old", b"1"), entry("data/kept", b"2"), kinds=images.OCI)
    image.layers.append(images.Layer(images.tar([entry("data/.wh.old")])))
    blobs = [*(layer.blob for layer in image.layers), image.config(), image.manifest()]
    images.write_layout(directory, blobs, images.index([(image, {"os": "linux", "architecture": "amd64"})]))
    (directory / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    user.own(directory)
    return directory


def works(user: User, prefix: tuple[str, ...], *arguments: str, fails_silently: bool = False) -> tuple[bool, str]:
    """Run penroot in a pod. Return whether it succeeded, and its output.

    A failure must print exactly one error, or none with ``fails_silently`` (doctor prints findings instead).
    """
    done = user.penroot(*arguments, prefix=prefix, cwd=ROOT, status=None)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("[ERROR]") == (done.returncode != 0 and not fails_silently)
    return done.returncode == 0, done.stdout + done.stderr


def fixes(output: str, message: str) -> list[str]:
    """Return the fixes that ``penroot doctor`` prints below the findings with this message."""
    lines = output.splitlines()
    return [after.strip() for line, after in zip(lines, lines[1:], strict=False) if message in line]


@pytest.mark.parity("the table of docs/howto/pods.md")
@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row[0]))
def test_table_of_the_documentation(user: User, layout: pathlib.Path, image: pathlib.Path, row: list[str]) -> None:
    name, *cells, message = row[0], *row[1:4], row[4].strip("`")
    if "--host-path" in PODS[name] and not os.path.isdir("/sys/fs/cgroup/devices"):
        pytest.skip("this machine has no device cgroup of version 1")
    prefix = pod(*PODS[name], volumes=() if name == "no volume for the store" else (user.home,))
    starts_stored, out = works(user, prefix, "start", f"oci:{layout}", "ls", "/data")
    starts_file, file_output = works(user, prefix, "start", str(image), "true")
    starts_private, private_output = works(
        user, prefix, "start", "--pid", f"oci:{layout}", "sh", "-c", "exit $(($$ - 1))"
    )
    assert ["yes" if cell else "no" for cell in (starts_stored, starts_file, starts_private)] == cells
    good, report = works(user, prefix, "doctor", fails_silently=True)
    assert message in report
    assert good == starts_stored
    if starts_stored:
        assert out.splitlines()[0] == "kept"
        assert (
            ("cannot open /dev/fuse: " in file_output)
            == ("this pod needs the device" in file_output)
            == (not starts_file)
        )
        assert (HIDDEN in private_output, HIDDEN in report) == (not starts_private, not starts_private)
        assert starts_private or fixes(report, HIDDEN)[0].removeprefix("fix: ") in private_output
    else:
        assert message in out
        hint = out.partition("[HINT] ")[2].strip()
        assert any(fix.removeprefix("fix: ") in hint for fix in fixes(report, message)), report


@pytest.mark.parity("without /dev/fuse")
def test_a_pod_without_fuse_unpacks_squashfs_files(user: User, image: pathlib.Path) -> None:
    prefix = pod(volumes=(user.home,))
    done, out = works(user, prefix, "start", str(image), "true")
    assert not done
    assert "without it: penroot create IMAGE, or ENROOT_UNPACK=yes" in out
    assert user.start(str(image), "echo", "it runs", prefix=prefix, env={"ENROOT_UNPACK": "yes"}) == "it runs\n"
    user.penroot("create", "--name", "made", str(image), prefix=prefix)
    assert user.start("--rw", "made", "sh", "-c", "echo x > /new; cat /new", prefix=prefix) == "x\n"


@pytest.mark.parity("root of a pod cannot use a container to reach files that the runtime has masked")
def test_root_of_a_pod_without_capabilities(user: User, rootfs: pathlib.Path) -> None:
    """The caller is root without CAP_SYS_ADMIN. Files of /proc that the pod's runtime masks stay masked."""
    user.uid = user.gid = 0
    user.own(user.home)
    prefix = pod(volumes=(user.home,))
    script = "id -u; cat /proc/keys /proc/timer_list; echo x > /proc/sys/kernel/domainname"
    done = user.penroot("start", "box", "sh", "-c", script, prefix=prefix, status=1)
    assert done.stdout == "0\n"
    assert "can't create /proc/sys/kernel/domainname: Read-only file system" in done.stderr


@pytest.mark.parity("a private network in a pod whose /sys is masked")
def test_a_new_network_shows_the_sys_of_the_pod(user: User, rootfs: pathlib.Path) -> None:
    prefix = pod(volumes=(user.home,))
    done = user.penroot("start", "--net", "box", "sh", "-c", "ls /sys/class/net; cat /proc/net/dev", prefix=prefix)
    assert done.stdout.split()[0] == "lo"
    assert "[WARN] --net: /sys shows the network devices of" in done.stderr
    done = user.penroot("start", "--net", "box", "touch", "/sys/x", prefix=prefix, status=1)
    assert "Read-only file system" in done.stderr
    quiet = user.penroot("start", "--net", "box", "true", prefix=pod("--proc-unmasked", volumes=(user.home,)))
    assert quiet.stderr == ""


@pytest.mark.parity("the socket of nvidia-persistenced")
def test_a_socket_that_the_pod_has_read_only(user: User, rootfs: pathlib.Path) -> None:
    """NVIDIA's toolkit mounts the socket read-only. A mount of the socket in a user namespace must stay so."""
    directory = user.home / "nvidia-persistenced"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
        prefix = pod(f"--read-only-volume={directory}", volumes=(user.home,))
        target = f"{directory}/socket:/run/nvidia-persistenced/socket:x-create=file,bind,rw,nosuid,noexec,nodev,private"
        script = "test -S /run/nvidia-persistenced/socket && echo there"
        assert user.start("--mount", target, "box", "sh", "-c", script, prefix=prefix) == "there\n"


def test_fuse_overlayfs_needs_dev_fuse(user: User, rootfs: pathlib.Path) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    user.environ["ENROOT_NATIVE_OVERLAYFS"] = "no"
    done, out = works(user, pod(volumes=(user.home,)), "start", "box", "true")
    assert not done
    assert "cannot open /dev/fuse: No such file or directory" in out
    assert "without it: ENROOT_NATIVE_OVERLAYFS=yes" in out


@pytest.mark.parity("a store on the root file system of the pod")
def test_changes_can_be_kept_only_on_a_volume(user: User, layout: pathlib.Path) -> None:
    """If only the store is on a volume, the start fails. If the containers are on a volume too, it works."""
    user.environ["ENROOT_CACHE_PATH"] = str(user.home / "volume/cache")
    (user.home / "volume").mkdir()
    user.own(user.home)
    prefix = pod(volumes=(user.home / "volume",))
    script = f"penroot create --name box oci:{layout} && penroot start --rw box touch /new"
    done = user.run("sh", "-c", script, prefix=prefix, status=1)
    assert f"{user.data}/box/upper is on an overlay file system, such as the root of a pod" in done.stderr
    assert "use a volume of the pod for ENROOT_DATA_PATH, such as an emptyDir" in done.stderr
    user.environ["ENROOT_DATA_PATH"] = str(user.home / "volume/data")
    user.run("sh", "-c", script, prefix=prefix)


@pytest.mark.parity("a store on the root file system of the pod")
def test_emptydir_that_all_users_can_write_is_refused(user: User, rootfs: pathlib.Path) -> None:
    """Kubernetes creates an emptyDir with mode 0777, so every user of the pod could replace files of other users."""
    require(os.geteuid() == 0, "only root can make a pod")
    os.chown(user.home, 0, 0)
    user.home.chmod(0o777)
    prefix = pod(volumes=(user.home,))
    why = f"lies in {user.home}, where others can replace it (mode 777, not sticky)"
    assert why in user.penroot("start", "box", "true", prefix=prefix, status=1).stderr
    stdout = user.penroot("doctor", prefix=prefix, status=1).stdout
    assert f"bad  containers are in {user.data}, which {why}\n     fix: chmod 1777" in stdout
    assert f"bad  images are stored in {user.home}/cache, which {why}\n     fix: chmod 1777" in stdout
    user.home.chmod(0o1777)
    user.start("box", "true", prefix=prefix)
    user.penroot("doctor", prefix=prefix)


@pytest.mark.parity("settings and values for Slinky's chart")
def test_settings_of_the_examples(user: User, layout: pathlib.Path) -> None:
    """The example's enroot.conf works with the volume of values.yaml, whose mode the initContainer has set."""
    values = yaml.safe_load((EXAMPLES / "values.yaml").read_text())
    for specification, container in (
        (values["nodesets"]["slinky"], "slurmd"),
        (values["loginsets"]["slinky"], "login"),
    ):
        [init] = specification["podSpec"]["initContainers"]
        mount = specification[container]["volumeMounts"][0]
        assert init["volumeMounts"] == [mount]
        assert {"name": mount["name"], "emptyDir": {}} in specification["podSpec"]["volumes"]
        assert init["image"] == ":".join(specification[container]["image"].values())
    volume = user.home / "volume"
    volume.mkdir(mode=0o777)
    subprocess.run([*init["command"][:-1], str(volume)], check=True)
    assert init["command"][-1] == mount["mountPath"]
    (user.home / "etc").mkdir()
    conf = (EXAMPLES / "enroot.conf").read_text()
    assert conf.count(mount["mountPath"]) == 4
    (user.home / "etc/enroot.conf").write_text(conf.replace(mount["mountPath"], str(volume)))
    for name in ("RUNTIME", "CACHE", "DATA"):
        del user.environ[f"ENROOT_{name}_PATH"]
    prefix = pod(volumes=(volume,))
    script = f"penroot create --name box oci:{layout} && penroot start --rw box ls /data && penroot doctor"
    done = user.run("sh", "-c", script, prefix=prefix)
    assert done.stdout.splitlines()[0] == "kept"
    assert sorted(path.name.partition("-")[0] for path in volume.iterdir()) == ["cache", "data", "run"]


@pytest.mark.parity("settings and values for Slinky's chart")
def test_plugstack_of_the_examples(tmp_path: pathlib.Path) -> None:
    values = yaml.safe_load((EXAMPLES / "values.yaml").read_text())
    (tmp_path / "plugstack.conf").write_text(values["configFiles"]["plugstack.conf"])
    [line] = plugstack.stack(str(tmp_path / "plugstack.conf"))
    assert (line.path, line.arguments) == ("/usr/lib/penroot/spank_pyxis.so", ())
