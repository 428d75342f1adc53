"""Write the lab's own files of /etc to ROOT/etc. In a node's /etc, they hide the machine's files of the same name."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from . import cgroups

USERS = {"alice": 2001, "bob": 2002}
GROUPS = {"science": (3001, ["alice"])}
REGISTRY_NAMES = ("registry", "registry.lab", "registry-1.docker.io", "docker.io", "index.docker.io")

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SlurmdDebug=verbose
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
EpilogMsgTime=0
CompleteWait=0
KillWait=3
ReturnToService=2
# The nodes are declared larger than this machine.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} CPUs=8 RealMemory=4000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:8
"""

# Slurm accepts any numbered device files as GPUs. These exist on every machine.
GRES_CONF = "Name=gpu File=/dev/tty[0-3]\n"

# Slurm reads this file if slurm.conf has JobContainerType=job_container/tmpfs.
JOB_CONTAINER_CONF = "AutoBasePath=true\nBasePath=/var/spool/jobs\n"

CGROUP_CONF = """\
CgroupPlugin={plugin}
ConstrainCores=yes
ConstrainRAMSpace=yes
"""
# A node of the lab has no systemd that could make a scope. Slurm 23.02 renamed the option of the second line.
CGROUP_CONF_V2 = "IgnoreSystemd=yes\n{controllers}=yes\n"

# Slurm synchronizes ranks in a tree or a ring. The ring sometimes stalls for half a minute.
MPI_CONF = "PMIxCollFence=tree\n"

# Each node has its own directories, as with local disks. Nothing is in the users' homes.
ENROOT_CONF = """\
ENROOT_RUNTIME_PATH /tmp/enroot-run-$(id -u)
ENROOT_CACHE_PATH /var/tmp/enroot-cache-$(id -u)
ENROOT_DATA_PATH /var/tmp/enroot-data-$(id -u)
ENROOT_ALLOW_HTTP yes
"""

REGISTRY_YML = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {storage}}}, delete: {{enabled: true}}}}
http: {{addr: "{address}", secret: lab{tls}}}
"""


def make(root: str, addresses: Mapping[str, str], plugin: str | None, slurm_conf: Sequence[str]) -> None:
    """Fill ROOT/etc and ROOT/home. Raises OSError, CalledProcessError."""
    etc = f"{root}/etc"
    make_accounts(etc, f"{root}/home")
    make_names(etc, addresses)
    make_certificates(etc, f"{root}/tls")
    make_munge_key(etc)

    nodes = ",".join(name for name in addresses if name not in ("ctl", "registry"))
    put(f"{etc}/slurm/slurm.conf", SLURM_CONF.format(nodes=nodes) + "".join(f"{line}\n" for line in slurm_conf))
    put(f"{etc}/slurm/gres.conf", GRES_CONF)
    cgroup_plugin = cgroups.slurm_plugin()
    cgroup_conf = CGROUP_CONF.format(plugin=cgroup_plugin)
    if cgroup_plugin == "cgroup/v2":
        controllers = "EnableControllers" if slurm_version() >= (23, 2) else "CgroupAutomount"
        cgroup_conf += CGROUP_CONF_V2.format(controllers=controllers)
    put(f"{etc}/slurm/cgroup.conf", cgroup_conf)
    put(f"{etc}/slurm/job_container.conf", JOB_CONTAINER_CONF)
    put(f"{etc}/slurm/mpi.conf", MPI_CONF)
    put(f"{etc}/slurm/plugstack.conf", "include /etc/slurm/plugstack.conf.d/*.conf\n")
    os.makedirs(f"{etc}/slurm/plugstack.conf.d", exist_ok=True)
    if plugin:
        put(f"{etc}/slurm/plugstack.conf.d/pyxis.conf", plugin + "\n")
    put(f"{etc}/enroot/enroot.conf", ENROOT_CONF)

    tls = f", tls: {{certificate: {etc}/penroot-lab/registry.pem, key: {etc}/penroot-lab/registry.key}}"
    tls = tls.replace(f"{etc}/", "/etc/")
    for name, address, extra in (("http", ":5000", ""), ("https", ":443", tls)):
        text = REGISTRY_YML.format(storage="/var/spool/registry", address=address, tls=extra)
        put(f"{etc}/penroot-lab/registry-{name}.yml", text)


def make_accounts(etc: str, home: str) -> None:
    """Write the machine's accounts and the lab's: passwd(5), group(5), shadow(5)."""
    ids = {str(uid) for uid in USERS.values()}
    passwd = [line for line in lines("/etc/passwd") if not {line.split(":")[0], line.split(":")[2]} & {*USERS, *ids}]
    shadow = [line for line in lines("/etc/shadow") if line.split(":")[0] not in USERS]
    ours = {**USERS, **{name: gid for name, (gid, _) in GROUPS.items()}}
    gids = {str(gid) for gid in ours.values()}
    group = [line for line in lines("/etc/group") if not {line.split(":")[0], line.split(":")[2]} & {*ours, *gids}]
    for name, uid in USERS.items():
        passwd.append(f"{name}:x:{uid}:{uid}:{name.title()} of the lab:/home/{name}:/bin/bash")
        shadow.append(f"{name}:!:19000:0:99999:7:::")
        group.append(f"{name}:x:{uid}:")
        os.makedirs(f"{home}/{name}", mode=0o755, exist_ok=True)
        os.chown(f"{home}/{name}", uid, uid)
    group += [f"{name}:x:{gid}:{','.join(members)}" for name, (gid, members) in GROUPS.items()]
    put(f"{etc}/passwd", "\n".join(passwd) + "\n")
    put(f"{etc}/group", "\n".join(group) + "\n")
    put(f"{etc}/shadow", "\n".join(shadow) + "\n", mode=0o600)


def make_names(etc: str, addresses: Mapping[str, str]) -> None:
    hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for name, address in addresses.items():
        hosts.append(f"{address} " + (" ".join(REGISTRY_NAMES) if name == "registry" else name))
    put(f"{etc}/hosts", "\n".join(hosts) + "\n")
    # Nothing listens there, so an unknown name fails at once.
    put(f"{etc}/resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    bases = "".join(f"{base}: files\n" for base in ("passwd", "group", "shadow", "services", "protocols"))
    put(f"{etc}/nsswitch.conf", bases + "hosts: files dns\n")


def make_certificates(etc: str, tls: str) -> None:
    """Create a CA that the nodes trust, and the registry's certificate."""
    os.makedirs(tls, mode=0o700, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365"]
    ca = ["-keyout", f"{tls}/ca.key", "-out", f"{tls}/ca.pem"]
    # Python since 3.13 enforces RFC 5280: a CA certificate must declare keyCertSign.
    use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    call("openssl", "req", "-x509", *key, *use, "-subj", "/CN=penroot lab CA", *ca)
    names = ",".join(f"DNS:{name}" for name in REGISTRY_NAMES)
    os.makedirs(f"{etc}/penroot-lab", mode=0o755, exist_ok=True)
    call(
        *["openssl", "req", "-x509", *key, "-subj", "/CN=registry.lab", "-addext", f"subjectAltName={names}"],
        *["-addext", "basicConstraints=critical,CA:FALSE", "-CA", f"{tls}/ca.pem", "-CAkey", f"{tls}/ca.key"],
        *["-keyout", f"{etc}/penroot-lab/registry.key", "-out", f"{etc}/penroot-lab/registry.pem"],
    )
    certs = f"{etc}/ssl/certs"
    with open(f"{tls}/ca.pem") as certificate, open("/etc/ssl/certs/ca-certificates.crt") as bundle:
        ours = certificate.read()
        put(f"{certs}/ca-certificates.crt", bundle.read() + ours)
    # OpenSSL also finds a CA by a file that is named after the hash of its subject: c_rehash(1).
    digest = call("openssl", "x509", "-hash", "-noout", "-in", f"{tls}/ca.pem").strip()
    put(f"{certs}/{digest}.0", ours)


def make_munge_key(etc: str) -> None:
    key = f"{etc}/munge/munge.key"
    os.makedirs(os.path.dirname(key), mode=0o700, exist_ok=True)
    with open(key, "wb") as file:
        file.write(secrets.token_bytes(128))
    os.chmod(key, 0o400)
    for path in (os.path.dirname(key), key):
        shutil.chown(path, "munge", "munge")


def put(path: str, text: str, mode: int = 0o644) -> None:
    """Write a file atomically: a slurmstepd that reads half of it drains the node."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.new", "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    os.rename(file.name, path)


def slurm_version() -> tuple[int, ...]:
    """Return the release of this machine's Slurm, such as (23, 11)."""
    return tuple(int(number) for number in call("slurmd", "-V").split()[1].split(".")[:2])


def lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
