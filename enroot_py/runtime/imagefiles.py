"""The files that make a root filesystem an enroot image, made from an OCI image config.

/etc/rc, /etc/rc.local, /etc/fstab and /etc/environment travel inside images. Sources:
enroot(1), image format; OCI image specification, "Image Configuration".

A value in /etc/environment stands as it is, with newlines made spaces. Where that, or what
a start does to the line (it replaces ``${VAR}`` and strips outer quotes and spaces), changes
the value, a comment that enroot skips comes first and says it exactly, with ``\\\\`` and
``\\n`` for a backslash and a newline::

    # penroot-exact: MOTD=one\\ntwo
    MOTD=one two

The comment counts only while the line after it is the one it came with, so that an edited
line is believed. On the start path: no re, no json.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from enroot_py.runtime.rc import Exec

_EXACT = "# penroot-exact: "


def decode_environment(text: str, read: Callable[[str], str] | None = None) -> dict[str, str]:
    """The variables of an image's /etc/environment; lines that are not ``KEY=VALUE`` mean nothing.

    ``read`` makes of a value what it means, unless the comment before it says it exactly.
    """
    environ: dict[str, str] = {}
    exact = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            exact = line[len(_EXACT) :] if line.startswith(_EXACT) else ""
            continue
        line = line.lstrip()
        key, equals, value = line.partition("=")
        if equals and key:
            meant = _unescape(exact)
            if meant.startswith(key + "=") and _flat(meant) == line:
                environ[key] = meant[len(key) + 1 :]
            else:
                environ[key] = read(value) if read else value
        exact = ""
    return environ


def environment(variables: Mapping[str, str]) -> str:
    """/etc/environment, from which decode_environment() reads ``variables`` back exactly."""
    out = []
    for key, value in variables.items():
        line = f"{key}={value}"
        if "${" in value or _flat(line) != line or value.strip() != value or value[:1] in ("'", '"'):
            out.append(_EXACT + line.replace("\\", "\\\\").replace("\n", "\\n") + "\n")
        out.append(_flat(line) + "\n")
    return "".join(out)


def _flat(line: str) -> str:
    return line.replace("\n", " ")


def _unescape(text: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in text.split("\\\\"))


def rc(provenance: str, labels: Mapping[str, str], run: Exec) -> str:
    """/etc/rc: provenance and labels as comments, then what the image runs, every word quoted.

    Byte for byte what enroot writes, where that means what the config says.
    """
    workdir = f'"{run.workdir}"' if not set(run.workdir) & set('"$`\\\n') else quote(run.workdir)
    entrypoint = " ".join(map(quote, run.entrypoint))
    command = " ".join(map(quote, run.command))
    comments = [f"enroot-provenance: {provenance}", *(f"{key} {value}" for key, value in labels.items())]
    return (
        "".join(f"# {_one_line(comment)}\n" for comment in comments)
        + f"""
mkdir -p {workdir} 2> /dev/null
cd {workdir} && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec {entrypoint} "$@"
else
    exec {entrypoint} {command}
fi
"""
    )


RC_LOCAL = """\
# Sourced by /etc/rc when the container starts: change the environment, the
# positional parameters or the working directory of its command here.
"""


def fstab(volumes: Iterable[str]) -> str:
    """/etc/fstab: each volume is a writable bind mount of itself."""
    lines = []
    for volume in sorted(volumes):
        path = _fstab_word("/" + volume.strip("/"))
        lines.append(f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n")
    return "".join(lines)


def _fstab_word(text: str) -> str:
    """fstab(5): a space and its like are written in octal; ``$`` too, for ``${VAR}`` means something."""
    return "".join(c if c > " " and c not in "\\$\x7f" else f"\\{ord(c):03o}" for c in text)


def quote(word: str) -> str:
    """One word for sh(1): single quotes, in which nothing is special but the quote itself."""
    return "'" + word.replace("'", "'\\''") + "'"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def variables(env: Sequence[str]) -> dict[str, str]:
    """``config.Env`` of an image config as a mapping. A word without ``=`` sets nothing."""
    out = {}
    for word in env:
        key, equals, value = word.partition("=")
        if equals and key and "\n" not in key:
            out[key] = value
    return out
