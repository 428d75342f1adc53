"""A site's bash hooks and the configuration scripts of ``start --conf``: the one place where a start runs a shell.

They run in the container's namespaces before the root is switched, with all
capabilities there, as enroot runs them. Source: enroot(1), configuration.
"""

import os
from _collections_abc import Mapping

from enroot_py import ENROOT_VERSION, configs, environ, hooks, linux, log, mounts
from enroot_py.errors import ConfigError, HookError
from enroot_py.settings import SETTINGS, Settings, assignment, base_directories, check_key, expand, sysconf_path

_BASH = "/bin/bash"
_HERE = os.path.dirname(os.path.abspath(__file__))


class Outcome:
    """What the scripts said: mounts to do now and later, and the command script, if they define one."""

    __slots__ = ("now", "later", "rc")

    def __init__(self, now: "list[mounts.Mount]", later: "list[mounts.Mount]", rc: "str | None") -> None:
        self.now = now
        self.later = later
        self.rc = rc


def directives(conf: str, host: "Mapping[str, str]") -> "dict[str, tuple[str, str]]":
    """The lines ``#ENROOT_NAME=VALUE`` of a configuration script, which are settings, and where they stand.

    Raises ConfigError.
    """
    try:
        with open(conf, "rb") as f:
            text = os.fsdecode(f.read())
    except OSError as e:
        raise ConfigError(f"cannot read {conf}: {e.strerror}", hint="--conf names a bash script") from e
    variables = {**base_directories(host), **host}
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#") or not line[1:].lstrip().startswith("ENROOT_"):
            continue
        key, value = assignment(line[1:].strip())
        origin = f"{conf}:{number}"
        if key != "ENROOT_ROOTFS":
            check_key(key, origin)
        try:
            found[key] = expand(value, variables), origin
        except ValueError as e:
            raise ConfigError(f"{origin}: {key}: {e}") from None
    return found


def site_hooks(settings: Settings, host: "Mapping[str, str]") -> "list[str]":
    """Executable ``hooks.d/*.sh`` of the system, then the user; not those that ours of the same name stand for."""
    ours = {name.removesuffix(".py") for name in os.listdir(hooks.STANDARD)}
    found = []
    for directory in (sysconf_path(host) + "/hooks.d", settings.config_path + "/hooks.d"):
        for name in sorted(configs.names(directory)):
            path = f"{directory}/{name}"
            if name.endswith(".sh") and name.removesuffix(".sh") not in ours and os.access(path, os.X_OK):
                found.append(path)
    return found


def run(conf: str, paths: "list[str]", context: hooks.Context, scratch: str, command: "tuple[str, ...]") -> Outcome:
    """Run them. Changes the environment of ``context``. Raises HookError that names what failed."""
    out = scratch + "/hooks"
    os.mkdir(out)
    files = {name: f"{out}/{name}" for name in ("environ", "fstab", "mounts", "rc", "failed")}
    with open(files["environ"], "w") as f:
        f.writelines(f"{key}={value}\n" for key, value in context.environ.items() if "\n" not in value)
    open(files["fstab"], "w").close()
    if log.explain:
        for path in (*paths, *filter(None, (conf,))):
            log.explain(f"hook     {path}")
    argv = [_BASH, hooks.STANDARD + "/driver.sh", conf, out, str(len(paths)), *paths, *command]
    status = _execute(argv, _environ(context, files))
    if status:
        failed = _read(files["failed"]).strip() or conf
        error = HookError(f"hook {failed} failed with status {status}", hint="its own messages are above")
        if failed not in paths:  # what a configuration exits with is for whoever starts it
            error.exit_code = status if status > 0 else 128 - status
        raise error
    for line in _read(files["environ"]).splitlines():
        key, equals, value = line.lstrip().partition("=")
        if equals and environ.is_name(key) and context.environ.get(key) != value:
            context.environ[key] = environ.unquoted(value)
    variables = {**context.host, "ENROOT_ROOTFS": context.mount_point}
    now = list(mounts.parse_file(_read(files["fstab"]), variables, "hooks"))
    later = list(mounts.parse_file(_read(files["mounts"]), variables, f"mounts() of {conf}"))
    return Outcome(now, later, _read(files["rc"]) if os.path.exists(files["rc"]) else None)


def _environ(context: hooks.Context, files: "dict[str, str]") -> "dict[str, str]":
    """The environment of a hook: the caller's, the settings, and where to look and to write."""
    exported = dict(context.host)
    for variable, setting in SETTINGS.items():
        text = context.settings.text(setting)
        if setting.kind.startswith("bool"):
            # A hook asks [ -n "${ENROOT_X-}" ], so that "no" must be nothing.
            exported.pop(variable, None)
            if setting.parse(text):
                exported[variable] = "y"
        else:
            exported[variable] = text
    libexec = next((d for d in (_HERE + "/../../../libexec/penroot",) if os.path.isdir(d)), "")
    exported.update(
        ENROOT_VERSION=ENROOT_VERSION,
        ENROOT_PID=str(os.getpid()),
        ENROOT_ROOTFS=context.mount_point,
        ENROOT_ENVIRON=files["environ"],
        ENROOT_MOUNTS=files["fstab"],
        ENROOT_LIBRARY_PATH=hooks.STANDARD,
        ENROOT_SYSCONF_PATH=sysconf_path(context.host),
        PATH=":".join(
            filter(
                None, (os.path.realpath(libexec) if libexec else "", context.host.get("PATH", ""), "/usr/sbin:/sbin")
            )
        ),
    )
    return exported


def _execute(argv: "list[str]", environ: "dict[str, str]") -> int:
    """Run a program to its end with our capabilities; returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            keep_capabilities()
            os.execve(argv[0], argv, environ)
        except OSError as e:
            os.write(2, f"[ERROR] cannot run {argv[0]}: {e.strerror}\n".encode())
        finally:
            os._exit(127)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def keep_capabilities() -> None:
    """Let a program that this process executes have its capabilities, capabilities(7) "ambient"."""
    permitted = linux.capget_permitted()
    linux.capset(permitted, permitted, permitted)
    for capability in range(permitted.bit_length()):
        if permitted >> capability & 1:
            linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_RAISE, capability)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return os.fsdecode(f.read())
    except FileNotFoundError:
        return ""
