"""User database: the caller exists inside, with a home directory.

Entries of the image stay, except those that the caller's replace and _apt:
without that user apt does not try to drop privileges that nobody has. What the
image says of new users, in /etc/login.defs and /etc/default/useradd, holds.
"""

import grp
import os

from enroot_py import log, paths
from enroot_py.errors import HookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.hooks import Context

OVERFLOW = 65534  # user_namespaces(7): who is not mapped


def run(context: "Context") -> None:
    user = context.user
    shell = user.pw_shell
    if not context.exists(shell):
        shell = defaults(context, "/etc/default/useradd").get("SHELL") or "/bin/sh"
    passwd = [
        f"root:x:0:0:root:/root:{shell}",
        f"nobody:x:{OVERFLOW}:{OVERFLOW}:nobody:/:/sbin/nologin",
    ]
    if user.pw_uid:
        passwd.append(f"{user.pw_name}:x:{user.pw_uid}:{user.pw_gid}:{user.pw_gecos}:{user.pw_dir}:{shell}")
    group = ["root:x:0:", f"nogroup:x:{OVERFLOW}:"]
    if user.pw_gid:
        group.append(f"{group_name(user.pw_gid)}:x:{user.pw_gid}:")
    context.write("/etc/passwd", merge(passwd, context.read("/etc/passwd")))
    context.write("/etc/group", merge(group, context.read("/etc/group")))
    if not context.exists(user.pw_dir):
        welcome(context)


def defaults(context: "Context", *files: str) -> "dict[str, str]":
    """``KEY VALUE`` or ``KEY=VALUE`` of login.defs(5) and useradd(8)."""
    found = {}
    for file in files:
        for line in os.fsdecode(context.read(file)).splitlines():
            words = line.replace("=", " ", 1).split()
            if len(words) > 1 and not line.startswith("#"):
                found[words[0]] = words[1]
    return found


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"group{gid}"


def merge(ours: "list[str]", theirs: bytes) -> bytes:
    """Our entries first; of theirs those whose name and number are still free."""
    names = {entry.split(":")[0] for entry in ours} | {"_apt"}
    numbers = {entry.split(":")[2] for entry in ours}
    kept = []
    for line in os.fsdecode(theirs).splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[0] not in names and fields[2] not in numbers:
            kept.append(line)
    return os.fsencode("\n".join(ours + kept) + "\n")


def welcome(context: "Context") -> None:
    """A home directory and a mailbox for who has none, as useradd(8) makes them."""
    user = context.user
    said = defaults(context, "/etc/login.defs", "/etc/default/useradd")
    if said.get("CREATE_HOME", "yes") == "yes":
        try:
            umask = int(said.get("UMASK", "077"), 8)
        except ValueError:
            umask = 0o077
        try:
            # Not less than the owner needs: nobody else could help him.
            context.mkdir(user.pw_dir, 0o777 & ~umask | 0o700)
        except HookError as e:
            log.warn(f"there is no home directory: {e}")
            return
        skeleton = said.get("SKEL", "/etc/skel")
        try:
            paths.copy(context.root, skeleton, user.pw_dir)
        except (FileNotFoundError, NotADirectoryError):
            pass  # the home is empty
        except OSError as e:
            log.warn(f"{user.pw_dir} has not all of {skeleton} of the image: {e.strerror}")
    if said.get("CREATE_MAIL_SPOOL") == "yes":
        mailbox = f"{said.get('MAIL_DIR', '/var/mail')}/{user.pw_name}"
        if not context.exists(mailbox):
            context.write(mailbox, b"")
