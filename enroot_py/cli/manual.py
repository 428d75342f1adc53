"""Generate the manual pages from the tables of commands and settings: man-pages(7), groff_man(7)."""

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
        ("penroot import docker://ubuntu", "Import ubuntu from Docker Hub to ubuntu+latest.sqsh."),
        ("penroot import -o cuda.sqsh docker://nvcr.io#nvidia/cuda:12.4.0-base-ubuntu22.04", "Import from nvcr.io."),
        ("penroot import podman://localhost/mine", "Import an image that podman has built."),
    ),
    "create": (("penroot create --name box ubuntu+latest.sqsh", "Unpack an image as the container box."),),
    "load": (("penroot load --name box docker://ubuntu", "Create the container box without an image file."),),
    "digest": (("penroot digest docker://ubuntu:24.04", "Print the digest for docker://ubuntu@sha256:..."),),
    "inspect": (("penroot inspect docker://ubuntu", "Show layers, platform and configuration."),),
    "start": (
        ("penroot start ubuntu", "Run the image's command as yourself, read-only."),
        ("penroot start --root --rw ubuntu apt-get install -y git", "Be root inside, and keep changes."),
        ("penroot start -m /data:/mnt:none:bind,ro -e KEY=VALUE ubuntu+latest.sqsh ls /mnt", "Start an image file."),
        ("penroot start -m data.sqsh:/data:sqsh ubuntu ls /data", "Mount a squashfs file, read-only."),
        ("penroot start --detach --name job ubuntu make", "Run make in the background as the container job."),
        ("penroot start --explain ubuntu", "Print mounts, variables and hooks with their origins."),
    ),
    "login": (("penroot login -u jane registry.example.org < token", "Test a token and store it."),),
    "logout": (("penroot logout docker.io", "Remove the login for Docker Hub."),),
    "batch": (("#!/usr/bin/penroot batch", "First line of a script that has a line #ENROOT_ROOTFS=ubuntu."),),
    "exec": (
        ("penroot exec ubuntu bash", "Open a shell in the running container ubuntu."),
        ("penroot exec --timeout 60 --workdir /src job make", "Run make in /src for at most a minute."),
    ),
    "logs": (("penroot logs -f job", "Show the output of job until it ends."),),
    "stop": (("penroot stop --timeout 1 job", "End job: send SIGTERM, and send SIGKILL one second later."),),
    "wait": (("penroot wait job", "Wait until job has ended, and print its exit status."),),
    "cp": (("penroot cp job:/src/result .", "Copy a file or directory from the container job."),),
    "ps": (("penroot ps job", "List the processes of job."),),
    "list": (("penroot list --fancy", "List containers and their processes."),),
    "remove": (("penroot remove --force ubuntu", "Remove without a prompt."),),
    "export": (("penroot export --output mine.sqsh ubuntu", "Write the container with its changes to an image."),),
    "cache": (("penroot cache prune --keep 20G", "Remove the least recently used images, down to 20 GB."),),
    "completion": (("source <(penroot completion bash)", "Enable completion in this shell."),),
}
FILES = (
    ("/etc/enroot/enroot.conf, /etc/enroot/enroot.conf.d/*.conf", "Settings of the system, as enroot reads them."),
    ("/etc/enroot/penroot.yaml, /etc/enroot/penroot.yaml.d/*.yaml", "The same settings in YAML: penroot.yaml(5)."),
    ("/etc/enroot/registries.conf", "Certificates, mirrors and plain HTTP for each registry."),
    (
        "/etc/containers/{registries.conf,registries.conf.d/*.conf,certs.d/*,registries.d/*.yaml}",
        "The same in the form of podman and skopeo: containers-registries.conf(5). The rules http, mirror and ca in "
        "the file above take precedence.",
    ),
    (
        "/etc/enroot/policy.json",
        "Accepted images and their required signatures: containers-policy.json(5). Scopes of the transport "
        "squashfs are paths of squashfs files; scopes of dir are paths of containers that are plain directories.",
    ),
    ("/etc/enroot/{environ.d/*.env,mounts.d/*.fstab,hooks.d/*}", "Variables, mounts and hooks for every container."),
    (
        "~/.config/enroot/",
        "The user's own files, read after the system's. A policy.json there applies in addition to the system's.",
    ),
    ("~/.config/enroot/.credentials", "Registry logins in the form of netrc(5)."),
    ("~/.docker/config.json", "Logins of penroot login and docker login. REGISTRY_AUTH_FILE names another file."),
    ("~/.local/share/enroot/", "Containers."),
    ("~/.cache/enroot/", "The store of layers and images."),
)
VARIABLES = (
    ("ENROOT_*", "Settings, see penroot.yaml(5). penroot warns about names that look like typos."),
    ("PENROOT_DEBUG", "1 enables debug messages, and tracebacks of errors."),
)
STATUS = (
    ("0", "Success."),
    ("1", "Failure: stderr has a line [ERROR] with the cause, and usually a line [HINT] with a fix."),
    ("124", "exec: the command was ended by --timeout."),
    ("125", "start --detach, cp, logs, ps, stop, wait: penroot failed."),
    ("126", "start, exec: the command cannot be run. A command that runs sets the exit status itself."),
    ("127", "start, exec: the command does not exist."),
    ("128+N", "start --pid, exec: signal N ended the command."),
    ("130", "Interrupted."),
)


def write(pages: Iterable[tuple[str, str]], directory: str) -> list[str]:
    """Write pages to man1, man5 and so on in ``directory``, and return their paths. Raises OSError."""
    written = []
    for name, source in pages:
        folder = f"{directory}/man{name[-1]}"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
            f.write(source)
        written.append(f"{folder}/{name}")
    return written


def example() -> str:
    """Return a penroot.yaml with every setting at its default, commented out."""
    out = ["# Settings of penroot: see penroot.yaml(5). Copy to /etc/enroot/penroot.yaml and edit.\n"]
    for setting in all_settings().values():
        out.append(f"\n# {setting.doc} ({setting.kind})\n#{setting.name}: {json.dumps(setting.default)}\n")
    out.append("\n# variables for hooks and clients: MELLANOX_*, NVIDIA_*, SSL_CERT_*, proxies\n#environment: {}\n")
    return "".join(out)


def pages(root: click.Group) -> Iterator[tuple[str, str]]:
    """Yield name and source of every page."""
    yield "penroot.1", _main_page(root)
    examples = dict(EXAMPLES)
    for feature in plugged("manual"):
        examples |= getattr(feature, "EXAMPLES", {})
    for verb, command in sorted(root.commands.items()):
        if not command.hidden:
            more = sections_of_features(f"penroot-{verb}.1")
            more += [section("EXAMPLES", entries(examples[verb]))] if verb in examples else []
            see_also = "penroot(1), penroot.yaml(5)"
            yield f"penroot-{verb}.1", command_page(f"penroot {verb}", command, see_also, *more)
    yield "penroot.yaml.5", _settings_page()


def _main_page(root: click.Group) -> str:
    verbs = [(verb, command) for verb, command in sorted(root.commands.items()) if not command.hidden]
    rows = [(verb, f"{command.get_short_help_str(200)} See penroot-{verb}(1).") for verb, command in verbs]
    see_also = ", ".join((*(f"penroot-{verb}(1)" for verb, _ in verbs), "penroot.yaml(5)", "penroot-srun(7)"))
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
            section("SEE ALSO", text(see_also)),
        )
    )


def command_page(words: str, command: click.Command, see_also: str, *more: str) -> str:
    """Return the page of the command ``words``, with ``more`` sections."""
    of = _of_start if words in ("penroot start", "penroot batch") else _of_command
    usage, help_text, options = of(words, command)
    parts = (
        title(words.replace(" ", "-"), 1, (command.get_short_help_str(200) or "").rstrip(".")),
        section("SYNOPSIS", "\n.br\n".join(map(_escape, usage)) + "\n"),
        section("DESCRIPTION", text(help_text)),
        section("OPTIONS", entries(options)),
    )
    return "".join((*parts, *more, section("SEE ALSO", text(see_also))))


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")  # Python before 3.13 does not dedent docstrings


def _of_command(words: str, command: click.Command) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Return usage, description and options of a command and its subcommands."""
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
    """Return usage, description and options from the help text of start."""
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
                    "A mapping from names of settings to values. ${VAR}, ${VAR:-default} and "
                    f"{', '.join(f'$({command})' for command in COMMANDS)} are replaced; no shell is run. "
                    "The key environment maps variables for hooks and clients to values: MELLANOX_*, NVIDIA_*, "
                    "SSL_CERT_*, proxies and the site's own ENROOT_* variables.\n\n"
                    "Unknown keys and invalid values are errors, reported with file and line.\n\n"
                    "enroot.conf has the same settings in lines KEY VALUE or KEY=VALUE, with the names of the "
                    "variables as keys.\n\n"
                    "Precedence, highest first: options of the command line, directives #ENROOT_X=Y of a "
                    "configuration script, environment variables, the user's penroot.yaml.d, penroot.yaml, "
                    "enroot.conf.d and enroot.conf, the same files of the system, the default. penroot info shows "
                    "the origin of each value."
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
    """Return the sections that features add to a page."""
    return [
        section(heading, text(paragraphs) + entries(rows))
        for feature in plugged("manual")
        for where, heading, paragraphs, rows in getattr(feature, "SECTIONS", ())
        if where == page
    ]


def title(name: str, number: int, summary: str) -> str:
    """Return the header of a page."""
    return (
        f'.TH {name.upper()} {number} "" "penroot {__version__}" "penroot"\n'
        f".SH NAME\n{_escape(name)} \\- {_escape(summary[:1].lower() + summary[1:])}\n"
    )


def section(name: str, body: str) -> str:
    """Return a section of a page with its heading."""
    return f".SH {name}\n{body}"


def entries(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their meanings."""
    return "".join(f".TP\n{bold(name)}\n{_escape(meaning)}\n" for name, meaning in rows)


def text(paragraphs: str) -> str:
    """Return the text of a section. Blank lines separate ``paragraphs``."""
    return ".PP\n".join(_escape(" ".join(part.split())) + "\n" for part in paragraphs.split("\n\n") if part.strip())


def bold(words: str) -> str:
    return f"\\fB{_escape(words)}\\fR"


def _escape(text: str) -> str:
    out = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha").replace("'", "\\(aq")
    )
    return "\n".join("\\&" + line if line.startswith(".") else line for line in out.split("\n"))
