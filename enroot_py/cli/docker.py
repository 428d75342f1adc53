"""Translate command lines of docker and podman to penroot."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# An option of docker run -> penroot's option. None: drop the option. "": see _OF_VALUE, because the value decides. A
# command line with any other option is not translated.
_FLAGS: dict[str, str | None] = {
    **dict.fromkeys(("--rm", "-i", "--interactive", "-t", "--tty", "--privileged", "--init", "--read-only"), None),
    **dict.fromkeys(("-d", "--detach"), "--detach"),
}
_VALUES: dict[str, str | None] = {
    **dict.fromkeys(("-v", "--volume", "--mount"), "--mount"),
    **dict.fromkeys(("-w", "--workdir"), "--workdir"),
    **dict.fromkeys(("-e", "--env"), "--env"),
    "--name": "--name",
    "--gpus": "--device",
    **dict.fromkeys(("-p", "--publish"), "--publish"),
    **dict.fromkeys(("-m", "--memory"), "--memory"),
    "--cpus": "--cpus",
    "--pids-limit": "--pids",
    **dict.fromkeys(("--shm-size", "--pull", "--platform"), None),
    **dict.fromkeys(("--ulimit", "--security-opt", "--cap-add", "-h", "--hostname", "--restart"), None),
    **dict.fromkeys(("-u", "--user", "--net", "--network", "--ipc", "--pid"), ""),
}
_OF_VALUE = {
    **dict.fromkeys((("-u", "0"), ("-u", "root"), ("--user", "0"), ("--user", "root")), "--root"),
    **dict.fromkeys((("--net", "none"), ("--network", "none")), "--net"),
    **dict.fromkeys((("--ipc", "private"), ("--ipc", "none")), "--ipc"),
}
_ENDING_SIGNALS = ("KILL", "TERM", "INT", "QUIT", "9", "15", "2", "3")


def translate(verb: str, words: Sequence[str]) -> str:
    """Translate a command line of docker to penroot, or return "" if there is no translation."""
    rest = list(words)
    if verb == "run":
        return _run(rest)
    if verb == "rm":
        force = ["--force"] if _take(rest, "-f", "--force") else []
        return shlex.join(["remove", *force, *rest]) if _are_names(rest) else ""
    if verb == "kill":
        signal = (_take_value(rest, "-s", "--signal") or "KILL").upper().removeprefix("SIG")
        return shlex.join(["stop", "--signal", signal, *rest]) if _are_names(rest) and signal in _ENDING_SIGNALS else ""
    if verb == "rmi":
        return shlex.join(["cache", "prune", *rest]) if _are_names(rest) else ""
    if verb == "pull" and len(rest) == 1 and _are_names(rest):
        return shlex.join(["import", image(rest[0])])
    return ""


def image(name: str) -> str:
    """Return the URI of an image that docker knows by ``name``."""
    if "://" in name or name.endswith(".sqsh"):
        return name
    registry, slash, path = name.partition("/")
    is_host = slash and ("." in registry or ":" in registry or registry == "localhost")
    return f"docker://{registry}#{path}" if is_host else f"docker://{name}"


def _run(rest: list[str]) -> str:
    """Translate ``docker run`` to ``penroot start --rw``, because docker's containers have a writable root."""
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        if name in _FLAGS and not equals:
            options += filter(None, [_FLAGS[name]])
            if value:
                rest.insert(0, f"-{value}")  # the letters after the first one, such as t of -it
            continue
        if name not in _VALUES:
            return ""
        value = value or (rest.pop(0) if rest else "")
        options += _option(name, value)
    if not rest:
        return ""
    target, command = image(rest[0]), rest[1:]
    if "--publish" in options:
        options.insert(0, "--net=pasta")
    if "--name" in options and "--detach" not in options:  # penroot names only containers in the background
        at = options.index("--name")
        del options[at : at + 2]
    return shlex.join(["start", "--rw", *options, target, *command])


def _option(name: str, value: str) -> list[str]:
    if name == "--gpus":
        return ["--device", f"nvidia.com/gpu={value}"]
    if name == "--mount":
        fields = dict(field.partition("=")[::2] for field in value.split(","))
        source = fields.get("source", fields.get("src", ""))
        target = fields.get("target", fields.get("dst", fields.get("destination", "")))
        return ["--mount", f"{source}:{target}" + (":ro" if {"readonly", "ro"} & fields.keys() else "")]
    option = _VALUES[name]
    if option == "":
        option = _OF_VALUE.get((name, value))
        return [option] if option else []
    return [option, value] if option else []


def _take(words: list[str], *names: str) -> bool:
    """Remove a flag from ``words``. Return whether ``words`` had it."""
    flags = [word for word in words if word in names]
    words[:] = [word for word in words if word not in names]
    return bool(flags)


def _take_value(words: list[str], *names: str) -> str:
    """Remove an option and its value from ``words``. Return the value, or "" if ``words`` had no such option."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            if not equals:
                value = words[at + 1] if at + 1 < len(words) else ""
            del words[at : at + (1 if equals else 2)]
            return value
    return ""


def _are_names(words: list[str]) -> bool:
    return bool(words) and not any(word.startswith("-") for word in words)
