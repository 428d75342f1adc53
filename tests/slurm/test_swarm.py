"""The nodes of a step pull an image once, and share it."""

from __future__ import annotations

import contextlib
import glob
import os
import random
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests import images
from tests.fakeregistry import Fault, Faulty, Login
from tests.images import Image, Layer, entry, tar
from tests.kernel.registry import Server
from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import SUBNET
from tests.slurm.steps import HELPER, assert_nothing_left, configured, next_line, plugin_argument, sbatch, sh
from tests.slurm.test_pull import STORE, empty_stores, front
from tests.waiting import until

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture(autouse=True)
def nothing_left(four: Lab) -> Iterator[None]:
    yield
    assert_nothing_left(four)
    until(lambda: not any(listening(four, node) for node in ("ctl", *NODES)), "no node listens")


def listening(lab: Lab, node: str) -> str:
    """Return the ports on which penroot listens on a node."""
    return lab.run("ss -Htlnp | grep python3", user="root", node=node, check=False).stdout


def layered(number: int, layers: int = 4, size: int = 2_000_000) -> Image:
    """Return an image of several layers that compress badly. Each ``number`` gives different layers."""
    rng = random.Random(number)
    image = images.busybox(entry("number", b"%d\n" % number))
    image.layers += [Layer(tar([entry(f"fill{number}.{n}", rng.randbytes(size))])) for n in range(layers)]
    return image


def step(host: str, name: str, *command: str, nodes: int = 4) -> list[str]:
    return ["srun", f"-N{nodes}", "-w", ",".join(NODES[:nodes]), f"--container-image={host}#test/{name}:a", *command]


def sh_of_all(host: str, name: str, script: str) -> list[str]:
    """Return a step of four nodes. Each task waits until all have begun: a node uploads only until its tasks end."""
    meet = "mine=/home/alice/meet.$SLURM_JOB_ID; : >$mine.$SLURM_NODEID; until set -- $mine.*; [ $# = 4 ]; do sleep .1"
    command = step(host, name, *sh(f"{meet}; done; {script}"))
    return [*command[:-3], "--container-mount-home", *command[-3:]]


def asked(shown: Faulty) -> Counter[tuple[str, str]]:
    return Counter((request.method, request.path) for request in shown.seen)


@pytest.mark.parity("swarm")
def test_registry_gets_each_request_once_for_all_nodes(four: Lab, registry: Server) -> None:
    empty_stores(four)
    registry.pusher.image("test/once", "a", layered(1))
    with front(four, registry) as shown:
        done = four.run(step(shown.host, "once", *sh("cat /number; echo /fill*")))
        assert sorted(done.stdout.splitlines()) == ["/fill1.0 /fill1.1 /fill1.2 /fill1.3"] * 4 + ["1"] * 4
        requests = asked(shown)
        assert set(requests.values()) == {1}, requests
        assert sum("/blobs/" in path for _, path in requests) == 7  # the config, and six layers
        line = r"^pyxis: .*/test/once:a: (.*) on 4 nodes in [0-9.]+ s, \1 from the registry$"
        assert re.search(line, done.stderr, re.MULTILINE)
        shown.seen.clear()
        assert four.run(step(shown.host, "once", "cat", "/number")).stdout == "1\n" * 4
        assert four.run(["ls", f"{STORE}/swarms"]).stdout  # tells srun that it needs no tracker
        assert [request.method for request in shown.seen] == ["HEAD"]  # all nodes have the image


def test_image_by_digest_is_shared(four: Lab, registry: Server) -> None:
    image = layered(2, layers=2)
    registry.pusher.image("test/digest", "a", image)
    with front(four, registry) as shown:
        command = ["srun", "-N4", f"--container-image={shown.host}#test/digest@{image.digest()}", "cat", "/number"]
        assert four.run(command).stdout == "2\n" * 4
        assert set(asked(shown).values()) == {1}


def test_one_token_serves_all_nodes(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/token", "a", layered(12))
    with front(four, registry) as shown:
        shown.login = Login({"": ""})
        assert four.run(step(shown.host, "token", "cat", "/number")).stdout == "12\n" * 4
        requests = Counter(request.path for request in shown.seen)
    assert sum(path.startswith("/token") for path in requests) == 1
    assert {path for path, count in requests.items() if count > 1} <= {"/v2/test/token/manifests/a"}  # also srun's HEAD


@pytest.mark.parametrize("status", [400, 403])
def test_token_that_expires_on_the_nodes_is_renewed(four: Lab, registry: Server, status: int) -> None:
    """The nodes got their token from srun, without a challenge of the registry. It expires, and they get another."""
    name = f"ended{status}"
    registry.pusher.image(f"test/{name}", "a", layered(status))
    with front(four, registry) as shown:
        shown.login = Login({"": ""}, uses=4, ended=status)
        assert four.run(step(shown.host, name, "cat", "/number")).stdout == f"{status}\n" * 4
        assert len(shown.login.tokens) > 1


def test_nodes_with_a_part_of_the_image_fetch_the_rest(four: Lab, registry: Server) -> None:
    first, second = layered(3, layers=2), layered(4, layers=2)
    second.layers += first.layers[2:]
    registry.pusher.image("test/part", "a", first)
    registry.pusher.image("test/more", "a", second)
    with front(four, registry) as shown:
        four.run(step(shown.host, "part", "true", nodes=3))
        four.run(step(shown.host, "more", "true", nodes=1))
        shown.seen.clear()
        out = four.run(step(shown.host, "more", *sh("echo /fill*"))).stdout.splitlines()
        assert out == ["/fill3.0 /fill3.1 /fill4.0 /fill4.1"] * 4
        assert set(asked(shown).values()) == {1}


def layers_sent(shown: Faulty, image: Image) -> int:
    """Count the requests for layers."""
    config = images.digest(image.config())
    return sum("/blobs/" in request.path and config not in request.path for request in shown.seen)


def test_nodes_with_the_image_fetch_nothing(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/owners", "a", layered(17, layers=1))
    with front(four, registry) as shown:
        four.run(step(shown.host, "owners", "true", nodes=3))
        four.run(step(shown.host, "owners", "true"))
        shown.seen.clear()
        four.run(step(shown.host, "owners", "sleep", "2"))
        assert [request.method for request in shown.seen] == ["HEAD"]
        assert four.run(["ls", f"{STORE}/swarms"]).stdout, "the nodes have reported that they have the image"


@pytest.mark.parity("swarm_keep")
def test_kept_layers_are_uploaded_to_other_nodes(four: Lab, registry: Server) -> None:
    image = layered(18)
    registry.pusher.image("test/kept", "a", image)
    with front(four, registry) as shown, plugin_argument(four, "swarm_keep=50M"):
        four.run(step(shown.host, "kept", "true", nodes=3))
        shown.seen.clear()
        assert four.run(sh_of_all(shown.host, "kept", "cat /number")).stdout == "18\n" * 4
        assert layers_sent(shown, image) == 0
    with front(four, registry) as shown, plugin_argument(four, "swarm_keep=5M"):
        sizes = four.run(f"du -sb {STORE}/blobs | cut -f1", node="n4").stdout
        assert int(sizes) > 5_000_000
        registry.pusher.image("test/next", "a", layered(19))
        four.run(step(shown.host, "next", "true"))
        assert int(four.run(f"du -sb {STORE}/blobs | cut -f1", node="n4").stdout) <= 5_100_000


@pytest.mark.security("N2")
def test_changed_layer_of_a_node_is_fetched_again(four: Lab, registry: Server) -> None:
    """Two nodes have kept a layer, which has been changed on disk."""
    image = layered(41, layers=1)
    registry.pusher.image("test/changed", "a", image)
    with front(four, registry) as shown, plugin_argument(four, "swarm_keep=50M"):
        four.run(step(shown.host, "changed", "true", nodes=2))
        kept = f"{STORE}/blobs/{images.digest(image.layers[-1].blob).removeprefix('sha256:')}"
        for node in NODES[:2]:
            four.run(f"printf changed | dd of={kept} seek=70000 bs=1 conv=notrunc status=none", node=node)
        done = four.run(sh_of_all(shown.host, "changed", "cat /number; sha256sum /fill*"))
    assert done.stdout.splitlines().count("41") == 4
    assert len(set(done.stdout.splitlines())) == 2, "all nodes have the same file"
    assert "asking the registry" in done.stderr
    for node in NODES:
        four.run("penroot cache verify", node=node)
        four.run(f"rm -rf {STORE}/blobs", node=node)


def test_end_of_a_task_waits_for_no_download(four: Lab, registry: Server) -> None:
    """Nodes whose tasks have ended leave the swarm, although one node has only a small part of the image."""
    registry.pusher.image("test/waits", "a", layered(42, size=8_000_000))
    with front(four, registry) as shown, four.slowed("n4", 2_000_000):
        running = four.popen(step(shown.host, "waits", "true"))
        for node in NODES:
            until(lambda node=node: helpers(four, node), f"{node} begins")  # type: ignore[misc]
        for node in NODES[:3]:
            until(lambda node=node: not helpers(four, node), f"{node} is done")  # type: ignore[misc]
            assert not listening(four, node)
        assert helpers(four, "n4") and listening(four, "n4")
        four.run(["scancel", "--me"])
        running.communicate(timeout=280)


@pytest.mark.soak
def test_late_nodes_get_the_image(four: Lab, registry: Server, soak: bool) -> None:
    """Two nodes start seconds late: the others still download. With --soak, a minute late: the others have left."""
    registry.pusher.image("test/late", "a", layered(50, size=4_000_000))
    with front(four, registry) as shown, four.slowed("registry", 20_000_000), late(four, NODES[2:]) as start:
        running = four.popen(step(shown.host, "late", "cat", "/number"))
        until(lambda: shown.sent("/blobs/") > 0, "bytes of blobs")
        assert helpers(four, "n1") and not helpers(four, "n3")
        time.sleep(65 if soak else 4)
        start()
        out, err = running.communicate(timeout=200)
    assert out == "50\n" * 4, err
    assert set(asked(shown).values()) == ({1, 2} if soak else {1})


LATE = """
#include <slurm/spank.h>
#include <unistd.h>

SPANK_PLUGIN(late, 1)

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	while (spank_remote(sp) == 1 && access("/run/late", F_OK) == 0)
		usleep(50000);
	return 0;
}
"""


@contextlib.contextmanager
def late(lab: Lab, nodes: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Make slurmstepd on ``nodes`` wait in a plugin that runs before ours. Yield a function that ends the wait."""
    library = f"{lab.root}/etc/slurm/late.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=LATE, text=True, check=True)
    first = "plugstack.conf.d/00-late.conf"

    def start() -> None:
        for node in nodes:
            lab.run("rm -f /run/late", user="root", node=node)

    for node in nodes:
        lab.run("touch /run/late", user="root", node=node)
    lab.configure(first, "required /etc/slurm/late.so\n")
    try:
        yield start
    finally:
        start()
        os.unlink(f"{lab.root}/etc/slurm/{first}")
        os.unlink(library)


def helpers(lab: Lab, node: str) -> str:
    return lab.run(f"pgrep -f '{HELPER}'", user="root", node=node, check=False).stdout


def test_host_of_srun_has_two_addresses(four: Lab, registry: Server) -> None:
    """Nodes connect to the address at which Slurm has seen srun, not to the address of the host's name."""
    registry.pusher.image("test/two", "a", layered(43))
    other = "10.78.0.1"
    device = "$(ip -o route get {to} | grep -o 'dev [^ ]*')"
    with front(four, registry) as shown, contextlib.ExitStack() as undo:
        for node, command in (
            ("ctl", f"ip address {{}} {other}/32 {device.format(to=f'{SUBNET}.11')}"),
            *((node, f"ip route {{}} {other}/32 {device.format(to=f'{SUBNET}.1')}") for node in NODES),
        ):
            four.run(command.format("add"), user="root", node=node)
            undo.callback(four.run, command.format("del"), user="root", node=node)
        for number in range(1, 5):
            to = f"{SUBNET}.{10 + number}/32"
            route = f"ip route {{}} {to} {device.format(to=f'{SUBNET}.{10 + number}')} src {other}"
            four.run(route.format("add"), user="root")
            undo.callback(four.run, route.format("del"), user="root")
        done = four.run(step(shown.host, "two", *sh("cat /number; env | grep LAUNCH_NODE")))
        assert done.stdout.splitlines().count("43") == 4
        assert done.stdout.count(f"SLURM_LAUNCH_NODE_IPADDR={other}") == 4
        assert set(asked(shown).values()) == {1}


@pytest.mark.parity("swarm")
def test_each_node_asks_the_registry_without_a_swarm(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/off", "a", layered(5, layers=1))
    with front(four, registry) as shown, plugin_argument(four, "swarm=no"):
        assert four.run(step(shown.host, "off", "cat", "/number")).stdout == "5\n" * 4
        assert max(asked(shown).values()) == 4


@pytest.mark.security("N1")
def test_only_helpers_see_the_key(four: Lab, registry: Server) -> None:
    """The key of the swarm is not in tasks, task prologs and epilogs, attached steps, logs or the output of srun."""
    registry.pusher.image("test/key", "a", layered(6, layers=1))
    everything = "cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n'; true"
    seen = "/home/alice/seen"
    script = f"printf '#!/bin/sh\\nenv > {seen}/%s.$$\\n' $when > {seen}/$when; chmod +x {seen}/$when"
    four.run(f"mkdir -p {seen}; for when in prolog epilog; do {script}; done")
    logs = [(name, os.path.getsize(name)) for name in log_files(four)]
    with front(four, registry) as shown, configured(four, "SlurmdDebug=verbose", "SlurmdDebug=debug3"):
        options = [f"--task-prolog={seen}/prolog", f"--task-epilog={seen}/epilog", "-vvvvvv", "--container-mount-home"]
        command = step(shown.host, "key", *sh(f"{everything}; sleep 5"))
        running = four.popen(f"{shlex.join([command[0], *options, *command[1:]])} 2> {seen}/stderr")
        until(lambda: four.run("squeue -h -s -o %i").stdout.strip(), "the step")
        job = four.run("squeue -h -t R -o %i").stdout.strip()
        attached = four.run(["srun", "--overlap", f"--jobid={job}", "-N4", *sh(everything)]).stdout
        out, _ = running.communicate(timeout=280)
    err = four.run(f"cat {seen}/stderr").stdout
    prolog, epilog = (four.run(f"cat {seen}/{when}.*").stdout for when in ("prolog", "epilog"))
    written = ""
    for name, size in logs:
        with open(name, errors="replace") as file:
            file.seek(size)
            written += file.read()
    assert "debug3" in err + written
    for text in (out, attached, prolog, epilog):
        assert "SLURM_JOB_ID" in text
    for text in (out, err, attached, prolog, epilog, written):
        assert "SLURM_PYXIS_SWARM" not in text
        assert not re.search(r"\b[0-9a-f]{64}\b", re.sub("sha256:[0-9a-f]{64}", "", text))


def log_files(lab: Lab) -> list[str]:
    return glob.glob(f"{lab.root}/nodes/*/var/log/slurm*.log")


@pytest.mark.parametrize("what", ["blob", "config", "login"])
def test_refusal_of_the_registry_is_reported_once(four: Lab, registry: Server, what: str) -> None:
    image = layered(7)
    registry.pusher.image("test/refuses", "a", image)
    with front(four, registry) as shown:
        if what == "login":
            shown.login = Login({"someone": "secret"})
        else:
            digest = images.digest(image.layers[2].blob if what == "blob" else image.config())
            shown.faults.append(Fault(f"/blobs/{digest}", times=99, status=403))
        done = four.run(step(shown.host, "refuses", "true"), check=False)
    assert done.returncode != 0
    assert done.stderr.count("failed to import docker image") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_node_without_registry_gets_the_image_from_others(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/far", "a", layered(8))
    with front(four, registry) as shown, four.unreachable("n1", "registry"), four.unreachable("n2", "registry"):
        assert four.run(step(shown.host, "far", "cat", "/number")).stdout == "8\n" * 4


def test_nodes_without_registry_use_the_host_of_srun(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/air", "a", layered(16))
    with front(four, registry) as shown, contextlib.ExitStack() as gap:
        for node in NODES:
            gap.enter_context(four.unreachable(node, "registry"))
        assert four.run(step(shown.host, "air", "cat", "/number")).stdout == "16\n" * 4
        assert set(asked(shown).values()) == {1}


@pytest.mark.clusters("Firewalls")
def test_nodes_with_a_firewall_between_them_get_the_image(four: Lab, registry: Server) -> None:
    """n1 stays reachable, because slurmstepd on the other nodes reports the end of tasks to n1."""
    registry.pusher.image("test/apart", "a", layered(9))
    with front(four, registry) as shown, contextlib.ExitStack() as walls:
        for node, other in (("n2", "n3"), ("n3", "n4"), ("n4", "n2")):
            walls.enter_context(four.unreachable(node, other))
        assert four.run(step(shown.host, "apart", "cat", "/number")).stdout == "9\n" * 4  # from n1 or the registry


@pytest.mark.clusters("Firewalls")
@pytest.mark.parity("swarm_network")
@pytest.mark.parametrize("hosts", ["nodes", "all"])
def test_swarm_network_limits_the_swarm(four: Lab, registry: Server, hosts: str) -> None:
    """If srun's host is outside of swarm_network, each node asks the registry."""
    number = 13 if hosts == "nodes" else 14
    registry.pusher.image(f"test/within{number}", "a", layered(number, layers=1))
    addresses = f"{SUBNET}.{'8/29' if hosts == 'nodes' else '0/24'}"
    with front(four, registry) as shown, plugin_argument(four, f"swarm_network={addresses}"):
        assert four.run(step(shown.host, f"within{number}", "cat", "/number")).stdout == f"{number}\n" * 4
        assert max(asked(shown).values()) == (4 if hosts == "nodes" else 1)


def test_quiet_srun_shows_no_progress(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/quiet", "a", layered(15, layers=1))
    with front(four, registry) as shown:
        command = step(shown.host, "quiet", "cat", "/number")
        done = four.run([command[0], "--quiet", *command[1:]])
        assert (done.stdout, "from the registry" in done.stderr) == ("15\n" * 4, False)
        assert set(asked(shown).values()) == {1}


def test_killed_peer_does_not_stop_the_others(four: Lab, registry: Server) -> None:
    """Kill the peers that fetch. Other peers take over, and the nodes of the killed peers ask the registry."""
    registry.pusher.image("test/killed", "a", layered(10, size=4_000_000))
    with front(four, registry) as shown, contextlib.ExitStack() as slow:
        slow.enter_context(four.slowed("registry", 40_000_000))
        running = four.popen(step(shown.host, "killed", "cat", "/number"))
        until(lambda: shown.sent("/blobs/") > 4_000_000, "bytes of blobs")
        for node in NODES[:2]:
            listening = "ss -Htlnp | grep python3 | grep -o 'pid=[0-9]*' | cut -d= -f2"
            four.run(f"kill -KILL $({listening})", user="root", node=node)
        out, err = running.communicate(timeout=280)
    assert out == "10\n" * 4, err


def kill(lab: Lab, what: str, node: str, seconds: float) -> None:
    """Kill ``what`` (of KILLS) on ``node``; restart slurmd after ``seconds``. "links" cuts links for ``seconds``."""
    peer = "ss -Htlnp | grep python3 | grep -o 'pid=[0-9]*' | cut -d= -f2 | xargs -r kill -KILL"
    if what == "helper":
        lab.run(f"pkill -KILL -f {HELPER}", user="root", node=node, check=False)
    elif what == "peer":
        lab.run(peer, user="root", node=node, check=False)
    elif what == "tracker":
        lab.run(peer, user="root", check=False)
    elif what == "slurmd":
        lab.run("pkill -KILL -f '(^|/)slurmd( |$)'", user="root", node=node)  # -f: its threads have other names
        time.sleep(seconds)
        lab.restart_daemon(node, "slurmd")
    else:  # cut all links but those that Slurm needs
        with contextlib.ExitStack() as cut:
            for other in {"registry", *NODES[1:]} - {node}:
                cut.enter_context(lab.unreachable(node, other))
            time.sleep(seconds)


KILLS = ("helper", "peer", "tracker", "slurmd", "links")


@pytest.mark.soak
@pytest.mark.parametrize("what", KILLS)
def test_random_kills_stop_no_other(four: Lab, registry: Server, what: str, soak: bool, rng: random.Random) -> None:
    """Nodes with a living helper start their tasks. A node whose helper was killed reports the loss in one line."""
    for number in range(20 if soak else 1):
        node, name = rng.choice(NODES), f"{what}{number}"
        registry.pusher.image(f"test/{name}", "a", layered(rng.randrange(1000, 1 << 30), size=1_500_000))
        with front(four, registry) as shown, four.slowed("registry", 40_000_000):
            running = four.popen(step(shown.host, name, "echo", "up"))
            until(lambda shown=shown: shown.sent("/blobs/") > 100_000, "bytes of blobs")  # type: ignore[misc]
            time.sleep(rng.random() * 1.5)
            kill(four, what, node, rng.random() * 2)
            out, err = running.communicate(timeout=280)
        missing = 4 - out.count("up\n")
        output = f"{what} of {node}, number {number}:\n{out}{err}"
        assert missing <= (what == "helper") and out == "up\n" * (4 - missing), output
        assert bool(missing) == bool(running.returncode) == bool(re.search("error: pyxis: .*helper", err)), output
        assert_nothing_left(four)
    for node in NODES:
        four.run("penroot cache verify && penroot cache prune", node=node)


def test_single_node_starts_no_tracker(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/alone", "a", layered(11, layers=1))
    with front(four, registry) as shown, four.slowed("registry", 8_000_000):
        running = four.popen(step(shown.host, "alone", "cat", "/number", nodes=1))
        until(lambda: shown.sent("/blobs/") > 1_000_000, "bytes of blobs")
        assert not listening(four, "ctl") and not listening(four, "n1")
        assert running.communicate(timeout=280)[0] == "11\n"
        assert set(asked(shown).values()) == {1}


def test_no_port_is_open_if_all_nodes_have_the_image(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/all", "a", layered(44, layers=1))
    with front(four, registry) as shown:
        four.run(step(shown.host, "all", "true"))
        running = four.popen(step(shown.host, "all", *sh("echo up; sleep 3")))
        assert next_line(running) == "up\n"
        assert not any(listening(four, node) for node in ("ctl", *NODES))
        assert running.communicate(timeout=280)[0] == "up\n" * 3


def test_steps_of_salloc_and_sbatch_share_images(four: Lab, registry: Server) -> None:
    """Run srun in salloc, and two srun at the same time in a batch script."""
    for number, name in ((20, "alloc"), (21, "batch")):
        registry.pusher.image(f"test/{name}", "a", layered(number))
    with front(four, registry) as shown:
        assert four.run(["salloc", "-N4", *step(shown.host, "alloc", "cat", "/number")]).stdout == "20\n" * 4
        srun = shlex.join(["srun", "--overlap", *step(shown.host, "batch", "cat", "/number")[1:]])
        four.run(f"printf '#!/bin/sh\\n%s & %s; wait\\n' '{srun}' '{srun}' > /home/alice/two")
        sbatch(four, "-N4", "-o", "/home/alice/out", "/home/alice/two")
        assert four.run("cat /home/alice/out").stdout.splitlines().count("21") == 8
        asked_for_layers = Counter({path: count for (_, path), count in asked(shown).items() if "/blobs/" in path})
        assert max(asked_for_layers.values()) <= 2  # once for each step, if the other step has not stored it yet


def test_components_of_a_heterogeneous_job_get_the_image(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/het", "a", layered(22, layers=1))
    with front(four, registry) as shown:
        component = [f"--container-image={shown.host}#test/het:a", "cat", "/number"]
        done = four.run(["srun", "-w", "n1,n2", "-N2", *component, ":", "-w", "n3,n4", "-N2", *component])
        assert done.stdout == "22\n" * 4


@pytest.mark.parametrize("how", ["srun is killed", "the job is cancelled", "^C"])
def test_end_of_a_step_ends_its_download(four: Lab, registry: Server, how: str) -> None:
    """The fixture nothing_left checks that no process and no file is left."""
    name, after = f"ends{len(how)}", f"after{len(how)}"
    registry.pusher.image(f"test/{name}", "a", layered(30 + len(how), size=4_000_000))
    registry.pusher.image(f"test/{after}", "a", layered(60 + len(how), layers=1, size=1000))
    with front(four, registry) as shown:
        with four.slowed("registry", 20_000_000):
            running = four.popen(["sh", "-c", 'echo $$; exec "$@"', "sh", *step(shown.host, name, "true")])
            assert running.stdout
            pid = running.stdout.readline().strip()
            until(lambda: shown.sent("/blobs/") > 2_000_000, "bytes of blobs")
            if how == "the job is cancelled":
                four.run("scancel -u alice")
            else:
                for _ in range(1 if how == "srun is killed" else 2):  # at the first ^C, srun only prints its tasks
                    four.run(f"kill -{'KILL' if how == 'srun is killed' else 'INT'} {pid}", check=False)
            running.communicate(timeout=120)
            assert running.returncode != 0
            if how == "srun is killed":  # the job goes on until the user cancels it
                four.run("scancel -u alice")
            until(lambda: not four.run("squeue -h").stdout, "the end of the job")
        # The next import deletes the unfinished files of killed processes.
        four.run(step(shown.host, after, "true"))


def test_node_with_a_full_disk_fails_alone(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/room", "a", layered(23, size=6_000_000))
    four.run(f"mkdir -p {STORE}", node="n2")
    with front(four, registry) as shown:
        four.run(f"mount -t tmpfs -o size=9M,mode=700,uid=$(id -u alice) none {STORE}", user="root", node="n2")
        try:
            done = four.run(step(shown.host, "room", "cat", "/number"), check=False)
        finally:
            four.run(f"umount -l {STORE}", user="root", node="n2")
    assert done.stdout == "23\n" * 3
    assert "n2: failed to import" in done.stderr
    assert "No space left on device" in done.stderr


def test_image_larger_than_the_memory_of_the_step(four: Lab, registry: Server) -> None:
    registry.pusher.image("test/memory", "a", layered(24, size=50_000_000))  # 200 MB, which a slow disk writes late
    with front(four, registry) as shown:
        command = step(shown.host, "memory", "cat", "/number")
        assert four.run([command[0], "--mem=150M", *command[1:]]).stdout == "24\n" * 4
