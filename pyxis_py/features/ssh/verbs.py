"""``penroot ssh-config`` prints an ssh configuration, which runs ``ssh-key`` and ``ssh-proxy`` on a login node.

A laptop's ssh first fetches the keys of a job. Then ssh-proxy starts a step of the job, and srun carries the connection
on stdin and stdout of the step. The server at the other end is sshd.py.
"""

from __future__ import annotations

import os
import re
import sys

import click

from enroot_py.base.errors import UsageError
from enroot_py.cli.commands import CONTEXT, JOBS, section, synopsis
from enroot_py.config import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.features.ssh.sshkeys import JobKeys

_SUFFIX = "cluster"
# Variables of the login shell that the step gets. Other variables could select a container or change task options.
_KEPT = re.compile("PATH|HOME|USER|LOGNAME|SHELL|TZ|SLURM_CONF|ENROOT_.*|XDG_.*")
# A host name can come from another person, for example from a git submodule. ssh before 9.6 passes shell metacharacters
# of the name on to a shell (CVE-2023-51385). Names with these characters are refused. No pattern can refuse a line
# break. But the first line begins with exec, so the shell never reads a second line.
_NOT_IN_NAMES = "$`;&|<>()' "
_LINES = """\
# ssh JOB.{suffix} enters the container of a running job through {login}. Printed by penroot ssh-config.
Match originalhost "*.{suffix},{refused}" exec "exec sh -c 'cd ~/.ssh && umask 077 && ssh -T {login} {key} $1 \
>.penroot-$$ 2>/dev/null && mv .penroot-$$ penroot-$1 || rm -f .penroot-$$; true' sh %n"
    ProxyCommand ssh -T {login} {proxy} %n
    IdentityFile ~/.ssh/penroot-%n
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile ~/.ssh/penroot-%n
    GlobalKnownHostsFile /dev/null
    HostKeyAlias {host}
    StrictHostKeyChecking yes
    UpdateHostKeys no
"""


def add(penroot: click.Group) -> None:
    """Add the verbs of a login node."""
    for verb in (ssh_config, ssh_key, ssh_proxy):
        penroot.add_command(verb)
    section(JOBS, ssh_config, ssh_key, ssh_proxy)


_suffix = click.option(
    "--suffix", metavar="WORD", default=_SUFFIX, show_default=True, help="Host-name suffix for jobs."
)


@synopsis
@click.command("ssh-config", context_settings=CONTEXT)
@_suffix
@click.argument("login")
def ssh_config(suffix: str, login: str) -> None:
    """Print an ssh configuration by which a laptop reaches jobs.

    Append the output to the laptop's ~/.ssh/config. LOGIN is [USER@]HOST, or the name of this login node in that file.
    Then ssh JOB.cluster opens a shell in the container of a job; sftp, scp, rsync, port forwarding and editors work
    too. JOB is a number or a name; JOB.STEP, JOB.CONTAINER and JOB.NODE select one of several containers.
    """
    from pyxis_py.features.ssh.sshkeys import HOST

    for word in (login, suffix):
        if not re.fullmatch(r"[\w@.:%+\[\]][\w@.:%+\[\]-]*", word):
            raise UsageError(f"{word!r} is not a host name", hint="example: penroot ssh-config me@login.example.org")
    program = os.path.abspath(sys.argv[0])
    if not re.fullmatch(r"[\w/.+-]+", program):
        raise UsageError(
            f"ssh_config(5) cannot quote the path {program!r}",
            hint="install penroot in a path without special characters",
        )
    option = "" if suffix == _SUFFIX else f" --suffix {suffix}"
    words = {verb: f"{program} ssh-{verb}{option}" for verb in ("key", "proxy")}
    refused = ",".join(f"!*{character}*" for character in _NOT_IN_NAMES)
    login = login.replace("%", "%%")
    click.echo(_LINES.format(suffix=suffix, login=login, host=HOST, refused=refused, **words), nl=False)


@synopsis
@click.command("ssh-key", context_settings=CONTEXT)
@_suffix
@click.argument("name")
def ssh_key(suffix: str, name: str) -> None:
    """Print the ssh keys of a running job.

    Called by the ssh configuration that ssh-config prints. The keys are created on first use and removed with
    the job.
    """
    from pyxis_py.features.ssh import jobs

    keys = _keys(jobs.job(_without(name, suffix)).number)
    keys.forget_all_but({job.number for job in jobs.mine()})
    click.echo(keys.for_client(), nl=False)


@synopsis
@click.command("ssh-proxy", context_settings=CONTEXT)
@_suffix
@click.argument("name")
def ssh_proxy(suffix: str, name: str) -> None:
    """Connect ssh to a running job, as its ProxyCommand.

    Called by the ssh configuration that ssh-config prints. NAME is JOB (number or name). Add .STEP,
    .CONTAINER or .NODE to select one of several containers.
    """
    from enroot_py.base.run import find
    from pyxis_py.features.ssh import jobs

    destination = jobs.destination(_without(name, suffix))
    keys = _keys(destination.job.number)
    srun = find("srun", package="slurm-client")
    server = (os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "pyxis-py"), "ssh-server")
    step = ("--nodes=1", "--ntasks=1", f"--nodelist={destination.node}", "--cpu-bind=none", "--mpi=none", "--chdir=/")
    options = ("--quiet", "--unbuffered", "--job-name=ssh", "--overlap", f"--jobid={destination.job.number}")
    arguments = (destination.job.number, keys.path, destination.container)
    environ = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    child = os.fork()
    if child == 0:
        # At its end, ssh sends SIGHUP to this process, and Ctrl-C signals the whole terminal. Either signal would make
        # srun cancel the step with a message, so srun gets its own session. At the end of stdin, srun exits silently.
        os.setsid()
        os.execve(srun, [srun, *options, *step, *server, *arguments], environ)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    keys.forget_all_but({job.number for job in jobs.mine()})
    sys.exit(status and 1)


def _keys(job: str) -> JobKeys:
    from pyxis_py.features.ssh import jobs
    from pyxis_py.features.ssh.sshkeys import JobKeys

    keys = JobKeys(settings.load().config_path, jobs.cluster(), job)
    keys.make()
    return keys


def _without(name: str, suffix: str) -> str:
    """Return the name without the suffix. Raises UsageError."""
    stem = name.removesuffix(f".{suffix}")
    if not stem or not stem.isprintable():
        raise UsageError(f"{name!r} is not a job name", hint=f"for example: ssh 42.{suffix}")
    return stem
