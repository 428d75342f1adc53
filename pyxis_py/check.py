"""``pyxis-py check``: whether this node can run container steps, and for what is wrong the way to mend it.

Looks, and tries what only a try can tell; changes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from enroot_py import filesystems, linux, namespaces
from enroot_py import settings as enroot_settings
from enroot_py.errors import PenrootError
from enroot_py.run import find, run
from pyxis_py import settings
from pyxis_py.settings import PLUGIN

_MARK = rb"penroot plugin for Slurm 0x([0-9a-f]+)"
# Plugins that give a job a /tmp of its own. One that does so after ours changes what the mounts meant.
_PRIVATE_TMP = ("auto_tmpdir", "private-tmpdir", "private_tmpdir", "spank-private-tmp", "spank_private_tmp", "tmpdir")
_JOB_CONTAINER_DIRECTORIES = "/tmp,/dev/shm"  # job_container.conf(5), Dirs


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: ``ok``, ``warn`` where some steps will suffer, or ``bad``; ``fix`` says how."""

    verdict: str
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One plugin of plugstack.conf."""

    origin: str
    path: str
    arguments: tuple[str, ...]


def findings(plugstack: str | None) -> Iterator[Finding]:
    """Everything that is worth a look, in the order in which a step meets it."""
    slurm = slurm_configuration()
    if not slurm:
        yield Finding(
            "warn",
            "scontrol cannot tell the configuration of Slurm: proctrack and job_container are not looked at",
            "is slurmctld up, and this node one of its cluster? scontrol show config",
        )
    lines = list(stack(plugstack or slurm.get("PlugStackConfig") or "/etc/slurm/plugstack.conf"))
    ours = [line for line in lines if os.path.basename(line.path) == PLUGIN]
    yield from _loaded(ours, lines, plugstack or slurm.get("PlugStackConfig", "/etc/slurm/plugstack.conf"))
    yield from _namespaces()
    yield _overlay()
    yield from selinux()
    yield hidepid()
    yield from _fuse()
    yield from _slurm(slurm, settings.load(ours[0].arguments if ours and not _bad_arguments(ours[0]) else ()))
    loaded = enroot_settings.load()
    yield _data_path(loaded.data_path)
    yield from inodes(dict.fromkeys((loaded.data_path, loaded.cache_path)))
    yield from root_squash(users_home())


def slurm_configuration() -> dict[str, str]:
    """What slurmctld says, as scontrol(1) shows it; empty where nobody answers."""
    try:
        text = run([find("scontrol", package="slurm-client"), "show", "config"])
    except PenrootError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def stack(path: str) -> Iterator[Line]:
    """The plugins that a plugstack.conf loads, in order, those of included files too: spank(8), CONFIGURATION."""
    try:
        with open(path, errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                for included in sorted(glob.glob(os.path.join(os.path.dirname(path), pattern))):
                    yield from stack(included)
        elif words[:1] in (["required"], ["optional"]):
            yield Line(f"{path}:{number}", words[1] if len(words) > 1 else "", tuple(words[2:]))


def built_for(plugin: str) -> int | None:
    """The SLURM_VERSION_NUMBER of the headers that a plugin was built with. Raises OSError."""
    with open(plugin, "rb") as file:
        found = re.search(_MARK, file.read())
    return int(found[1], 16) if found else None


def _installed() -> str:
    """The version of the Slurm on this machine, as 22.05.8; empty where there is none. Raises PenrootError."""
    for program in ("srun", "slurmd"):
        path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin:/opt/slurm/sbin")
        if path:
            return run([path, "-V"]).split()[-1]
    return ""


def _bad_arguments(line: Line) -> PenrootError | None:
    try:
        settings.load(line.arguments)
    except PenrootError as e:
        return e
    return None


def _loaded(ours: list[Line], lines: list[Line], plugstack: str) -> Iterator[Finding]:
    if not ours:
        yield Finding("bad", f"{plugstack} does not load {PLUGIN}", "pyxis-py install, and include plugstack.conf.d/*")
        return
    if len(ours) > 1:
        where = ", ".join(line.origin for line in ours)
        yield Finding("bad", f"{PLUGIN} is loaded more than once: {where}", "remove all lines but one")
    line = ours[0]
    if error := _bad_arguments(line):
        yield Finding("bad", f"{line.origin}: {error}", error.hint)
    try:
        number = built_for(line.path)
    except OSError as e:
        yield Finding("bad", f"{line.origin}: {line.path}: {e.strerror}", "pyxis-py install, on this node too")
        return
    version = _installed()
    has = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not has:
        yield Finding("bad", "there is no Slurm on this machine", "install it, or add it to PATH")
    elif number is None:
        yield Finding("bad", f"{line.path} is not penroot's, or older", "pyxis-py install")
    elif (number >> 16, number >> 8 & 0xFF) != has:
        built = f"{number >> 16}.{number >> 8 & 0xFF:02}"
        yield Finding("bad", f"{line.path} is for Slurm {built}, this is {version}", "pyxis-py install")
    else:
        yield Finding("ok", f"{line.origin} loads {line.path}, for Slurm {version}")
    for other in lines[lines.index(line) + 1 :]:
        if any(name in os.path.basename(other.path) for name in _PRIVATE_TMP):
            yield Finding(
                "warn",
                f"{other.origin}: {other.path} comes after {PLUGIN}: containers have the node's /tmp, not the job's",
                f"move it above {line.origin}",
            )


def _sysctl(name: str) -> int | None:
    try:
        with open("/proc/sys/" + name.replace(".", "/")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None  # this kernel has it not


def _namespaces() -> Iterator[Finding]:
    said: tuple[tuple[str, Callable[[int], bool], int, str], ...] = (
        ("user.max_user_namespaces", lambda value: value < 100, 15000, "bad"),
        ("user.max_mnt_namespaces", lambda value: value < 100, 15000, "bad"),
        ("kernel.unprivileged_userns_clone", lambda value: value == 0, 1, "bad"),
        # A profile may allow it to the interpreter all the same: the try below decides.
        ("kernel.apparmor_restrict_unprivileged_userns", lambda value: value == 1, 0, "warn"),
    )
    for name, wrong, right, verdict in said:
        value = _sysctl(name)
        if value is None:
            continue
        if wrong(value):
            fix = f"echo {name}={right} > /etc/sysctl.d/80-penroot.conf; sysctl --system"
            yield Finding(verdict, f"{name} is {value}: users may not make the namespaces of a container", fix)
        else:
            yield Finding("ok", f"{name} is {value}")


def _overlay() -> Finding:
    """Mount an overlay as an ordinary user: no version and no setting tells what this does."""
    user = pwd.getpwnam("nobody")
    directory = tempfile.mkdtemp(prefix="penroot-check-")
    os.chmod(directory, 0o755)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            _mount_overlay(directory, user)
        except BaseException as e:
            os.write(send, f"{e} {getattr(e, 'hint', '')}".encode())
            os._exit(1)
        os._exit(0)
    os.close(send)
    with open(receive, errors="replace") as pipe:
        why = pipe.read().strip()
    _, status = os.waitpid(child, 0)
    os.rmdir(directory)
    if status == 0:
        return Finding("ok", "an ordinary user can mount an overlay in a user namespace")
    return Finding(
        "bad",
        f"an ordinary user cannot mount an overlay in a user namespace: {why or 'killed'}",
        "Linux 5.11 or later, modprobe overlay, and what is said above of user namespaces; "
        "with AppArmor's restriction a profile for " + os.path.realpath(sys.executable),
    )


def _mount_overlay(directory: str, user: pwd.struct_passwd) -> None:
    """In a child of its own, whose mounts go with it. Raises OSError, PenrootError."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self/uid_map is root's
    namespaces.enter_user(os.geteuid(), os.getegid())
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("tmpfs", directory, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)
    for name in ("one", "two", "root"):
        os.mkdir(f"{directory}/{name}")
    data = f"lowerdir={directory}/one:{directory}/two,userxattr"
    linux.mount("overlay", f"{directory}/root", "overlay", linux.MS_RDONLY, data)


def selinux(root: str = "/sys/fs/selinux") -> Iterator[Finding]:
    """Whether its policy may refuse what the try above did as root's service would not: selinux(8)."""
    try:
        with open(f"{root}/enforce") as file:
            enforcing = file.read().strip() == "1"
    except OSError:
        return  # this kernel has it not, or it is switched off
    if enforcing:
        yield Finding(
            "warn",
            "SELinux enforces its policy: in the domain of slurmd it may refuse namespaces, mounts and /dev/fuse",
            "after a step that fails: ausearch -m avc -ts recent | audit2allow -M penroot; semodule -i penroot.pp",
        )
    else:
        yield Finding("ok", "SELinux refuses nothing (permissive)")


def hidepid(mountinfo: str = "/proc/self/mountinfo") -> Finding:
    """Whether users see only their own processes: proc(5)."""
    with open(mountinfo, errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    options = next((line[-1].split(",") for line in reversed(lines) if line[4] == "/proc"), [])
    hidden = next((value for key, _, value in (o.partition("=") for o in options) if key == "hidepid"), "0")
    if hidden in ("0", "off"):
        return Finding("ok", "/proc shows all processes")
    return Finding(
        "warn",
        f"/proc is mounted with hidepid={hidden}: steps run, but who shares a store does not see who else uses it",
        "mount -o remount,hidepid=0 /proc, or a store for each user: ENROOT_CACHE_PATH in enroot.conf",
    )


def _fuse() -> Iterator[Finding]:
    try:
        info = os.stat("/dev/fuse")
    except FileNotFoundError:
        yield Finding("bad", "there is no /dev/fuse: squashfs images cannot be mounted", "modprobe fuse")
        return
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISCHR(info.st_mode) or mode & 0o006 != 0o006:
        fix = """echo 'KERNEL=="fuse", MODE="0666"' > /etc/udev/rules.d/80-fuse.rules; chmod 666 /dev/fuse"""
        yield Finding("bad", f"/dev/fuse has mode {mode:04o}: users cannot mount squashfs images", fix)
    else:
        yield Finding("ok", f"/dev/fuse has mode {mode:04o}")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as e:
        if e.errno == errno.EPERM:  # EACCES is the mode's
            yield Finding(
                "bad",
                "the device cgroup of this process denies /dev/fuse: squashfs images cannot be mounted",
                "/dev/fuse in cgroup_allowed_devices_file.conf where Slurm has that, else ConstrainDevices=no",
            )
    server = shutil.which("squashfuse_ll") or shutil.which("squashfuse")
    if server:
        yield Finding("ok", f"squashfs images are mounted by {server}")
    else:
        yield Finding("bad", "squashfuse is not installed: squashfs images cannot be mounted", "install squashfuse")


def _slurm(slurm: Mapping[str, str], plugin: settings.Settings) -> Iterator[Finding]:
    tracking = slurm.get("ProctrackType")
    if tracking == "proctrack/cgroup":
        yield Finding("ok", f"ProctrackType={tracking}")
    elif tracking:
        fix = "ProctrackType=proctrack/cgroup in slurm.conf"
        yield Finding(
            "bad", f"ProctrackType={tracking} loses the helper of a step: what it holds may outlive jobs", fix
        )
    if "tmpfs" in slurm.get("JobContainerType", ""):
        private = _job_container_directories(slurm.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
        inside = [path for path in private if (plugin.runtime_path + "/").startswith(path.rstrip("/") + "/")]
        if inside:
            what = (
                f"runtime_path={plugin.runtime_path} is in {inside[0]}, of which job_container/tmpfs gives each job one"
            )
            yield Finding("bad", what, f"runtime_path={settings.SETTINGS['runtime_path'].default} in plugstack.conf")
        else:
            yield Finding("ok", f"runtime_path={plugin.runtime_path} is outside of job_container/tmpfs")


def _job_container_directories(slurm_conf: str) -> list[str]:
    try:
        with open(os.path.join(os.path.dirname(slurm_conf), "job_container.conf"), errors="surrogateescape") as file:
            found = re.search(r"^\s*Dirs\s*=\s*(\S+)", file.read(), re.MULTILINE | re.IGNORECASE)
    except OSError:
        found = None
    return (found[1] if found else _JOB_CONTAINER_DIRECTORIES).split(",")


def _data_path(path: str) -> Finding:
    """Where containers are; that of the caller stands for all users'."""
    fix = "a local disk for ENROOT_DATA_PATH, in enroot.conf: /var/tmp/penroot-$(id -u)"
    kind = filesystems.kind(path)
    if kind in filesystems.NETWORK:
        return Finding("warn", f"containers are in {path}, a network file system ({kind}): no overlay, slow", fix)
    there = _existing(path)
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return Finding("bad", f"containers are in {path}, mounted noexec: their programs cannot be executed", fix)
    nosuid = ", nosuid" if os.statvfs(there).f_flag & os.ST_NOSUID else ""
    return Finding("ok", f"containers are in {path} ({kind}{nosuid})")


_FEW, _MANY = 10_000, 100_000  # files of a small image, and of one with a framework or two


def inodes(paths: Iterable[str]) -> Iterator[Finding]:
    """Whether the files of images fit, as far as the file system and the quota of the caller go."""
    for path in paths:
        there = _existing(path)
        info = os.statvfs(there)
        free = [info.f_favail] if info.f_files else []  # 0: made as they are needed
        left = inode_quota(there)
        free += [] if left is None else [left]
        if not free:
            continue
        why = "your quota" if left is not None and left == min(free) else "the file system"
        if min(free) >= _MANY:
            yield Finding("ok", f"{path} has room for {min(free)} files")
            continue
        fix = "more inodes: setquota -u USER 0 0 0 0 " + there if why == "your quota" else "df -i, penroot cache prune"
        what = f"{path} has room for {min(free)} files by {why}: large images have {_MANY} and more"
        yield Finding("bad" if min(free) < _FEW else "warn", what, f"{fix}; or ENROOT_STORE_FORM=squashfs")


class _Quota(ctypes.Structure):
    """struct if_dqblk of quotactl(2)."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("bhard", "bsoft", "space", "ihard", "isoft", "inodes", "btime", "itime")
        ),
        ("valid", ctypes.c_uint32),
    )


_QUOTACTL_FD = 443  # the same on all architectures since Linux 5.14
_GET_USER_QUOTA = 0x800007 << 8


def inode_quota(path: str) -> int | None:
    """How many more files the caller may make on the file system of ``path``; None where nothing limits him."""
    libc = ctypes.CDLL(None, use_errno=True)
    quota = _Quota()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        failed = libc.syscall(_QUOTACTL_FD, fd, _GET_USER_QUOTA, os.getuid(), ctypes.byref(quota))
    finally:
        os.close(fd)
    limits = [limit for limit in (quota.ihard, quota.isoft) if limit]
    return max(0, min(limits) - quota.inodes) if not failed and limits else None


def users_home() -> str:
    """The home of whoever asks, or for root of some user: it stands for all."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_dir
    homes = [user.pw_dir for user in pwd.getpwall() if 1000 <= user.pw_uid < 60000]
    return next((home for home in homes if home.startswith("/home/")), "/home")


def root_squash(home: str) -> Iterator[Finding]:
    """Whether root may read homes: on NFS with root_squash it is nobody there, exports(5). Known to root alone."""
    if os.getuid() != 0:
        return
    try:
        os.listdir(home)
    except PermissionError:
        yield Finding(
            "warn",
            f"root cannot read {home} (root_squash?): what a step needs there is read as its user, "
            "but nothing of Slurm's own may be there",
            "keep the plugin, runtime_path and an importer out of home directories",
        )
    except FileNotFoundError:
        return
    else:
        yield Finding("ok", f"root can read {home}")


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
