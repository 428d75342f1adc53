#!/usr/bin/python3
"""The tour of ``make demo``: an MPI job in a container on a small Slurm cluster, then penroot commands with its image.

Everything runs on this machine: the cluster of tests/slurm/lab, its registry and its users. The demo removes them at
the end. If KEEP is set, they stay, and you can go on as alice.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from tests.installation import PREFIX
from tests.slurm.lab import CommandFailed, Lab, LabError

# Open MPI needs Slurm's PMIx plugin, which Debian's package of Slurm 26.05 does not have. MPICH uses PMI-2.
IMAGES = {"pmix": "registry:5000#mpi:1", "pmi2": "registry:5000#mpich:1"}


def show(lab: Lab, command: str, node: str = "ctl") -> str:
    """Run ``command`` as alice in a shell, and print its output."""
    print(
        f"\n\033[1malice@{node}$ {command}\033[0m" if sys.stdout.isatty() else f"\nalice@{node}$ {command}", flush=True
    )
    begin = time.monotonic()
    done = lab.run(["bash", "-c", command], node=node)
    print(done.stderr, done.stdout, sep="", end="")
    print(f"  ({time.monotonic() - begin:.2f} s)", flush=True)
    return done.stdout


def demo(lab: Lab) -> None:
    """Run the tour. Raises LabError or CommandFailed if a step fails."""
    supported = lab.run(["srun", "--mpi=list"])
    mpi = next(kind for kind in IMAGES if kind in (supported.stdout + supported.stderr).split())
    image = IMAGES[mpi]
    job = f"srun -N2 --ntasks-per-node=2 --mpi={mpi} --container-image={image} ./hello"
    out = show(lab, job)
    ranks = [line for line in out.splitlines() if line.startswith("rank ")]
    hosts = {line.split()[-1] for line in ranks}
    if len(ranks) != 4 or len(hosts) != 2 or "sum 6" not in out.splitlines():
        raise LabError("the job should have had 4 ranks on 2 hosts, with the sum 6")
    show(lab, job)  # both nodes now have the image in their store
    show(lab, f"penroot import -o mpi.sqsh docker://{image}", "n1")
    show(lab, "penroot create -n mpi mpi.sqsh && penroot list", "n1")
    show(lab, "penroot start mpi cat /etc/os-release", "n1")
    show(lab, "srun -N2 --container-image=./mpi.sqsh sh -c 'echo a squashfs file on $(hostname)'")
    show(lab, "penroot remove -f mpi && rm mpi.sqsh", "n1")
    residue = [f"{node}: {line}" for node in lab.nodes for line in lab.residue(node)]
    if residue:
        raise LabError("the nodes are not clean:\n" + "\n".join(residue))
    print("\nNo mount, process, cgroup or file is left on the nodes.")


def main() -> int:
    lab, keep = Lab(), bool(os.environ.get("KEEP"))
    print("A Slurm cluster with 2 nodes and a registry, in namespaces of this machine ...", flush=True)
    try:
        lab.up(2, prefix=PREFIX, say=print)
        demo(lab)
    except (CommandFailed, LabError) as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    finally:
        if not keep:
            lab.down()
    if keep:
        manage = f"PENROOT_LAB={lab.root} .venv/bin/python -m tests.slurm.lab"
        print(f"\nThe cluster stays up. As alice: {manage} run bash\nTo end it: {manage} down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
