"""The command line of the lab; the package's docstring describes it."""

from __future__ import annotations

import argparse
import sys

from . import Lab, LabError
from . import __doc__ as manual


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=".venv/bin/python -m tests.slurm.lab",
        description=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="up|down|run|status|residue")
    up = verbs.add_parser("up", help="start the lab")
    up.add_argument("--nodes", type=int, default=2, help="compute nodes (2)")
    up.add_argument("--prefix", help="load the plugin of this installation; put PREFIX/bin on users' PATH")
    up.add_argument("--plugin", metavar="LINE", help="use this line in plugstack.conf instead of the line for --prefix")
    up.add_argument("--slurm", metavar="LINE", action="append", default=[], help="add this line to slurm.conf")
    verbs.add_parser("down", help="stop the lab and remove its files")
    run = verbs.add_parser("run", help="run a command in the lab")
    run.add_argument("--user", default="alice")
    run.add_argument("--node", default="ctl")
    run.add_argument("--cwd")
    run.add_argument("--env", metavar="NAME=VALUE", action="append", default=[])
    run.add_argument("command", nargs="+")
    verbs.add_parser("status", help="show the nodes")
    verbs.add_parser("residue", help="show what jobs have left behind; exit 1 if there is anything")
    arguments = parser.parse_args()

    lab = Lab()
    if arguments.verb == "up":
        lab.up(arguments.nodes, plugin=arguments.plugin, prefix=arguments.prefix, slurm_conf=arguments.slurm, say=print)
    elif arguments.verb == "down":
        lab.down()
    elif arguments.verb == "run":
        env = dict(pair.partition("=")[::2] for pair in arguments.env)
        lab.execute(arguments.command, user=arguments.user, node=arguments.node, cwd=arguments.cwd, env=env)
    elif arguments.verb == "status":
        print(f"up in {lab.root}")
        print(lab.run(["sinfo"], user="root").stdout, end="")
    else:
        left = [f"{node}: {line}" for node in lab.nodes for line in lab.residue(node)]
        print("\n".join(left) or "nothing is left")
        return 1 if left else 0
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as e:
        sys.exit(f"lab: {e}")
