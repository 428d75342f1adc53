"""Installations that are replaced while steps run: no step fails, and no step mixes modules of two versions.

Two builds differ in their version, which each module checks when it is imported, and in the protocol between plugin and
helper. The tests run in a separate cluster, and activate a build with the functions of `make install` and the packages.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.installation import LIBRARY, ROOT
from tests.slurm.lab import Lab
from tests.slurm.steps import HELPER, IMAGE, MINIMAL, sh
from tests.waiting import until

SITE = "/home/opt"  # all nodes of this lab see the directory, and no other lab does
LINK = f"{SITE}/lib/penroot"
PLUGIN = f"{LINK}/spank_pyxis.so"
BUILDS = {"2.0": 20, "2.1": 21}  # version: protocol
MAX_START_S = 3  # a version is kept for at least this time, instead of a minute
SRUN = ("srun", "--oversubscribe", "--mem=150")  # so that all steps of a wave run at once

MARK = """
import enroot_py as _whole
if _whole.__version__ != "{version}":
    raise RuntimeError(f"{{__name__}} of {version} is mixed with penroot {{_whole.__version__}}")
"""
PYTHON = """
run() { /usr/bin/python3 -IS -c "import sys; sys.path.insert(0, '$1'); $2"; }
"""
# The arguments of this script: VERSION PROTOCOL MARK
BUILD = f"""{PYTHON}
set -eu
new={SITE}/built-$1
mkdir -p {SITE}/bin {SITE}/lib/penroot-versions
mkdir "$new"
for name in enroot_py pyxis_py hooks c_shims; do
    cp -a "{ROOT}/$name" "$new"
done
cp -a {LIBRARY}/libexec "$new"
for name in click urllib3 yaml isal zstandard; do
    cp -a {ROOT}/.venv/lib/python3*/site-packages/$name "$new"
done
cp -a {ROOT}/.venv/lib/python3*/site-packages/_cffi_backend* "$new"
find "$new" -name __pycache__ -path '*_py/*' -exec rm -r {{}} +
sed -i "s/^__version__ = .*/__version__ = \\"$1\\"/" "$new/enroot_py/__init__.py"
sed -i "s/^PROTOCOL = .*/PROTOCOL = $2/" "$new/pyxis_py/request/job.py"
sed -i "s/^_MAX_START_S = .*/_MAX_START_S = {MAX_START_S}/" "$new/enroot_py/base/versions.py"
find "$new/enroot_py" "$new/pyxis_py" -name '*.py' ! -path '*/enroot_py/__init__.py' \\
    ! -path '*/enroot_py/base/__init__.py' ! -path '*/enroot_py/base/pack.py' | while read -r file; do
    printf '%s' "$3" >> "$file"
done
plugin=$new/spank_pyxis.so
run "$new" "from pyxis_py.admin.cli import main; sys.argv[:] = ['pyxis-py', 'build', '--output', '$plugin']; main()"
cd {ROOT}
sed "s,@PYTHON@,/usr/bin/python3,; s,@LIBRARY@,{LINK},; s,@MODULE@,enroot_py.main," configs/launcher > \
    {SITE}/bin/penroot
chmod 755 {SITE}/bin/penroot
/usr/bin/python3 -c "from packages import library; library.archive_modules(library.Path('$new'))"
run "$new" 'from enroot_py.base import packing; packing.write()'
"""
# Like packages/scripts/packaged, but copy a build that was compiled once. The versions must not share files: a shared
# file would count as open in both.
INSTALL = f"""{PYTHON}
set -eu
new=$(mktemp -d {SITE}/lib/penroot-versions/$1-XXXXXX)
chmod 755 "$new"
cp -a {SITE}/built-$1/. "$new"
run "$new" 'from enroot_py.base import versions; versions.use()'
"""


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Lab]:
    """Yield a cluster of one node, with its own installation."""
    more = Lab(lab.root + "-upgrade")
    more.up(nodes=1)
    for version, protocol in BUILDS.items():
        more.run(["sh", "-c", BUILD, "sh", version, str(protocol), MARK.format(version=version)], user="root")
    install(more, "2.0")
    more.install_plugin(f"required {PLUGIN} resolve_timeout=60")
    more.restart_daemon("n1", "slurmd")
    yield more
    more.down()


def install(site: Lab, version: str) -> None:
    site.run(["sh", "-c", INSTALL, "sh", version], user="root")


@contextmanager
def replaced(site: Lab, rng: random.Random) -> Iterator[list[str]]:
    """Install the builds alternately while the block runs. Yield the list of installed builds."""
    installed: list[str] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def replace() -> None:
        try:
            while not stop.wait(rng.random()):
                version = list(BUILDS)[(len(installed) + 1) % 2]
                install(site, version)
                installed.append(version)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        yield installed
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


class Step:
    """An srun with ``options`` whose tasks wait for a line."""

    def __init__(self, site: Lab, *options: str, tasks: int = 1) -> None:
        self.options = options
        command = [*SRUN, f"-n{tasks}", *options, *sh("echo up; read -r line; echo $line")]
        self.tasks = tasks
        self.process: subprocess.Popen[str] = site.popen(command)

    def begin(self) -> None:
        assert self.process.stdout
        for _ in range(self.tasks):
            line = self.process.stdout.readline()
            assert line == "up\n", self.end()

    def end(self) -> None:
        out, err = self.process.communicate("end\n", timeout=200)
        assert (self.process.returncode, out) == (0, "end\n" * self.tasks), (self.options, out, err)
        assert "error" not in err and "mixed" not in err, (self.options, err)


def wave(site: Lab, number: int, size: int) -> None:
    """Run ``size`` steps of each kind, then steps of images that some of them save. All outlive restarts of slurmd."""
    steps, attached, files = [], [], []
    for each in range(size):
        name, file = f"--container-name=wave{number}-{each}", f"/home/alice/wave{number}-{each}.sqsh"
        steps += [
            Step(site, IMAGE),
            Step(site, IMAGE, name),
            Step(site, IMAGE, f"--container-save={file}", "--container-writable"),
            Step(site, IMAGE, "--container-remap-root", tasks=2),
        ]
        attached.append(name)
        files.append(file)
    for step in steps:
        step.begin()
    restart(site)
    steps += [Step(site, name) for name in attached]
    for step in steps[-len(attached) :]:
        step.begin()
    restart(site)
    for step in steps:
        step.end()
    again = [Step(site, f"--container-image={file}") for file in files]
    for step in again:
        step.begin()
    restart(site)
    for step in again:
        step.end()


def restart(site: Lab) -> None:
    site.stop_daemon("n1", "slurmd")
    site.start_daemon("n1", "slurmd")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_steps_and_starts_go_on_while_it_is_replaced(site: Lab, rng: random.Random, soak: bool) -> None:
    penroot = f"{SITE}/bin/penroot"
    site.run([penroot, "create", "--name", "mine", f"docker://{MINIMAL}"], node="n1")
    with replaced(site, rng) as installed:
        for number in range(9 if soak else 1):
            wave(site, number, size=4 if soak else 2)
            done = site.run(f"for i in 1 2 3; do {penroot} start mine true || exit; done", node="n1", check=False)
            assert (done.returncode, done.stderr) == (0, "")
    assert len(set(installed)) == 2
    assert_only_used_ones_stay(site)


def assert_only_used_ones_stay(site: Lab) -> None:
    """Check that only two versions stay: the version that slurmd has mapped, and the current version."""
    site.restart_daemon("n1", "slurmd")
    loaded = current(site)
    time.sleep(MAX_START_S + 1)
    install(site, "2.0")
    assert versions(site) == sorted((loaded, current(site)))
    site.restart_daemon("n1", "slurmd")
    time.sleep(MAX_START_S + 1)
    install(site, "2.1")
    assert loaded not in versions(site)


def test_a_step_that_waited_in_the_queue_while_it_was_replaced(site: Lab) -> None:
    install(site, "2.0")
    with site.popen(["srun", "--exclusive", *sh("echo up; read -r line")]) as first:
        assert first.stdout and first.stdout.readline() == "up\n"
        waiting = Step(site, IMAGE)
        batch = site.run(["sbatch", "--parsable", "--output=/home/alice/out", IMAGE, "--wrap=echo ran"]).stdout.strip()
        until(lambda: len(site.run(["squeue", "-h", "-t", "PD"]).stdout.splitlines()) == 2, "both wait")
        for version in ("2.1", "2.0", "2.1"):
            time.sleep(MAX_START_S)
            install(site, version)
        first.communicate("end\n", timeout=100)
    waiting.begin()
    waiting.end()
    until(lambda: not site.run(["squeue", "-h", "-j", batch], check=False).stdout.strip(), "the end of the batch job")
    assert site.run("cat /home/alice/out").stdout.splitlines()[-1] == "ran"


@pytest.mark.parametrize("older", ["the node", "the host of srun"])
def test_a_node_may_have_another_version_than_the_host_of_srun(site: Lab, older: str) -> None:
    install(site, "2.0" if older == "the node" else "2.1")
    site.run(f"rm -rf {SITE}-n1; cp -a {SITE} {SITE}-n1; mount --bind {SITE}-n1 {SITE}", user="root", node="n1")
    try:
        install(site, "2.1" if older == "the node" else "2.0")
        node, host = (site.run(f"{SITE}/bin/penroot version", node=name).stdout for name in ("n1", "ctl"))
        assert node != host
        step = Step(site, IMAGE, "--container-name=across")
        step.begin()
        attached = Step(site, "--container-name=across")
        attached.begin()
        step.end()
        attached.end()
    finally:
        site.run(f"umount {SITE}", user="root", node="n1")


@pytest.mark.parametrize(("version", "message"), [("2.0", "is gone, and"), ("2.1", "protocol 20, not 21")])
def test_a_step_whose_version_is_gone(site: Lab, version: str, message: str) -> None:
    """The version of a running step can be removed by force, or on a shared disk after a month.

    The current version then cleans up after the step, or the error says why it cannot.
    """
    install(site, "2.0")
    gone = current(site)
    step = Step(site, IMAGE)
    step.begin()
    install(site, version)
    site.run(["rm", "-r", f"{SITE}/lib/penroot-versions/{gone}"], user="root")
    helper = site.run(["pgrep", "-f", HELPER], user="root", node="n1").stdout.split()
    with open(f"{site.root}/nodes/n1/var/log/slurmd.log") as log:
        log.seek(0, os.SEEK_END)
        site.run(["kill", "-KILL", *helper], user="root", node="n1")
        out, err = step.process.communicate("end\n", timeout=200)
        assert out == "end\n", err
        assert message in err + log.read()


def test_a_step_says_that_a_later_version_has_made_the_store(site: Lab) -> None:
    step = Step(site, IMAGE)
    step.begin()
    step.end()
    mark = "/var/tmp/enroot-cache-$(id -u)/format"
    site.run(f"test -L {mark}; ln -sfn 2 {mark}", node="n1")
    try:
        done = site.run(["srun", IMAGE, "true"], check=False)
    finally:
        site.run(f"ln -sfn 1 {mark}", node="n1")
    assert done.returncode != 0
    assert "has format 2, which a later penroot made: penroot 2." in done.stderr
    assert "Traceback" not in done.stderr


def current(site: Lab) -> str:
    return os.path.basename(site.run(["readlink", LINK]).stdout.strip())


def versions(site: Lab) -> list[str]:
    return site.run(["ls", f"{SITE}/lib/penroot-versions"]).stdout.split()
