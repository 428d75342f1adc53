"""Manual pages, made of what the commands and the settings say of themselves. See man-pages(7), groff_man(7)."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import click

from enroot_py import __version__
from enroot_py.base.features import plugged
from enroot_py.cli import start
from enroot_py.config.table import UNUSED, all_settings
from enroot_py.config.words import COMMANDS

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "import": (
        ("penroot import docker://ubuntu", "The image ubuntu of Docker Hub, to ubuntu+latest.sqsh."),
        ("penroot import -o cuda.sqsh docker://nvcr.io#nvidia/cuda:12.4.0-base-ubuntu22.04", "From a registry."),
        ("penroot import podman://localhost/mine", "What podman has built."),
    ),
    "create": (("penroot create --name box ubuntu+latest.sqsh", "The container box, unpacked from the image."),),
    "load": (("penroot load --name box docker://ubuntu", "The container box, from the registry without an image."),),
    "digest": (("penroot digest docker://ubuntu:24.04", "What to pin: docker://ubuntu@sha256:..."),),
    "inspect": (("penroot inspect docker://ubuntu", "Layers, platform and configuration, without unpacking it."),),
    "start": (
        ("penroot start ubuntu", "What the image runs, as the caller, read-only."),
        ("penroot start --root --rw ubuntu apt-get install -y git", "Root inside, and changes are kept."),
        ("penroot start -m /data:/mnt:none:bind,ro -e KEY=VALUE ubuntu+latest.sqsh ls /mnt", "An image, directly."),
        ("penroot start -m data.sqsh:/data:sqsh ubuntu ls /data", "What a squashfs file holds, read-only."),
        ("penroot start --explain ubuntu", "What would be done, and why."),
    ),
    "login": (("penroot login -u jane registry.example.org < token", "The token, tried there and kept."),),
    "logout": (("penroot logout docker.io", "Docker Hub's login, forgotten."),),
    "batch": (("#!/usr/bin/penroot batch", "First line of a script with a line #ENROOT_ROOTFS=ubuntu."),),
    "exec": (("penroot exec ubuntu bash", "A shell in the container ubuntu, which runs."),),
    "list": (("penroot list --fancy", "Containers and what runs in them."),),
    "remove": (("penroot remove --force ubuntu", "Without a question."),),
    "export": (("penroot export --output mine.sqsh ubuntu", "The container with its changes, as an image."),),
    "cache": (("penroot cache prune --keep 20G", "Remove what was used longest ago, down to 20 GB."),),
    "completion": (("source <(penroot completion bash)", "For this shell; make install does it for all."),),
}
FILES = (
    ("/etc/enroot/enroot.conf, /etc/enroot/enroot.conf.d/*.conf", "Settings of the system, as enroot reads them."),
    ("/etc/enroot/penroot.yaml, /etc/enroot/penroot.yaml.d/*.yaml", "The same in the clean form: penroot.yaml(5)."),
    ("/etc/enroot/registries.conf", "Certificates, mirrors and plain HTTP of single registries."),
    (
        "/etc/enroot/policy.json",
        "Which images are let in, and whose signature they need: containers-policy.json(5). Its transport squashfs has "
        "the paths of squashfs files as scopes, and dir those of containers that are plain directories.",
    ),
    ("/etc/enroot/{environ.d/*.env,mounts.d/*.fstab,hooks.d/*}", "Variables, mounts and hooks of every container."),
    (
        "~/.config/enroot/",
        "The same files of the user, read after the system's. A policy.json there comes to that of the system.",
    ),
    ("~/.config/enroot/.credentials", "Logins to registries, as netrc(5). Those of docker login are used too."),
    (
        "~/.docker/config.json",
        "Logins of penroot login and docker login; REGISTRY_AUTH_FILE names another file.",
    ),
    ("~/.local/share/enroot/", "Containers."),
    ("~/.cache/enroot/", "The store of layers and images."),
)
VARIABLES = (
    ("ENROOT_*", "Settings, see penroot.yaml(5). A name that is nearly one of these is reported in a warning."),
    ("PENROOT_DEBUG", "With 1, say more, and of an error where in the program it arose."),
)
STATUS = (
    ("0", "It worked."),
    ("1", "It failed: a line [ERROR] on stderr says why, and a line [HINT] what to do."),
    ("126, 127", "start, exec: the command cannot be run, or is not there. Else its own status counts."),
    ("128+N", "start --pid, exec: the command was ended by signal N."),
    ("130", "Interrupted."),
)


def write(made: Iterable[tuple[str, str]], directory: str) -> list[str]:
    """Write pages to man1, man5 and so on of ``directory``, and return their paths. Raises OSError."""
    written = []
    for name, source in made:
        folder = f"{directory}/man{name[-1]}"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(source)
        written.append(f"{folder}/{name}")
    return written


def example() -> str:
    """A penroot.yaml with every setting at its default, commented out."""
    out = [
        "# Settings of penroot: see penroot.yaml(5). Copy to /etc/enroot/penroot.yaml, and change what should differ.\n"
    ]
    for setting in all_settings().values():
        out.append(f"\n# {setting.doc} ({setting.kind})\n#{setting.name}: {json.dumps(setting.default)}\n")
    out.append("\n# variables for hooks and clients: MELLANOX_*, NVIDIA_*, SSL_CERT_*, proxies\n#environment: {}\n")
    return "".join(out)


def pages(root: click.Group) -> Iterator[tuple[str, str]]:
    """Name and source of every page."""
    yield "penroot.1", _main_page(root)
    examples = dict(EXAMPLES)
    for feature in plugged("manual"):
        examples |= getattr(feature, "EXAMPLES", {})
    for verb, command in sorted(root.commands.items()):
        if not command.hidden:
            more = sections_of_features(f"penroot-{verb}.1")
            more += [section("EXAMPLES", entries(examples[verb]))] if verb in examples else []
            see = "penroot(1), penroot.yaml(5)"
            yield f"penroot-{verb}.1", command_page(f"penroot {verb}", command, see, *more)
    yield "penroot.yaml.5", _settings_page()


def _main_page(root: click.Group) -> str:
    verbs = [(verb, command) for verb, command in sorted(root.commands.items()) if not command.hidden]
    rows = [(verb, f"{command.get_short_help_str(200)} See penroot-{verb}(1).") for verb, command in verbs]
    see = ", ".join((*(f"penroot-{verb}(1)" for verb, _ in verbs), "penroot.yaml(5)", "penroot-srun(7)"))
    return "".join(
        (
            title("penroot", 1, "containers without root or daemon"),
            section("SYNOPSIS", bold("penroot") + " COMMAND [OPTION...] [ARGUMENT...]\n"),
            section("DESCRIPTION", text(_help(root))),
            section("COMMANDS", entries(rows)),
            section("EXIT STATUS", entries(STATUS)),
            section("ENVIRONMENT", entries(VARIABLES)),
            section("FILES", entries(FILES)),
            *sections_of_features("penroot.1"),
            section("SEE ALSO", text(see)),
        )
    )


def command_page(words: str, command: click.Command, see: str, *more: str) -> str:
    """The page of the command ``words``, with ``more`` sections."""
    of = _of_start if words in ("penroot start", "penroot batch") else _of_command
    usage, help_text, options = of(words, command)
    parts = (
        title(words.replace(" ", "-"), 1, (command.get_short_help_str(200) or "").rstrip(".")),
        section("SYNOPSIS", "\n.br\n".join(map(_escape, usage)) + "\n"),
        section("DESCRIPTION", text(help_text)),
        section("OPTIONS", entries(options)),
    )
    return "".join((*parts, *more, section("SEE ALSO", text(see))))


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")  # as Python 3.13 keeps a docstring, and earlier ones do not


def _of_command(words: str, command: click.Command) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Usage, description and options of a command and those within it."""
    context = click.Context(command, info_name=words, help_option_names=["-h", "--help"])
    usage = [" ".join((words, *command.collect_usage_pieces(context)))]
    options = _options(command, context)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        if inner.hidden:
            continue
        within = click.Context(inner, info_name=name, parent=context)
        usage.append(" ".join((f"{words} {name}", *inner.collect_usage_pieces(within))))
        options += [(name, _help(inner).replace("\n\n", "\n"))]  # an entry is one paragraph
        options += [(f"{name} {option}", meaning) for option, meaning in _options(inner, within)]
    return usage, _help(command), options


def _options(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    params = (parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option))
    records = (parameter.get_help_record(context) for parameter in params)
    return [record for record in records if record is not None]


def _of_start(words: str, command: click.Command) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Usage, description and options out of the help text of start."""
    help_text, _, table = start.help_text().partition("\n Options:\n")
    usage = [f"penroot {start.SYNOPSIS[words.split()[-1]]}"]
    options: list[tuple[str, str]] = []
    for line in table.splitlines():
        match = re.match(r" {3,8}(-\S.*?)(?: {2,}(.*))?$", line)
        if match:
            options.append((match[1], match[2] or ""))
        elif line.strip():
            name, meaning = options[-1]
            options[-1] = name, f"{meaning} {line.strip()}".strip()
    return usage, help_text, options


def _settings_page() -> str:
    rows = []
    for variable, setting in all_settings().items():
        default = f'"{setting.default}"' if setting.default else "empty"
        rows.append((f"{setting.name} ({setting.kind})", f"{setting.doc}. Default: {default}. Variable: {variable}."))
    example = "data_path: /local/${USER}/containers\ncache_limit: 200G\nmount_home: yes\n"
    example += "environment:\n  MELLANOX_VISIBLE_DEVICES: all\n"
    return "".join(
        (
            title("penroot.yaml", 5, "settings of penroot"),
            section(
                "DESCRIPTION",
                text(
                    "A mapping of settings by their names. ${VAR}, ${VAR:-default} and "
                    f"{', '.join(f'$({command})' for command in COMMANDS)} are replaced; no shell is run. "
                    "The key environment maps variables for hooks and clients to values: MELLANOX_*, NVIDIA_*, "
                    "SSL_CERT_*, proxies and ENROOT_* variables of the site's own.\n\n"
                    "An unknown key and a value that does not fit are errors, reported with file and line.\n\n"
                    "enroot.conf has the same settings in lines KEY VALUE or KEY=VALUE, under the names of the "
                    "variables.\n\n"
                    "A value comes from the first of these that has one: options of the command line, directives "
                    "#ENROOT_X=Y of a configuration script, variables of the environment, the user's penroot.yaml.d, "
                    "penroot.yaml, enroot.conf.d and enroot.conf, those of the system, the default. penroot info shows "
                    "where each value comes from."
                ),
            ),
            section("SETTINGS", entries(rows)),
            *sections_of_features("penroot.yaml.5"),
            section("ACCEPTED WITHOUT EFFECT", entries(UNUSED.items())),
            section("EXAMPLE", f".nf\n{_escape(example)}.fi\n"),
            section("SEE ALSO", text("penroot(1)")),
        )
    )


def sections_of_features(page: str) -> list[str]:
    """What features say on a page."""
    return [
        section(heading, text(paragraphs) + entries(rows))
        for feature in plugged("manual")
        for where, heading, paragraphs, rows in getattr(feature, "SECTIONS", ())
        if where == page
    ]


def title(name: str, number: int, what: str) -> str:
    """How a page begins."""
    return (
        f'.TH {name.upper()} {number} "" "penroot {__version__}" "penroot"\n'
        f".SH NAME\n{_escape(name)} \\- {_escape(what[:1].lower() + what[1:])}\n"
    )


def section(name: str, body: str) -> str:
    """A part of a page under its heading."""
    return f".SH {name}\n{body}"


def entries(rows: Iterable[tuple[str, str]]) -> str:
    """What there is, and what is said of each."""
    return "".join(f".TP\n{bold(name)}\n{_escape(meaning)}\n" for name, meaning in rows)


def text(paragraphs: str) -> str:
    """Paragraphs, separated by blank lines."""
    return ".PP\n".join(_escape(" ".join(part.split())) + "\n" for part in paragraphs.split("\n\n") if part.strip())


def bold(words: str) -> str:
    return f"\\fB{_escape(words)}\\fR"


def _escape(text: str) -> str:
    out = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha").replace("'", "\\(aq")
    )
    return "\n".join("\\&" + line if line.startswith(".") else line for line in out.split("\n"))
