"""Prepare a login shell (ENROOT_LOGIN_SHELL) as the image's /etc/login.defs demands.

Run this before the switch to the new root: afterwards no module can be imported. Sources: login(1), login.defs(5),
locale.conf(5), lastlog(8), utmp(5).
"""

from __future__ import annotations

import os
import struct
import time
from _collections_abc import Mapping

from enroot_py.base import log, paths
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pwd import struct_passwd

_LOCALE = frozenset(
    "LANG LANGUAGE LC_CTYPE LC_NUMERIC LC_TIME LC_COLLATE LC_MONETARY LC_MESSAGES LC_PAPER LC_NAME LC_ADDRESS "
    "LC_TELEPHONE LC_MEASUREMENT LC_IDENTIFICATION".split()
)
_LASTLOG = "=i32s256s"
_UTMP = "=hxxi32s4s32s256shhiii16s20s"
_USER_PROCESS = 7  # utmp(5)


def prepare(root: int, environ: dict[str, str], *, user: struct_passwd, as_root: bool, has_command: bool) -> int | None:
    """Complete ``environ``, set limits, and print the login messages. Return the umask, or None to keep the caller's.

    ``user`` is the caller. With ``as_root``, the program is root in the container. With ``has_command``, print no
    messages. Raises ContainerError if logins are closed.
    """
    defs = _pairs(root, "/etc/login.defs")
    file = defs.get("NOLOGINS_FILE", "/etc/nologin")
    closed = _read(root, file)
    if closed is not None and not as_root:
        raise ContainerError(
            f"logins are closed: {closed.strip() or 'no reason is given'}", hint=f"see {file} in the container"
        )
    path = defs.get("ENV_SUPATH" if as_root else "ENV_PATH", "").removeprefix("PATH=")
    if path:
        environ.setdefault("PATH", path)
    zone = defs.get("ENV_TZ", "")
    if zone.startswith("/"):
        zone = (_read(root, zone) or "").split("\n")[0]
    if zone.removeprefix("TZ="):
        environ.setdefault("TZ", zone.removeprefix("TZ="))
    for key, value in _pairs(root, "/etc/locale.conf").items():
        if key in _LOCALE:
            environ.setdefault(key, value.strip("\"'"))
    if defs.get("MAIL_CHECK_ENAB") == "yes" and defs.get("MAIL_DIR") and not as_root:
        environ.setdefault("MAIL", f"{defs['MAIL_DIR']}/{user.pw_name}")
    if defs.get("LASTLOG_ENAB") == "yes":
        _record(root, user.pw_uid, user.pw_name)
    _limit(defs.get("ULIMIT", ""))
    if not has_command and os.isatty(0):
        _message(root, defs)
    mask = defs.get("UMASK", "")
    return int(mask, 8) & 0o777 if mask and not mask.strip("01234567") else None


def _pairs(root: int, path: str) -> dict[str, str]:
    """Parse ``KEY VALUE`` or ``KEY=VALUE`` lines. The first separator counts, as in ENV_PATH PATH=/bin."""
    pairs = {}
    for line in (_read(root, path) or "").splitlines():
        cut = min((at for at in map(line.find, " \t=") if at >= 0), default=-1)
        if cut > 0 and not line.startswith("#"):
            pairs[line[:cut]] = line[cut + 1 :].strip()
    return pairs


def _read(root: int, path: str) -> str | None:
    try:
        return os.fsdecode(paths.read(root, path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        log.warn(f"{path} of the image is not read: {e.strerror}")
        return None


def _limit(blocks: str) -> None:
    """Limit the size of files to ``blocks`` of 512 bytes, unless the caller's hard limit is lower."""
    if not blocks.isdecimal():
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = int(blocks) * 512
    if hard == resource.RLIM_INFINITY or limit <= hard:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _record(root: int, uid: int, name: str) -> None:
    """Write entries for last(1) and lastlog(8), if the root filesystem is writable."""
    line = os.ttyname(0).removeprefix("/dev/").encode() if os.isatty(0) else b""
    now = int(time.time())
    try:
        os.close(paths.make_file(root, "/var/log/lastlog"))
        with Fd(paths.open_regular(root, "/var/log/lastlog", os.O_WRONLY)) as fd:
            os.pwrite(fd, struct.pack(_LASTLOG, now, line, b"localhost"), uid * struct.calcsize(_LASTLOG))
        with Fd(paths.open_regular(root, "/var/log/wtmp", os.O_WRONLY | os.O_APPEND)) as fd:
            record = (_USER_PROCESS, os.getpid(), line, line[-4:], os.fsencode(name), b"", 0, 0, 0, now, 0, b"", b"")
            os.write(fd, struct.pack(_UTMP, *record))
    except OSError:
        return  # login(1) too goes on without the records


def _message(root: int, defs: Mapping[str, str]) -> None:
    """Print the message of the day."""
    hush = defs.get("HUSHLOGIN_FILE", "")
    if hush.startswith("/") and paths.exists(root, hush):
        return
    for path in filter(None, defs.get("MOTD_FILE", "").split(":")):
        os.write(1, (_read(root, path) or "").encode("utf-8", "surrogateescape"))
