"""Show the content of an environment file."""

from __future__ import annotations

import json
from collections.abc import Iterator

from enroot_py.cli.commands import shown_json
from enroot_py.features.environments import edf_parser, expansion
from enroot_py.features.environments.edf import Environment, FileEntry


def shown(file: Environment, form: str) -> bytes:
    """Return a file merged with its bases, as ``json`` or as a valid environment file, ``toml``. Raises ConfigError."""
    if form == "json":
        return shown_json(_plain(file))
    return "\n".join(map(_printable, _toml(file))).encode(errors="backslashreplace")


def _printable(line: str) -> str:
    """Escape the control characters in the comment of a line. The strings in the line are already escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _shown(file: Environment, entry: FileEntry) -> str:
    """Return a value in the syntax of a file. Variables of the image and the job stay unexpanded."""
    return entry.text if entry.key == "env" else file.value(entry).replace("$", "$$").replace("$${SLURM_", "${SLURM_")


def _caller_values(file: Environment, entry: FileEntry) -> str:
    """Return a comment with the caller's values of variables in an [env] entry, which the image's values override."""
    known = [name for name in dict.fromkeys(expansion.names(entry.text)) if name in file.host]
    values = " ".join(f"{name}={_quoted(file.host[name])}" for name in known if entry.key == "env")
    return f"; unless the image sets it: {values}" if values else ""


def _quoted(text: str) -> str:
    """Return a TOML basic string: a JSON string without terminal control characters."""
    return "".join(c if c.isprintable() else _escaped(c) for c in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}" if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"


def _toml(file: Environment) -> Iterator[str]:
    """Yield the lines of an equivalent file without bases, with the origins of the values as comments."""
    yield f"# {file.path}"
    for key in ("image", "workdir"):
        if entry := file.last(key):
            yield f"{key} = {_quoted(_shown(file, entry))}  # {entry.origin}"
    for key in ("entrypoint", "writable"):
        flag, origin = file.flag(key)
        yield f"{key} = {str(flag).lower()}  # {origin.removesuffix(f': {key}')}"
    for key in ("mounts", "devices"):
        if entries := list(file.all(key)):
            yield from (f"{key} = [", *(f"    {_quoted(_shown(file, e))},  # {e.origin}" for e in entries), "]")
    for key in ("env", "annotations"):
        if table := file.by_name(key):
            yield from ("", f"[{key}]")
            for name, entry in table.items():
                word = name if key == "env" else _quoted(name)
                yield f"{word} = {_quoted(_shown(file, entry))}  # {entry.origin}{_caller_values(file, entry)}"


def _plain(file: Environment) -> dict[str, object]:
    """Return the values and their origins as JSON data."""
    image, workdir = file.last("image"), file.last("workdir")
    content: dict[str, object] = {"image": file.value(image) if image else "", "workdir": ""}
    if workdir:
        content["workdir"] = file.value(workdir)
    for key in ("entrypoint", "writable"):
        content[key] = file.flag(key)[0]
    for key in ("mounts", "devices"):
        content[key] = [file.value(entry) for entry in file.all(key)]
    content["env"] = {name: entry.text for name, entry in file.by_name("env").items()}
    content["annotations"] = {name: file.value(entry) for name, entry in file.by_name("annotations").items()}
    origins: dict[str, object] = {key: entry.origin for key in edf_parser.KEYS if (entry := file.last(key))}
    for key in ("mounts", "devices"):
        origins[key] = [entry.origin for entry in file.all(key)]
    for key in ("env", "annotations"):
        origins[key] = {name: entry.origin for name, entry in file.by_name(key).items()}
    return {**content, "origins": origins}
