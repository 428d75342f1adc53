"""User database: the caller exists inside, with a home directory.

Entries of the image stay, except those of the caller's name and _apt: without that
user apt does not try to drop privileges that nobody has. Who is in neither of the
shadow files that an image has is added, with no password: to PAM he would be
no user. Nothing comes from those of the host. What the image says of new users, in
/etc/login.defs and /etc/default/useradd, holds.
"""

from __future__ import annotations

import grp
import os

from enroot_py.base import log, paths
from enroot_py.base.errors import HookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

OVERFLOW = 65534  # user_namespaces(7): who is not mapped


def run(context: Context) -> None:
    user = context.user
    shell = user.pw_shell
    if not context.exists(shell):
        shell = defaults(context, "/etc/default/useradd").get("SHELL") or "/bin/sh"
    passwd = [
        f"root:x:0:0:root:/root:{shell}",
        f"nobody:x:{OVERFLOW}:{OVERFLOW}:nobody:/:/sbin/nologin",
    ]
    if user.pw_uid:
        passwd.append(entry(user.pw_name, user.pw_uid, user.pw_gid, user.pw_gecos, home(user.pw_dir), shell))
    group = ["root:x:0:", f"nogroup:x:{OVERFLOW}:"]
    if user.pw_gid:
        group.append(entry(group_name(user.pw_gid), user.pw_gid, ""))
    for database, shadow, ours, unknown in (
        ("/etc/passwd", "/etc/shadow", passwd, ":*:::::::"),
        ("/etc/group", "/etc/gshadow", group, ":*::"),
    ):
        merged = merge(ours, context.read(database))
        context.write(database, merged)
        if entries := context.read(shadow):
            context.write(shadow, completed(entries, merged, unknown), 0o600)
    if not context.exists(user.pw_dir):
        welcome(context)


def entry(name: str, *fields: object) -> str:
    """Format a line of passwd(5) or group(5).

    Directory services, as sssd and winbind, give fields that no file can hold: a separator in one becomes a blank, as
    in getent(1) and putpwent(3).
    """
    return ":".join(str(field).replace(":", " ").replace("\n", " ") for field in (name, "x", *fields))


def home(directory: str) -> str:
    """Return the home directory as passwd(5) can hold it. Programs find any other by HOME alone."""
    if ":" in directory or "\n" in directory:
        log.warn(f"/etc/passwd cannot hold the home directory {directory!r} and has / instead; HOME is correct")
        return "/"
    return directory


def defaults(context: Context, *files: str) -> dict[str, str]:
    """``KEY VALUE`` or ``KEY=VALUE`` of login.defs(5) and useradd(8)."""
    values = {}
    for file in files:
        for line in os.fsdecode(context.read(file)).splitlines():
            words = line.replace("=", " ", 1).split()
            if len(words) > 1 and not line.startswith("#"):
                values[words[0]] = words[1]
    return values


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"group{gid}"


def merge(ours: list[str], theirs: bytes) -> bytes:
    """Our entries first, so that they are found by number; of theirs those whose name is still free."""
    names = {os.fsencode(entry.split(":")[0]) for entry in ours} | {b"_apt"}
    kept = [line for line in theirs.split(b"\n") if line.count(b":") > 1 and line.split(b":")[0] not in names]
    return b"\n".join([*map(os.fsencode, ours), *kept, b""])


def completed(entries: bytes, database: bytes, unknown: str) -> bytes:
    """A shadow file, shadow(5) or gshadow(5), with ``unknown`` behind each name of the ``database`` that it lacks."""
    known = {line.split(b":")[0] for line in entries.split(b"\n")}
    names = [line.split(b":")[0] for line in database.split(b"\n")[:-1]]
    lines = [name + unknown.encode() for name in names if name not in known and name[:1] not in b"+-"]
    return b"\n".join([entries.rstrip(b"\n"), *lines, b""]) if lines else entries


def welcome(context: Context) -> None:
    """A home directory and a mailbox for who has none, as useradd(8) makes them."""
    user = context.user
    wanted = defaults(context, "/etc/login.defs", "/etc/default/useradd")
    if wanted.get("CREATE_HOME", "yes") == "yes":
        try:
            umask = int(wanted.get("UMASK", "077"), 8)
        except ValueError:
            umask = 0o077
        try:
            # Not less than the owner needs: nobody else could help him.
            context.mkdir(user.pw_dir, 0o777 & ~umask | 0o700)
        except HookError as e:
            log.warn(f"there is no home directory: {e}")
            return
        skeleton = wanted.get("SKEL", "/etc/skel")
        try:
            paths.copy(context.root, skeleton, user.pw_dir)
        except (FileNotFoundError, NotADirectoryError):
            pass  # the home is empty
        except OSError as e:
            log.warn(f"{user.pw_dir} has not all of {skeleton} of the image: {e.strerror}")
    if wanted.get("CREATE_MAIL_SPOOL") == "yes":
        mailbox = f"{wanted.get('MAIL_DIR', '/var/mail')}/{user.pw_name.replace('/', '_')}"
        if not context.exists(mailbox):
            context.write(mailbox, b"")
