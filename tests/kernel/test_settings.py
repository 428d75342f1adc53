"""The effects of the ENROOT_* variables, and of the configuration directories of the system and the user."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import threading
import time

import pytest

from tests import images
from tests.fakeregistry import Fault, Login, faulty
from tests.images import Image, Layer, entry
from tests.kernel.conftest import PREFIX, UID, User, mounts_under, require
from tests.kernel.registry import serve


def inside(user: User, script: str, **settings: str) -> str:
    return user.start("box", "sh", "-c", script, env=settings)


@pytest.mark.parity("ENROOT_UNSHARE_NET")
@pytest.mark.parametrize("kind", ["net", "pid", "ipc", "uts"])
def test_namespaces_by_variable_and_option(user: User, rootfs: pathlib.Path, kind: str) -> None:
    mine = os.readlink(f"/proc/self/ns/{kind}")
    script = f"readlink /proc/self/ns/{kind}"
    assert inside(user, script).strip() == mine
    assert inside(user, script, **{f"ENROOT_UNSHARE_{kind.upper()}": "y"}).strip() != mine
    assert user.start(f"--{kind}", "box", "sh", "-c", script).strip() != mine


@pytest.mark.parity("ENROOT_MOUNT_HOME", "10-home")
@pytest.mark.security("O5")
def test_home_by_variable(user: User, rootfs: pathlib.Path) -> None:
    (user.home / "mine").write_text("at home\n")
    assert inside(user, "cat $HOME/mine", ENROOT_MOUNT_HOME="y") == "at home\n"
    of_root = ("--root", "box", "sh", "-c", "cat /root/mine; echo $HOME")
    assert user.start(*of_root, env={"ENROOT_MOUNT_HOME": "y"}) == "at home\n/root\n"


@pytest.mark.parity("ENROOT_RUNTIME_PATH")
def test_start_mounts_below_the_runtime_path(user: User, rootfs: pathlib.Path) -> None:
    user.write("etc/hooks.d/50-where.sh", '#!/bin/sh\necho "WHERE=$ENROOT_ROOTFS" >> "$ENROOT_ENVIRON"\n', 0o755)
    directory = user.home / "my runtime"
    assert inside(user, "echo $WHERE", ENROOT_RUNTIME_PATH=str(directory)) == f"{directory}/root/box\n"
    assert directory.stat().st_mode & 0o077 == 0
    assert mounts_under(user.home) == []


@pytest.mark.parity("ENROOT_TEMP_PATH")
def test_bundle_uses_the_temp_path(user: User, rootfs: pathlib.Path) -> None:
    """If the image's compression is unsupported, bundle converts it in ENROOT_TEMP_PATH, and removes the copy."""
    image = user.home / "box.sqsh"
    subprocess.run(["mksquashfs", rootfs, image, "-all-root", "-quiet", "-no-progress", "-comp", "lzo"], check=True)
    user.own(image)
    done = user.penroot("bundle", str(image), env={"ENROOT_TEMP_PATH": "/no/such"}, status=1)
    assert "/no/such" in done.stderr
    (user.home / "temp").mkdir()
    user.own(user.home / "temp")
    user.penroot("bundle", str(image), env={"ENROOT_TEMP_PATH": str(user.home / "temp")})
    assert os.listdir(user.home / "temp") == []


@pytest.mark.parity("ENROOT_SQUASH_OPTIONS", "ENROOT_MAX_PROCESSORS", "ENROOT_DEBUG")
def test_squash_options_and_processors_reach_mksquashfs(user: User, rootfs: pathlib.Path) -> None:
    environ = {"PENROOT_DEBUG": "1", "ENROOT_SQUASH_OPTIONS": "-comp lz4 -b 64K", "ENROOT_MAX_PROCESSORS": "3"}
    stderr = user.penroot("export", "box", env=environ).stderr
    assert "-processors 3" in stderr and "-comp lz4 -b 64K" in stderr
    shown = user.run("unsquashfs", "-s", "box.sqsh").stdout
    assert "Compression lz4" in shown and "Block size 65536" in shown


@pytest.mark.parity("bundle --output", "bundle --force", "ENROOT_BUNDLE_ALL")
def test_bundle_settings(user: User, image: pathlib.Path) -> None:
    user.penroot("bundle", "-o", "plain.run", str(image))
    assert "Checksum: " not in user.run("./plain.run", "--info").stdout
    environ = {"ENROOT_BUNDLE_CHECKSUM": "y", "ENROOT_BUNDLE_ALL": "y", "ENROOT_REMAP_ROOT": "y"}
    user.penroot("bundle", "--output=all.run", str(image), env=environ)
    assert "Checksum: " in user.run("./all.run", "--info").stdout
    assert user.run("./all.run", "id", "-u").stdout == "0\n"
    user.penroot("bundle", "-o", "all.run", str(image), status=1)
    user.penroot("bundle", "--force", "-o", "all.run", str(image))
    assert user.run("./all.run", "id", "-u").stdout == f"{UID}\n"


def layers(count: int) -> list[Layer]:
    return [Layer(images.tar([entry(f"file{n}", bytes([n]) * 1000)])) for n in range(count)]


@pytest.mark.parity("ENROOT_MAX_CONNECTIONS")
def test_connections_at_a_time(user: User) -> None:
    """With ENROOT_MAX_CONNECTIONS=3, three layers are fetched in parallel, and with 1, one after another."""
    image = Image(layers(3), {"Cmd": ["/bin/sh"]})
    with serve(user.home / "registry") as server:
        server.pusher.image("test/x", "1", image)
        barrier = threading.Barrier(3)
        busy, max_busy = 0, 0

        def wait(body: bytes) -> bytes:
            barrier.wait(60)  # with fewer parallel connections, the barrier breaks and the import fails
            return body

        def count(body: bytes) -> bytes:
            nonlocal busy, max_busy
            busy += 1
            max_busy = max(max_busy, busy)
            time.sleep(0.1)
            busy -= 1
            return body

        for connections, change in (("3", wait), ("1", count)):
            faults = [Fault(f"/blobs/{images.digest(layer.blob)}", 1, change=change) for layer in image.layers]
            with faulty(server.host, *faults) as front:
                environ = {
                    "ENROOT_MAX_CONNECTIONS": connections,
                    "ENROOT_MAX_PROCESSORS": "3",
                    "ENROOT_ALLOW_HTTP": "y",
                }
                environ["ENROOT_CACHE_PATH"] = str(user.home / f"cache{connections}")
                user.penroot("import", "-o", f"{connections}.sqsh", f"docker://{front.host}/test/x:1", env=environ)
        assert max_busy == 1


@pytest.mark.parity("ENROOT_TRANSFER_TIMEOUT")
def test_transfer_that_takes_too_long_is_given_up(user: User) -> None:
    image = Image(layers(1), {})
    with serve(user.home / "registry") as server:
        server.pusher.image("test/x", "1", image)
        with faulty(server.host, Fault(f"/blobs/{images.digest(image.layers[0].blob)}", 99, stall_at=0.5)) as front:
            environ = {"ENROOT_TRANSFER_TIMEOUT": "2", "ENROOT_STALL_TIMEOUT": "1", "ENROOT_TRANSFER_RETRIES": "1000"}
            uri = f"docker://{front.host}/test/x:1"
            done = user.penroot("import", "-o", "x.sqsh", uri, env={**environ, "ENROOT_ALLOW_HTTP": "y"}, status=1)
    assert "ENROOT_TRANSFER_TIMEOUT" in done.stderr
    assert not (user.home / "x.sqsh").exists()


@pytest.mark.parity(
    "ENROOT_LIBRARY_PATH", "ENROOT_VERSION", "hooks: bash hooks must be executable", "hooks have all capabilities"
)
def test_hooks_of_the_site_get_the_variables_of_enroot(user: User, rootfs: pathlib.Path) -> None:
    hook = (
        "#!/bin/bash\nset -eu\nenv | grep ^ENROOT_ >&2; grep CapEff /proc/self/status >&2\n"
        'grep -q " ${ENROOT_ROOTFS} " /proc/self/mountinfo && test -d /proc/${ENROOT_PID}\n'
        'test -w "${ENROOT_ENVIRON}" -a -w "${ENROOT_MOUNTS}"\n'
    )
    user.write("etc/hooks.d/50-site.sh", hook, 0o755)
    stderr = user.penroot("start", "--root", "box", "true", env={"ENROOT_MOUNT_HOME": "no"}).stderr
    variables = dict(line.split("=", 1) for line in stderr.splitlines() if line.startswith("ENROOT_"))
    paths = (f"{name}_PATH" for name in ("LIBRARY", "SYSCONF", "RUNTIME", "CONFIG", "CACHE", "DATA", "TEMP"))
    names = ("PID", "ROOTFS", "ENVIRON", "MOUNTS", "VERSION", *paths)
    assert {f"ENROOT_{name}" for name in names} <= set(variables)
    assert variables["ENROOT_REMAP_ROOT"] == "y"
    assert "ENROOT_MOUNT_HOME" not in variables  # as in enroot, hooks do not get settings that are off
    caps = next(int(line.split()[1], 16) for line in stderr.splitlines() if line.startswith("CapEff"))
    last = int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text())
    assert caps == (1 << last + 1) - 1


@pytest.mark.parity("a wrong key or value is an error that names the file and line")
@pytest.mark.parametrize("form", ["enroot.conf", "penroot.yaml"])
def test_a_site_configures_starts(user: User, rootfs: pathlib.Path, form: str) -> None:
    text = "ENROOT_REMAP_ROOT yes\n" if form == "enroot.conf" else "remap_root: yes\n"
    user.write(f"etc/{form}", text)
    for _ in range(2):  # the second start reads the stored copy of the parsed file
        assert inside(user, "id -u") == "0\n"
    (user.home / "etc" / form).write_text(text.replace("yes", "perhaps"))
    done = user.penroot("start", "box", "true", status=1)
    key = "ENROOT_REMAP_ROOT" if form == "enroot.conf" else "remap_root"
    assert f"{form}:1: {key}='perhaps' must be yes or no" in done.stderr
    assert user.penroot("info", status=1).stdout == ""


@pytest.mark.parity("remove: stays on the container's file system, like rm --one-file-system")
def test_remove_stays_on_its_file_system(user: User, rootfs: pathlib.Path) -> None:
    """Like rm --one-file-system, remove deletes no file of another file system that is mounted in the container."""
    require(os.geteuid() == 0, "mounting needs root")
    (rootfs / "mnt/other").mkdir(parents=True)
    script = (
        f"mount -t tmpfs tmpfs {rootfs}/mnt/other && touch {rootfs}/mnt/other/precious && "
        f"{PREFIX}/bin/penroot remove -f box; echo $?; find {user.data} -name precious"
    )
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=user.environ, capture_output=True, text=True, check=True)
    status, *remaining = done.stdout.split()
    assert (status, len(remaining)) == ("1", 1), done.stderr


@pytest.mark.parity("speculation as on the host")
def test_speculation_is_as_on_the_host(user: User, rootfs: pathlib.Path) -> None:
    """The seccomp filter adds no mitigation of speculative execution, although older kernels do so by default."""
    command = "grep -E '^Speculation' /proc/self/status"
    assert inside(user, command + " || true") == user.run("sh", "-c", command + " || true").stdout


@pytest.mark.parity(
    "exec --env",
    "exec: joins the namespaces of the process",
    "exec: the command has the variables and working directory of the process",
    "a container has a cgroup namespace",
)
def test_exec_has_the_state_of_the_process(user: User, rootfs: pathlib.Path) -> None:
    """exec PID runs a command with the namespaces, working directory and variables of this process."""
    script = "cd /opt/work; echo ready; exec sleep 1000"
    command = ("penroot", "start", "--pid", "--net", "--ipc", "--uts", "-e", "MINE=1 2", "box", "sh", "-c", script)
    with user.running(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (inner,) = (pid for pid in children if pathlib.Path(f"/proc/{pid}/comm").read_text() != "penroot-follow\n")
        kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
        script = "pwd; echo $MINE $GIVEN $TAKEN; for n in " + " ".join(kinds) + "; do readlink /proc/self/ns/$n; done"
        words = ("exec", "-e", "GIVEN=a", "--env=TAKEN", inner, "sh", "-c", script)
        lines = user.penroot(*words, env={"TAKEN": "b"}).stdout.splitlines()
        assert lines[:2] == ["/opt/work", "1 2 a b"]
        assert lines[2:] == [os.readlink(f"/proc/{inner}/ns/{kind}") for kind in kinds]


@pytest.mark.parity("load URI", "load --arch", "load --name", "load --force")
def test_load_by_name_architecture_and_force(user: User) -> None:
    here = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    mine, other = images.busybox(architecture=here), images.busybox(entry("riscv", b""), architecture="riscv64")
    with serve(user.home / "registry") as server:
        for image in (mine, other):
            server.pusher.image("test/x", "", image)
        entries = [(image, {"os": "linux", "architecture": image.architecture}) for image in (mine, other)]
        server.pusher.manifest("test/x", "1", images.index(entries))
        user.own(user.home)
        user.environ["ENROOT_ALLOW_HTTP"] = "y"
        uri = f"docker://{server.host}#test/x:1"
        user.penroot("load", uri)
        assert user.penroot("list").stdout == "test+x+1\n"
        user.penroot("load", "--name=own", uri)
        user.start("--rw", "own", "touch", "/mine")
        user.penroot("load", "-n", "own", uri, status=1)
        user.penroot("load", "-n", "own", "--arch", "riscv64", "-f", uri)
        user.penroot("load", "-n", "a/b", uri, status=1)
    assert user.start("own", "ls", "/").split().count("riscv") == 1
    assert "mine" not in user.start("own", "ls", "/").split()


class UniqueTokens(Login):
    """A token service that issues a unique token for each request."""

    def token(self) -> str:
        token = os.urandom(16).hex()
        self.tokens[token] = self.uses
        return token


@pytest.mark.parity("tokens are in no file")
def test_tokens_are_in_no_file(user: User) -> None:
    with serve(user.home / "registry") as server:
        server.pusher.image("test/x", "1", images.busybox())
        with faulty(server.host, login=UniqueTokens({"": ""})) as front:
            environ = {"ENROOT_ALLOW_HTTP": "y"}
            user.penroot("import", "-o", "x.sqsh", f"docker://{front.host}/test/x:1", env=environ)
            tokens = {request.login for request in front.seen if request.authorization.startswith("Bearer ")}
    assert tokens
    shutil.rmtree(user.home / "registry")
    for path in user.home.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(token.encode() in data for token in tokens), path


@pytest.mark.parametrize(
    "name",
    ["enroot.conf", "penroot.yaml", "enroot.conf.d/", "mounts.d/", "environ.d/", "hooks.d/", "mounts.d/10-site.fstab"],
)
def test_unreadable_settings_of_the_site_are_an_error(user: User, rootfs: pathlib.Path, name: str) -> None:
    closed = user.home / "etc" / name
    closed.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        closed.mkdir(0)
    else:
        closed.touch(0)
    user.own(user.home / "etc")
    stderr = user.penroot("start", "box", "true", status=1).stderr
    assert f"[ERROR] cannot read {closed}: Permission denied\n[HINT]" in stderr
    # If the user cannot enter the directory of settings itself, it is skipped: after su, it can be in another's home.
    user.penroot("start", "box", "true", env={"ENROOT_SYSCONF_PATH": str(closed / "enroot")})


@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_id_in_settings_is_the_callers_in_any_namespace(user: User, image: pathlib.Path, target: str) -> None:
    """$(id -u) and $(whoami) name the caller of the start, not a user of its namespaces.

    A start reads the settings before it enters its user namespaces, and mounts.d afterwards.
    """
    user.write("etc/enroot.conf", "ENROOT_TEMP_PATH /tmp/$(id -u)-$(id -g)-$UID\n")
    user.write(
        "etc/mounts.d/50.fstab", "tmpfs /$(whoami) tmpfs x-create=dir\n"
    )  # the user has no name, so $(whoami) is the number
    for prefix in ((), ("unshare", "-Urn")):
        info = user.run(*prefix, "penroot", "info").stdout
        assert f"ENROOT_TEMP_PATH=/tmp/{user.uid}-{user.uid}-{user.uid} " in info
        user.run(*prefix, "penroot", "start", "--root", target, "ls", "-d", f"/{user.uid}")
