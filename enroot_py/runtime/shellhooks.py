"""Run bash hooks of a site or a user, and configuration scripts of ``start --conf``.

Except for the container's program, no other part of a start runs a shell. The scripts run in the container's namespaces
before pivot_root(2), with all capabilities there, as in enroot. Source: enroot(1), configuration.
"""

from __future__ import annotations

import os
from _collections_abc import Mapping
from _signal import SIGCONT, SIGKILL
from errno import ENOEXEC

from enroot_py import ENROOT_VERSION, LIBRARY
from enroot_py.base import linux, log, signals
from enroot_py.base.errors import ConfigError, HookError
from enroot_py.config import files
from enroot_py.config.settings import assignment, sysconf_path
from enroot_py.config.table import all_settings, check_key
from enroot_py.config.words import DEFAULT_PATH, base_directories, expand
from enroot_py.runtime import environ, etc, fstab, hooks, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.mounting import Mount

_BASH = "/bin/bash"


def directives(conf: str, host: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the settings in ``#ENROOT_NAME=VALUE`` lines of a configuration script, and where they are set.

    Raises ConfigError.
    """
    try:
        text = os.fsdecode(files.script(conf))
    except OSError as e:
        raise ConfigError(f"cannot read {conf}: {e.strerror}", hint="give a bash script: --conf FILE") from e
    variables = {**base_directories(host), **host}
    directives = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#") or not line[1:].lstrip().startswith("ENROOT_"):
            continue
        key, value = assignment(line[1:].strip())
        origin = f"{conf}:{number}"
        if key != "ENROOT_ROOTFS":
            check_key(key, origin)
        try:
            variables[key] = expand(value, variables, may_be_unset=lambda _: False)
        except ValueError as e:
            raise ConfigError(f"{origin}: {key}: {e}") from None
        directives[key] = variables[key], origin
    return directives


class Scripts:
    """The bash processes of one start: hooks and the configuration script.

    Each script sees what earlier scripts wrote to the files ENROOT_ENVIRON and ENROOT_MOUNTS, and which variables
    Python hooks changed.
    """

    def __init__(self, context: hooks.Context, scratch: str) -> None:
        self._context = context
        self._out = scratch + "/hooks"
        os.mkdir(self._out)
        for name in ("environ", "fstab", "mounts"):
            os.close(os.open(f"{self._out}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        self._exported = _environ(context, self._out)
        self._variables: dict[str, str] = {}  # the container's variables when ENROOT_ENVIRON was last read
        self._lines: dict[str, str] = {}  # the lines of ENROOT_ENVIRON at that time
        self._conf = ""
        self._shell = 0

    def source(self, conf: str, command: tuple[str, ...]) -> None:
        """Run the configuration script ``conf``. All hooks get its exports. Raises HookError, ConfigError."""
        if log.explain:
            log.explain(f"hook     {conf}")
        self._conf = conf
        driver = [_BASH, hooks.STANDARD + "/driver.sh", conf, self._out, *command]
        self._shell = _spawn(driver, self._exported, of_conf=True)
        self._wait(conf)

    def environ(self) -> None:
        """Let environ() of the configuration script add variables of the container. Raises HookError."""
        self._run_function("environ")

    def hook(self, path: str) -> None:
        """Run a bash hook. Raises HookError."""
        self._write_environ()
        if log.captured():
            from enroot_py.base import capture

            output = capture.shared()
            status = capture.wait(_spawn([path], self._exported, stderr=output.writer), output)
            capture.show(output.take(capture.SHOWN_BYTES), failed=status != 0)
        else:
            _, status = os.waitpid(_spawn([path], self._exported), 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            raise HookError(f"hook {path} failed with status {code}", hint="see its messages above")
        self._read_environ()

    def finish(self) -> tuple[list[Mount], str | None]:
        """After the hooks, run hooks() and mounts() of the configuration script, and take the text of its rc().

        Returns the mounts to add after the system mounts, and the text or None. Raises PenrootError.
        """
        self._run_function("hooks")
        context = self._context
        if context.settings.mpi and "PMIX_NAMESPACE" in context.host and environ.is_rank(context.host):
            from enroot_py.runtime import pmix

            if pmix.used(context.host):  # repeat the work of 20-mpi: a hook may have copied all PMIx variables
                libraries = pmix.Libraries(context.exists, context.environ.get("LD_LIBRARY_PATH", ""))
                variables = context.environ
                for name in [name for name, value in variables.items() if pmix.is_copy(name, value, context.host)]:
                    del variables[name]
                root = context.settings.remap_root
                variables.update(pmix.client_variables(context.host, libraries, variables, remap_root=root))
        for mount in fstab.parse_file(_read(self._out + "/fstab"), self._exported, "hooks"):
            if (mount.source.rstrip("/"), mount.target.rstrip("/")) not in context.mounted:
                fstab.execute(mount, context.root)
        self._run_function("mounts")
        later = list(fstab.parse_file(_read(self._out + "/mounts"), self._exported, f"mounts() of {self._conf}"))
        return later, _read(self._out + "/rc") if os.path.exists(self._out + "/rc") else None

    def _run_function(self, name: str) -> None:
        """Continue the shell of the configuration script until it has run the function ``name``."""
        if self._shell:
            self._write_environ()
            os.kill(self._shell, SIGCONT)
            self._wait(f"{name}() of {self._conf}")
            self._read_environ()

    def _wait(self, action: str) -> None:
        """Wait until the shell of the configuration script has written its exports and stopped, or has ended."""
        _, status = os.waitpid(self._shell, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._shell = 0
            if status:
                code = os.waitstatus_to_exitcode(status)
                error = HookError(f"{action} failed with status {code}", hint="see its messages above")
                error.exit_code = code if code > 0 else 128 - code
                raise error
        else:
            self._take_exported()

    def _take_exported(self) -> None:
        """Use the exports of the configuration script as environment and settings of the hooks."""
        context, before = self._context, self._exported
        records = _read(self._out + "/exported").split("\0")[:-1]
        exported = {key: value for key, _, value in (record.partition("=") for record in records)}
        # Keep exported functions, and other variables whose names the script cannot export.
        exported.update((key, value) for key, value in before.items() if not environ.is_name(key))
        for variable, setting in all_settings().items():
            text = exported.get(variable, "")
            if text != before.get(variable, "") and (text or setting.kind.startswith("bool")):
                try:
                    setting.parse(text)
                except ValueError as e:
                    hint = f"{setting.name}: {setting.doc}"
                    raise ConfigError(f"{self._conf}: {variable}={text!r} {e}", hint=hint) from None
                context.settings = context.settings.replace(self._conf, **{setting.name: text})
        self._exported = context.host = exported

    def _write_environ(self) -> None:
        """Update the file ENROOT_ENVIRON without losing lines that scripts wrote."""
        path = self._out + "/environ"
        now = _writable(self._context.environ)
        gone = self._lines.keys() - now.keys()
        if gone:
            lines = _read(path).split("\n")
            with open(path, "wb") as f:
                f.write(os.fsencode("\n".join(line for line in lines if etc.assignment(line)[0] not in gone)))
        new = {key: value for key, value in now.items() if self._variables.get(key) != value}
        with open(path, "ab") as f:
            f.write(os.fsencode("".join(f"{key}={value}\n" for key, value in new.items())))
        self._lines = {key: line for key, line in self._lines.items() if key not in gone} | new
        self._variables = now

    def _read_environ(self) -> None:
        """Apply a script's changes to ENROOT_ENVIRON. The last line of a variable counts."""
        lines: dict[str, str] = {}
        for line in _read(self._out + "/environ").split("\n"):
            key, equals, value = etc.assignment(line)
            if equals and environ.is_name(key) and not key.startswith("ENROOT_"):
                lines[key] = value
        variables = self._context.environ
        variables.update((key, environ.unquoted(line)) for key, line in lines.items() if self._lines.get(key) != line)
        for key in self._lines.keys() - lines.keys():
            variables.pop(key, None)
        self._lines, self._variables = lines, _writable(variables)


def _writable(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can be a line of ENROOT_ENVIRON."""
    return {
        key: value
        for key, value in variables.items()
        if environ.is_name(key) and not key.startswith("ENROOT_") and "\n" not in value
    }


def _environ(context: hooks.Context, out: str) -> dict[str, str]:
    """Return the environment of a hook: the caller's, the settings, and paths."""
    exported = dict(context.host)
    for variable, setting in all_settings().items():
        text = context.settings.text(setting)
        if setting.kind.startswith("bool"):
            # Hooks test [ -n "${ENROOT_X-}" ], so unset a variable that is "no".
            exported.pop(variable, None)
            if setting.parse(text):
                exported[variable] = "y"
        else:
            exported[variable] = text
    libexec = LIBRARY + "/libexec"
    path = f"{exported.get('PATH') or DEFAULT_PATH}:/usr/sbin:/sbin"
    exported.update(
        ENROOT_VERSION=ENROOT_VERSION,
        PENROOT_UID=str(context.user.pw_uid),
        PENROOT_GID=str(context.user.pw_gid),
        ENROOT_PID=str(os.getpid()),
        ENROOT_ROOTFS=context.mount_point,
        ENROOT_ENVIRON=out + "/environ",
        ENROOT_MOUNTS=out + "/fstab",
        ENROOT_LIBRARY_PATH=hooks.STANDARD,
        ENROOT_SYSCONF_PATH=sysconf_path(context.host),
        PATH=f"{libexec}:{path}" if os.path.isdir(libexec) else path,
    )
    return exported


def _spawn(argv: list[str], variables: dict[str, str], *, stderr: int = -1, of_conf: bool = False) -> int:
    """Start a program with this process's capabilities, and with ``stderr`` unless that is -1. Return its PID.

    The stdout of a hook is discarded. The shell of a configuration script is killed with this process, because a
    stopped shell would remain.
    """
    child = os.fork()
    if child:
        return child
    try:
        if of_conf:
            linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
        else:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if stderr >= 0:
            os.dup2(stderr, 2)
        signals.restore()
        supervise.keep_capabilities()
        try:
            os.execve(argv[0], argv, variables)
        except OSError as e:
            if e.errno != ENOEXEC:
                raise
            os.execve(_BASH, [_BASH, *argv], variables)  # no #! line: run it with bash, as bash would
    except OSError as e:
        os.write(2, f"[ERROR] cannot run {argv[0]}: {e.strerror}\n".encode())
    finally:
        os._exit(127)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return os.fsdecode(f.read())
    except FileNotFoundError:
        return ""
