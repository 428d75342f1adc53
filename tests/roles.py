"""Ansible on a cluster: packages/ansible as an admin runs it on ctl, over ssh, to nodes that share only /home."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.slurm.lab import Lab

ANSIBLE = Path(__file__).parents[1] / "packages/ansible"
HOME = "/home/admin"  # home of root for Ansible, so that the machine's /root stays unchanged
SSHD = f"""\
HostKey {HOME}/host
AuthorizedKeysFile {HOME}/user.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""
INVENTORY = f"""\
all:
  vars:
    ansible_ssh_private_key_file: {HOME}/user
    ansible_ssh_common_args: -F none -o UserKnownHostsFile={HOME}/known
    ansible_python_interpreter: /usr/bin/python3
    ansible_become: false
    ansible_remote_tmp: /var/tmp/ansible
  children:
    slurm-master: {{hosts: {{ctl: {{ansible_connection: local}}}}}}
    slurm-node: {{hosts: {{n1: , n2: }}}}
    slurm-cluster: {{children: {{slurm-master: , slurm-node: }}}}
"""


class Site:
    """A cluster that Ansible configures."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.home = Path(lab.root + HOME)

    def play(self, *arguments: str, check: bool = True, **variables: object) -> str:
        """Run the playbook with these variables, and return Ansible's output."""
        (self.home / "variables.json").write_text(json.dumps(variables))
        command = ["ansible-playbook", "-i", f"{HOME}/inventory.yml", "-e", f"@{HOME}/variables.json"]
        environ = {"HOME": HOME, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PIPELINING": "1"}
        command += [*arguments, f"{HOME}/ansible/playbook.yml"]
        done = self.lab.run(command, user="root", check=False, env=environ, cwd=HOME, timeout=900)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on(self, node: str, command: str) -> str:
        return self.lab.run(command, user="root", node=node).stdout

    def slurmds(self) -> list[str]:
        """Return the process of each slurmd, with its start time."""
        return [self.on(node, "ps -o pid=,lstart= -p $(cat /run/slurmd.pid)") for node in self.lab.nodes]


def changed(output: str) -> dict[str, int]:
    """Return the number of changes on each machine from the recap, and fail if a machine failed."""
    rows = re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", output, re.MULTILINE)
    assert {name for name, _ in rows} == {"ctl", "n1", "n2"}, output
    return {name: int(number) for name, number in rows}


@contextlib.contextmanager
def site(root: str, *, configless: bool = False) -> Iterator[Site]:
    """Yield a cluster of two nodes without penroot, each with an sshd."""
    lab = Lab(root)
    lab.up(nodes=2, apart=True, configless=configless)
    made = Site(lab)
    try:
        made.home.mkdir()
        shutil.copytree(ANSIBLE, made.home / "ansible")
        (made.home / "inventory.yml").write_text(INVENTORY)
        (made.home / "sshd_config").write_text(SSHD)
        keygen = f"ssh-keygen -q -t ed25519 -N '' -f {HOME}"
        made.on("ctl", f'{keygen}/host; {keygen}/user; echo "* $(cat {HOME}/host.pub)" > {HOME}/known')
        for node in lab.nodes:
            made.on(node, f"mkdir -p /run/sshd; /usr/sbin/sshd -f {HOME}/sshd_config")
        yield made
    finally:
        lab.down()
