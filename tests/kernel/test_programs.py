"""An ordinary user runs the programs that hooks call, such as enroot-mount. Their C code compiles with glibc too."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from enroot_py import ENROOT_VERSION
from enroot_py.base import linux
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, UID, User, require

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parent.parent / "c_shims/programs"
LIBEXEC = pathlib.Path(LIBRARY) / "libexec"


@pytest.fixture
def ubuntu(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return a root file system in the user's home, and put penroot's programs for hooks on PATH."""
    require((LIBEXEC / "penroot-unshare").exists(), f"the helpers are not installed in {LIBEXEC}")
    path = user.home / "ubuntu"
    rootfs.rename(path)
    user.environ["PATH"] = f"{LIBEXEC}:/usr/bin:/bin"
    return path


def test_programs_are_on_path_under_both_names(user: User) -> None:
    tools = ("unshare", "mount", "switchroot", "aufs2ovlfs", "mksquashovlfs")
    for name in tools:
        assert (pathlib.Path(PREFIX) / f"bin/penroot-{name}").resolve() == (LIBEXEC / f"penroot-{name}").resolve()
    (user.home / "bin").mkdir()
    for name in ("penroot", *(f"penroot-{name}" for name in tools)):
        (user.home / "bin" / name).symlink_to(f"{PREFIX}/bin/{name}")
    top = pathlib.Path(__file__).parent.parent.parent
    make = ["make", "-s", "-C", str(top), "enroot-names", f"PREFIX={user.home}"]
    subprocess.run(make, check=True, capture_output=True)
    user.environ["PATH"] = f"{user.home}/bin:/usr/bin:/bin"
    assert user.run("enroot-unshare", "sh", "-c", "id -u").stdout == "0\n"
    assert user.run("enroot-nsenter", "--user", "id", "-u").stdout == f"{UID}\n"
    assert user.run("enroot", "version").stdout == f"{ENROOT_VERSION}\n"
    for name in (*tools[1:], "nsenter"):
        assert user.run(f"enroot-{name}").stdout.startswith(f"Usage: enroot-{name} ")


def unshared(user: User, script: str, *prefix: str, status: int = 0) -> str:
    """Run a shell script in ``enroot-unshare bash``, and return its stdout."""
    return user.run(*prefix, "enroot-unshare", "bash", "-ec", script, status=status).stdout


@pytest.mark.parity("penroot-unshare", "penroot-mount")
def test_the_talks_three_commands(user: User, ubuntu: pathlib.Path) -> None:
    """enroot-unshare, enroot-mount and enroot-switchroot together run a program in a root file system."""
    (user.home / "fstab").write_text(
        """\
# comments and blank lines mean nothing

/proc /proc none x-create=dir,rbind
/sys  /sys  none x-create=dir,rbind,ro
/dev  /dev  none x-create=dir,rbind
tmpfs /run tmpfs x-create=dir,mode=700
/etc/os-release /etc/host-release none x-create=file,bind,ro
"""
    )
    script = """
        cat fstab | enroot-mount --root ubuntu -
        exec enroot-switchroot ubuntu sh -c 'id -u; cat /etc/host-release; chown 5:5 /tmp && echo chowned; ls -d /home'
    """
    done = user.run(
        "enroot-unshare", "bash", "-ec", script, status=1
    )  # status 1: the last command lists /home, which exists only on the host
    assert done.stdout == "0\n" + pathlib.Path("/etc/os-release").read_text() + "chowned\n"
    assert "/home" in done.stderr


def test_readonly_bind_rejects_writes(user: User, ubuntu: pathlib.Path) -> None:
    (user.home / "data").mkdir(exist_ok=True)
    user.own(user.home / "data")
    script = f"""
        echo '{user.home}/data /a/b\\040c none x-create=dir,bind,ro' | enroot-mount --root ubuntu -
        exec enroot-switchroot ubuntu sh -c 'touch "/a/b c/x" 2>&1; test -d "/a/b c" && echo there'
    """
    out = unshared(user, script)
    assert "Read-only" in out
    assert out.endswith("there\n")


def test_old_kernel_is_reported(user: User, ubuntu: pathlib.Path) -> None:
    prefix = ("strace", "-f", "-qq", "-o", "trace", "-e", "inject=mount_setattr:error=ENOSYS")
    done = user.run(*prefix, "enroot-mount", "--root", "ubuntu", "/dev/null", status=1)
    assert done.stderr == f"enroot-mount: this kernel is too old: Linux {linux.FLOOR} or later is needed\n"


@pytest.mark.parity("penroot-mount")
def test_targets_stay_beneath_the_root(user: User, ubuntu: pathlib.Path) -> None:
    outside = user.home / "outside"
    outside.mkdir()
    (ubuntu / "absolute").symlink_to(outside)
    (ubuntu / "relative").symlink_to("../../../../../.." + str(outside))
    user.own(user.home)
    script = f"""
        printf '%s\\n' 'tmpfs /absolute/a tmpfs x-create=dir' 'tmpfs /relative/b tmpfs x-create=dir' \\
            'tmpfs ../../c tmpfs x-create=dir' | enroot-mount --root ubuntu -
        grep -c ' {ubuntu}{outside}/a \\| {ubuntu}{outside}/b \\| {ubuntu}/c ' /proc/self/mountinfo
    """
    assert unshared(user, script) == "3\n"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nowhere /tmp none bind", "stdin:1: cannot mount /nowhere on /tmp: No such file"),
        ("/etc /tmp none bind,nonsense", "stdin:1: unknown mount option 'nonsense'"),
        ("/etc /tmp none bind 0 0 0", "stdin:1: 7 fields in"),
        ("/etc /tmp none bind 0 x", "stdin:1: passno must be a number, not 'x'"),
        ("/etc ${x none bind", "'${' without '}'"),
    ],
)
def test_a_wrong_line_is_named(user: User, ubuntu: pathlib.Path, line: str, error: str) -> None:
    done = user.run("enroot-unshare", "bash", "-ec", f"echo '{line}' | enroot-mount --root ubuntu -", status=1)
    assert error in done.stderr


@pytest.mark.parity("penroot-mount")
def test_passes_are_mounted_separately(user: User, ubuntu: pathlib.Path) -> None:
    script = """
        printf '%s\\n' 'tmpfs /one tmpfs x-create=dir 0 -1' 'tmpfs /two tmpfs x-create=dir' >fstab
        enroot-mount --root ubuntu --pass -1 fstab; ls ubuntu | grep -x 'one\\|two'; enroot-mount --root ubuntu fstab
        ls ubuntu | grep -x 'one\\|two'
    """
    assert unshared(user, script) == "one\none\ntwo\n"


@pytest.mark.parity("fstab: omitted fields get default values")
def test_fields_may_be_missing(user: User, ubuntu: pathlib.Path) -> None:
    script = """
        mkdir -p mine ubuntu$PWD/mine
        printf '%s\\n' 'tmpfs /one none mode=700,x-create=dir -1' "$PWD/mine none bind,ro" >fstab
        enroot-mount --root ubuntu --pass -1 fstab
        stat -fc %T ubuntu/one; ! grep -c " $PWD/ubuntu$PWD/mine ro" /proc/self/mountinfo
        enroot-mount --root ubuntu fstab
        grep -c " $PWD/ubuntu$PWD/mine ro" /proc/self/mountinfo
    """
    assert unshared(user, script) == "tmpfs\n0\n1\n"


@pytest.mark.parity("penroot-switchroot")
def test_switchroot_takes_an_environment_exactly(user: User, ubuntu: pathlib.Path) -> None:
    (user.home / "env").write_text(
        "# penroot-exact: A=one\\ntwo\\\\\nA=one two\\\nB= x \n# penroot-exact: C=old\nC=new\n"
    )
    out = unshared(user, "exec enroot-switchroot --envfile env --env 'D=$(id)' --exec ubuntu /bin/env")
    assert "A=one\ntwo\\\nB= x \nC=new\n" in out
    assert "D=$(id)\n" in out
    assert "FROM_IMAGE" not in out


@pytest.mark.parity("penroot-launch")
def test_launch_starts_a_task_prolog_as_slurmstepd_does(user: User, ubuntu: pathlib.Path) -> None:
    show = "ps -o pid=,pgid= $$; for fd in 8 9; do test ! -e /proc/$$/fd/$fd || echo open; done"
    out = user.run("sh", "-c", 'exec penroot-launch slurm_script_launcher /bin/sh sh -c "$0" 8</ 9</', show).stdout
    assert len(out.split()) == 2 and len(set(out.split())) == 1
    assert "No such file" in user.run("penroot-launch", "slurm_script_launcher", "/none", "none", status=127).stderr


def test_user_without_remap_has_no_capabilities_inside(user: User, ubuntu: pathlib.Path) -> None:
    script = """
        echo '/proc /proc none x-create=dir,rbind' | enroot-mount --root ubuntu -
        exec enroot-switchroot ubuntu sh -c 'id -u; grep "CapEff\\|CapBnd\\|NoNewPrivs\\|Seccomp:" /proc/self/status'
    """
    out = user.run("enroot-unshare", "--user", "--mount", "bash", "-ec", script).stdout.split()
    assert out[1:] == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    assert int(out[0]) > 0


@pytest.mark.parity("penroot-unshare")
def test_new_pid_and_net_namespaces(user: User, ubuntu: pathlib.Path) -> None:
    # If the loopback interface is up, it refuses connections. Otherwise it is unreachable.
    script = "echo $$; (: < /dev/tcp/127.0.0.1/9) 2>&1 | grep -m 1 -o refused; grep -c : /proc/net/dev; exit 9"
    options = ("--user", "--remap-root", "--mount", "--pid", "--net")
    assert user.run("enroot-unshare", *options, "bash", "-c", script, status=9).stdout == "1\nrefused\n1\n"


@pytest.mark.parity("penroot-unshare")
def test_nsenter_joins_a_process(user: User, ubuntu: pathlib.Path) -> None:
    script = """
        enroot-unshare --user --remap-root --mount --uts sleep 300 & pid=$!
        while [ "$(readlink /proc/$pid/ns/uts)" = "$(readlink /proc/self/ns/uts)" ]; do sleep 0.01; done
        for ns in user mnt uts; do
            inside=$(enroot-nsenter --target $pid --user --mount --uts readlink /proc/self/ns/$ns)
            [ "$inside" = "$(readlink /proc/$pid/ns/$ns)" ]
        done
        kill $pid; echo joined
    """
    assert user.run("bash", "-ec", script).stdout == "joined\n"


@pytest.mark.parity("penroot-aufs2ovlfs")
def test_aufs_whiteouts_become_overlayfs_ones(user: User, ubuntu: pathlib.Path) -> None:
    script = r"""
        mkdir -p low/d low/e up/d up/e mnt
        touch low/gone low/d/hidden low/e/kept up/.wh.gone up/d/.wh..wh..opq up/d/new
        penroot-aufs2ovlfs up
        test -c up/gone; test ! -e up/d/.wh..wh..opq
        echo "overlay /mnt overlay lowerdir=$PWD/up:$PWD/low,userxattr" | enroot-mount --root "$PWD" -
        cd mnt; find . -mindepth 1 | sort | tr '\n' ' '
    """
    assert unshared(user, script) == "./d ./d/new ./e ./e/kept "


@pytest.mark.parity("penroot-mksquashovlfs")
def test_mksquashovlfs_flattens_layers(user: User, ubuntu: pathlib.Path) -> None:
    script = r"""
        mkdir -p a b; echo top >a/x; echo low >b/x; echo low >b/y; touch a/.wh.z b/z
        penroot-aufs2ovlfs a
        penroot-mksquashovlfs a:b out.sqsh -quiet -no-progress -all-root >/dev/null
        unsquashfs -cat out.sqsh x y; unsquashfs -l out.sqsh | grep -c z$ || :
    """
    user.environ["PATH"] += ":/usr/sbin"
    assert user.run("bash", "-ec", script).stdout == "top\nlow\n0\n"


def test_sources_compile_with_glibc_too(tmp_path: pathlib.Path) -> None:
    subprocess.run(["make", "-s", "-C", SOURCE, "CC=gcc", f"OUT={tmp_path}"], check=True)
    for program in tmp_path.iterdir():
        done = subprocess.run(["readelf", "-l", program], capture_output=True, text=True, check=True)
        assert "INTERP" not in done.stdout
