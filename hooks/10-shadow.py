"""Add the caller to the image's user database, with a home directory.

Entries of the image stay, except those with the names of our entries (the caller, root, nobody, nogroup) and the user
_apt. Without _apt, apt does not try to drop privileges, which would fail in a container. If the image has shadow files,
missing users and groups are added to them without a password, because PAM rejects users without a shadow entry. Nothing
is copied from the host's shadow files. /etc/login.defs and /etc/default/useradd of the image apply.
"""

from __future__ import annotations

import os

from enroot_py.base import log, paths
from enroot_py.base.errors import HookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

OVERFLOW_ID = 65534  # the ID of unmapped users and groups: user_namespaces(7)


def run(context: Context) -> None:
    user = context.user
    shell = user.pw_shell
    if not context.exists(shell):
        shell = defaults(context, "/etc/default/useradd").get("SHELL") or "/bin/sh"
    passwd = [
        f"root:x:0:0:root:/root:{shell}",
        f"nobody:x:{OVERFLOW_ID}:{OVERFLOW_ID}:nobody:/:/sbin/nologin",
    ]
    if user.pw_uid:
        passwd.append(entry(user.pw_name, user.pw_uid, user.pw_gid, user.pw_gecos, home(user.pw_dir), shell))
    group = ["root:x:0:", f"nogroup:x:{OVERFLOW_ID}:"]
    if user.pw_gid:
        group.append(entry(context.group, user.pw_gid, ""))
    for database, shadow, ours, suffix in (
        ("/etc/passwd", "/etc/shadow", passwd, ":*:::::::"),
        ("/etc/group", "/etc/gshadow", group, ":*::"),
    ):
        merged = merge(ours, context.read(database))
        context.write(database, merged)
        if entries := context.read(shadow):
            context.write(shadow, completed(entries, merged, suffix), 0o600)
    if not context.exists(user.pw_dir):
        create_home(context)


def entry(name: str, *fields: object) -> str:
    """Format a line of passwd(5) or group(5).

    Directory services such as sssd and winbind may return fields with separators. Each separator becomes a blank,
    as in getent(1) and putpwent(3).
    """
    return ":".join(str(field).replace(":", " ").replace("\n", " ") for field in (name, "x", *fields))


def home(directory: str) -> str:
    """Return the home directory, or / if passwd(5) cannot hold it. In that case only the variable HOME names it."""
    if ":" in directory or "\n" in directory:
        log.warn(f"/etc/passwd cannot hold the home directory {directory!r} and has / instead; HOME is correct")
        return "/"
    return directory


def defaults(context: Context, *files: str) -> dict[str, str]:
    """Read ``KEY VALUE`` or ``KEY=VALUE`` lines of login.defs(5) and useradd(8)."""
    values = {}
    for file in files:
        for line in os.fsdecode(context.read(file)).splitlines():
            words = line.replace("=", " ", 1).split()
            if len(words) > 1 and not line.startswith("#"):
                values[words[0]] = words[1]
    return values


def merge(ours: list[str], content: bytes) -> bytes:
    """Put our entries before the image's entries with other names, so that a search by number finds ours."""
    names = {os.fsencode(entry.split(":")[0]) for entry in ours} | {b"_apt"}
    kept = [line for line in content.split(b"\n") if line.count(b":") > 1 and line.split(b":")[0] not in names]
    return b"\n".join([*map(os.fsencode, ours), *kept, b""])


def completed(entries: bytes, database: bytes, suffix: str) -> bytes:
    """Add NAME + ``suffix`` to a shadow(5) or gshadow(5) file, for each name that only ``database`` has."""
    known = {line.split(b":")[0] for line in entries.split(b"\n")}
    names = [line.split(b":")[0] for line in database.split(b"\n")[:-1]]
    lines = [name + suffix.encode() for name in names if name not in known and name[:1] not in b"+-"]
    return b"\n".join([entries.rstrip(b"\n"), *lines, b""]) if lines else entries


def create_home(context: Context) -> None:
    """Create a home directory and a mailbox, as useradd(8) does."""
    user = context.user
    settings = defaults(context, "/etc/login.defs", "/etc/default/useradd")
    if settings.get("CREATE_HOME", "yes") == "yes":
        try:
            umask = int(settings.get("UMASK", "077"), 8)
        except ValueError:
            umask = 0o077
        try:
            # Always give the owner access: the container has no other user who could restore it.
            context.mkdir(user.pw_dir, 0o777 & ~umask | 0o700)
        except HookError as e:
            log.warn(f"the container has no home directory: {e}")
            return
        skeleton = settings.get("SKEL", "/etc/skel")
        try:
            paths.copy(context.root, skeleton, user.pw_dir)
        except (FileNotFoundError, NotADirectoryError):
            pass  # the home is empty
        except OSError as e:
            log.warn(f"cannot copy all of {skeleton} of the image to {user.pw_dir}: {e.strerror}")
    if settings.get("CREATE_MAIL_SPOOL") == "yes":
        mailbox = f"{settings.get('MAIL_DIR', '/var/mail')}/{user.pw_name.replace('/', '_')}"
        if not context.exists(mailbox):
            context.write(mailbox, b"")
