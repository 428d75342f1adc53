"""The baseline for imports: unpack each layer with isal and tar -x, in parallel on all CPUs, without checks.

Arguments: URL of the registry, repository, tag, directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from isal import isal_zlib


def unpack(work: tuple[str, str]) -> None:
    url, directory = work
    os.mkdir(directory)
    command = ["tar", "-C", directory, "-xf", "-", "--no-same-owner", "--delay-directory-restore", "--exclude=dev/*"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, urllib.request.urlopen(url) as response:
        assert process.stdin is not None
        decoder = isal_zlib.decompressobj(wbits=31)
        while data := response.read(1 << 18):
            process.stdin.write(decoder.decompress(data))
        process.stdin.close()
    if process.returncode:
        raise RuntimeError(f"tar failed for {url}")


if __name__ == "__main__":
    registry, repository, tag, directory = sys.argv[1:]
    accept = "application/vnd.docker.distribution.manifest.v2+json"
    request = urllib.request.Request(f"{registry}/v2/{repository}/manifests/{tag}", headers={"Accept": accept})
    with urllib.request.urlopen(request) as answer:
        layers = sorted(json.load(answer)["layers"], key=lambda layer: -layer["size"])
    work = [(f"{registry}/v2/{repository}/blobs/{x['digest']}", f"{directory}/{n}") for n, x in enumerate(layers)]
    # By default, Python 3.14 starts workers from a fork server, which cannot load a program given to python3 -c.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        list(pool.map(unpack, work))
