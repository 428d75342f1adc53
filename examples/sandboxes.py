"""Run a command in many containers at once, each with its own files, as one step of a Slurm job.

srun -n1 python3 sandboxes.py 200 docker://debian:12 sh -c 'echo $N > /n; cat /n'
N is the number of the container. All processes belong to the step, so scancel kills them. After scancel, the next start
of a container removes the files of the killed containers.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import enroot_py


def main(count: int, name: str, command: list[str]) -> None:
    image = enroot_py.pull(name)

    def sandbox(number: int) -> str:
        done = enroot_py.run(
            image, command, env={"N": str(number)}, writable=True, capture_output=True, text=True, check=True
        )
        return done.stdout

    with ThreadPoolExecutor(count) as pool:
        for output in pool.map(sandbox, range(count)):
            print(output, end="")


main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
