"""Explain why execve(2) fails for a file: the file, or the interpreter in its #! line or ELF header, cannot run.

Files of other formats get no explanation, because the kernel may have another way to run them. The functions run in a
container, where no module can be imported any more. Sources: execve(2), elf(5), the kernel's binfmt_script.c,
binfmt_elf.c and binfmt-misc.rst.
"""

from __future__ import annotations

import errno
import os
import stat

# ELF class (1: 32 bits, 2: 64 bits) -> (e_machine by machine, e_phoff, e_phnum, size of a program header, p_offset,
# p_filesz). A field of a header is given as (offset, size).
_LAYOUTS = {
    1: ({"x86_64": 3, "aarch64": 40}, (28, 4), (44, 2), 32, (4, 4), (16, 4)),
    2: ({"x86_64": 62, "aarch64": 183}, (32, 8), (56, 2), 56, (8, 8), (32, 8)),
}
_PT_INTERP = 3
# e_machine -> the machine, and another machine whose kernel can run its programs too, or ""
_MACHINES = {
    3: ("i386", "x86_64"),
    21: ("ppc64le", ""),
    22: ("s390x", ""),
    40: ("arm", "aarch64"),
    62: ("x86_64", ""),
    183: ("aarch64", ""),
    243: ("riscv64", ""),
    258: ("loongarch64", ""),
}
_BINFMT = "sys/fs/binfmt_misc"
_LINE_BYTES, _MAX_HEADERS, _MAX_LINKS, _MAX_SCRIPTS = 256, 64, 40, 5
_UNQUOTED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-"
_MISSING = (errno.ENOENT, errno.ENOTDIR)


def explain(path: str, proc: int = -1) -> str:
    """Return why the kernel cannot execute ``path``, if the path or an interpreter is at fault; else "".

    After a failed execve(2), call this without ``proc``. Before execve(2), give a descriptor of the node's /proc: a
    program for another machine is then accepted if the node has an emulator.
    """
    try:
        reason = _explain(path, proc)
    except (OSError, ValueError, IndexError):
        return ""  # the file has changed meanwhile, or /proc is not the kernel's
    return reason.replace("\n", "\\n")  # an image chooses these words: keep them on one line


def _explain(path: str, proc: int) -> str:
    if reason := _closed(f"{os.strerror(errno.EACCES)}: it", path):
        return reason
    if error := _error(path):
        return _missing(f"{os.strerror(error)}: it", path, named=True)
    subject = "it"
    for _ in range(_MAX_SCRIPTS):  # an interpreter may be a script
        name = _interpreter(path)
        if not name:
            break
        if reason := _broken(path, name):
            return reason
        path, subject = name, f"its interpreter {name}"
    return _foreign(subject, path, proc)


def explain_in(workdir: str, name: str, search: str, proc: int) -> str:
    """Enter ``workdir``, and return why slurmstepd cannot run ``name``, which it looks up in the PATH ``search``.

    ``proc`` is a descriptor of the node's /proc. Returns "" if the program can run, or if this is unknown.
    """
    try:
        os.chdir(workdir)
    except OSError:
        return ""  # the task itself fails with this error
    path = _find(name, search)
    reason = explain(path, proc) if path else ""
    return f"cannot run {path}: {reason}" if reason else ""


def _find(name: str, search: str) -> str:
    """Return the file that slurmstepd finds, else the first dangling link, else "". Source: Slurm's build_path()."""
    if "/" in name:
        return name
    dangling = ""
    for path in (f"{directory}/{name}" for directory in search.split(":")):
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                return path
        except OSError:
            if not dangling and os.path.lexists(path):
                dangling = path
    return dangling


def _foreign(subject: str, path: str, proc: int) -> str:
    """Return an error if a program is for another machine, unless ``proc`` is given and an emulator may run it."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        head = os.pread(fd, _LINE_BYTES, 0)
    finally:
        os.close(fd)
    number = int.from_bytes(head[18:20], "big" if head[5:6] == b"\2" else "little")
    machine, machines = os.uname().machine, _MACHINES.get(number, ()) if head.startswith(b"\x7fELF") else ()
    if not machines or machine in machines or proc >= 0 and _may_be_emulated(head, proc):
        return ""
    return (
        f"{subject} is for {machines[0]}, and this node is {machine}: use an image for {machine}, "
        "or register an emulator in binfmt_misc with the flag F"
    )


def _may_be_emulated(head: bytes, proc: int) -> bool:
    """Return whether an entry of binfmt_misc fits a program. If a pod's /proc hides the entries, return True."""
    directory = os.open(_BINFMT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        names = os.listdir(directory)
        if "register" not in names:
            return True
        return any(_fits(head, name, directory) for name in names if name not in ("register", "status"))
    finally:
        os.close(directory)


def _fits(head: bytes, name: str, directory: int) -> bool:
    """Return whether an entry of binfmt_misc is enabled and has the magic number of a program."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        words = dict(line.partition(" ")[::2] for line in os.read(fd, 4096).decode().splitlines())
    finally:
        os.close(fd)
    magic, offset = bytes.fromhex(words.get("magic", "")), int(words.get("offset", 0))
    mask = bytes.fromhex(words["mask"]) if "mask" in words else b"\xff" * len(magic)
    part = head[offset : offset + len(magic)]
    masked = [(a & m, b & m) for a, b, m in zip(part, magic, mask, strict=False)]
    return "enabled" in words and len(part) == len(magic) > 0 and all(a == b for a, b in masked)


def _error(path: str) -> int:
    try:
        os.stat(path)
    except OSError as e:
        return e.errno or 0
    return 0


def _broken(script: str, name: str) -> str:
    """Return what is wrong with the interpreter of a script or program, or ""."""
    if name.endswith("\r") and _error(name) in _MISSING:
        return (
            f"the first line ends in CR LF, so its interpreter is '{name[:-1]}\\r': convert it: "
            f"sed -i 's/\\r$//' {_quoted(script)}"
        )
    subject = f"its interpreter {name}"
    return _closed(subject, name) or _missing(subject, name)


def _closed(subject: str, name: str) -> str:
    """Return why an existing file cannot be executed, or ""."""
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return ""
    if not stat.S_ISREG(mode):
        return f"{subject} is not a regular file"
    if os.access(name, os.X_OK):
        return ""
    if not mode & 0o111:
        return f"{subject} is not executable"
    if not os.statvfs(name).f_flag & os.ST_NOEXEC:
        return f"{subject} cannot be executed by this user"
    return f"{subject} is on a file system that is mounted noexec{_mount_of(os.path.realpath(name))}"


def _missing(subject: str, name: str, *, named: bool = False) -> str:
    """Return why a path leads to no file, or "" if unknown.

    If the user has ``named`` the path, they know its name: report only where a link leads and which mount covers it.
    """
    error = _error(name)
    if error == errno.EACCES and not named:
        return f"{subject} cannot be reached: {os.strerror(error)}"
    if error == errno.ELOOP:
        return f"{subject} is a link to itself"
    if error not in _MISSING:
        return ""
    target, parent, links = _follow(name)
    mount = _mount_of(parent)
    if links and (not named or mount or os.path.islink(name)):
        return f"{subject} leads to {target}, which does not exist in the container{mount}"
    return "" if named else f"{subject} does not exist in the container{mount}"


def _follow(path: str) -> tuple[str, str, int]:
    """Follow the links of a path that leads to no file.

    Returns the path without links, the existing part of this path, and the number of links.
    """
    if not path.startswith("/"):
        return path, "", 0
    resolved, links = "", 0
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part == "..":
            resolved = resolved.rpartition("/")[0]
        elif part not in ("", "."):
            link, error = "", 0
            try:
                link = os.readlink(f"{resolved}/{part}")
            except OSError as e:
                error = e.errno or 0
            links += link != ""
            if error not in (0, errno.EINVAL) or links > _MAX_LINKS:
                return "/".join((resolved, part, *reversed(parts))), resolved, links
            if link:
                resolved = "" if link.startswith("/") else resolved
                parts += link.split("/")[::-1]
            else:
                resolved += f"/{part}"
    return path, resolved, links


def _mount_of(path: str) -> str:
    """Return which mount shows the directory ``path``, as the end of a message, or "" for the root mount."""
    target, shown = "/", ""
    try:
        with open("/proc/self/mountinfo", "rb") as f:
            lines = os.fsdecode(f.read()).split("\n")[:-1]
    except OSError:
        return ""
    for line in lines:
        root, mount_point = line.split(" ")[3:5]
        if mount_point != "/" and len(mount_point) >= len(target) and f"{path}/".startswith(f"{mount_point}/"):
            target, shown = mount_point, f"{line.partition(' - ')[2].split(' ')[1]}[{root}]"
    return f"; {target} is mounted from {shown}" if shown else ""


def _interpreter(path: str) -> str:
    """Return the interpreter that a program of this machine or a script names, or ""."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        head = os.pread(fd, _LINE_BYTES, 0)
        if head.startswith(b"#!"):
            return os.fsdecode(_of_script(head[2:].lstrip(b" \t")))
        return os.fsdecode(_of_elf(fd, head)) if head.startswith(b"\x7fELF") else ""
    except (OSError, OverflowError):
        return ""
    finally:
        os.close(fd)


def _of_script(line: bytes) -> bytes:
    end = next((i for i, byte in enumerate(line) if byte in b" \t\n\0"), 0)
    return line[:end]


def _of_elf(fd: int, head: bytes) -> bytes:
    """Return the loader in the first PT_INTERP header."""
    if len(head) < 64 or head[4] not in _LAYOUTS:
        return b""
    machine, phoff, phnum, size, offset, filesz = _LAYOUTS[head[4]]
    if _number(head, (18, 2)) != machine.get(os.uname().machine):
        return b""
    for i in range(min(_number(head, phnum), _MAX_HEADERS)):
        part = os.pread(fd, size, _number(head, phoff) + i * size)
        if len(part) == size and _number(part, (0, 4)) == _PT_INTERP:
            length = _number(part, filesz)
            name = os.pread(fd, length, _number(part, offset)) if 1 < length <= 4096 else b""
            return name.partition(b"\0")[0] if name.endswith(b"\0") and len(name) == length else b""
    return b""


def _number(data: bytes, field: tuple[int, int]) -> int:
    at, size = field
    return int.from_bytes(data[at : at + size], "little")  # x86_64 and aarch64 are little-endian


def _quoted(path: str) -> str:
    """Quote a path for sh(1) if necessary."""
    return path if all(c in _UNQUOTED for c in path) else "'" + path.replace("'", "'\\''") + "'"
