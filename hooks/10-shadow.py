"""User database: the caller exists inside, with a home directory.

Entries of the image stay, except those that the caller's replace and _apt:
without that user apt does not try to drop privileges that nobody has.
"""

import grp
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.hooks import Context

OVERFLOW = 65534  # user_namespaces(7): who is not mapped


def run(context: "Context") -> None:
    user = context.user
    shell = user.pw_shell if context.exists(user.pw_shell) else "/bin/sh"
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
        make_home(context, user.pw_dir)


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


def make_home(context: "Context", home: str) -> None:
    context.mkdir(home, 0o700)
    for name in (".bashrc", ".profile", ".bash_logout", ".bash_profile"):
        content = context.read(f"/etc/skel/{name}")
        if content:
            context.write(f"{home}/{name}", content)
