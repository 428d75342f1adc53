"""One pull: the nodes of a step use one image, and each blob is fetched once for all of them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import images
from tests.fakeregistry import Fault, Faulty, Login, faulty
from tests.images import Image, entry
from tests.kernel.conftest import require
from tests.kernel.registry import Server
from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left, next_line, plugin_argument
from tests.waiting import until

STORE = "/var/tmp/enroot-cache-2001"  # alice's store on each node: lab/etc.py
BLOBS = "blobs"  # in alice's home, which all nodes share


@contextlib.contextmanager
def front(lab: Lab, registry: Server, *faults: Fault) -> Iterator[Faulty]:
    """Serve ``registry`` to the nodes of a lab."""
    with faulty(registry.host, *faults, listener=lab.listener("registry")) as shown:
        shown.host = "registry:" + shown.host.rpartition(":")[2]
        yield shown


@pytest.fixture
def blobs(lab: Lab, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Yield the setting for a directory of blobs that all nodes share."""
    cluster: Lab = request.getfixturevalue("four") if "four" in request.fixturenames else lab
    yield {"ENROOT_SHARED_BLOBS": f"/home/alice/{BLOBS}"}
    cluster.run(["rm", "-rf", BLOBS])


def empty_stores(lab: Lab) -> None:
    """Empty the nodes' stores: they may have layers of the test's image from other tests."""
    for node in lab.nodes:
        lab.run(["rm", "-rf", STORE], user="root", node=node)


def numbered(number: int) -> Image:
    return images.busybox(entry("number", b"%d\n" % number), entry("fill", os.urandom(200_000)))


def layout(lab: Lab, image: Image, name: str) -> None:
    """Create an OCI layout in alice's home, for all nodes."""
    directory = Path(lab.root, "home/alice", name)
    index = images.index([(image, {"os": "linux", "architecture": image.architecture})])
    images.write_layout(directory, (image.config(), image.manifest(), *(layer.blob for layer in image.layers)), index)
    lab.run(["chown", "-R", "alice:", f"/home/alice/{name}"], user="root")


@pytest.mark.parity("--container-image: accepts oci:, oci-archive: and docker-archive:")
@pytest.mark.parametrize("form", ["oci", "oci-archive", "docker-archive"])
def test_steps_from_images_in_files(lab: Lab, form: str) -> None:
    layout(lab, numbered(8), "layout")
    try:
        if form == "oci-archive":
            lab.run("tar -cf image.tar -C layout .")
        elif form == "docker-archive":
            lab.run(["skopeo", "--insecure-policy", "copy", "-q", "oci:layout", "docker-archive:image.tar:test/file:a"])
        path = "layout" if form == "oci" else "image.tar"
        step = ["srun", "-N2", f"--container-image={form}:{path}"]
        assert lab.run([*step, "cat", "/number"]).stdout == "8\n8\n"
        lab.run(["rm", "-rf", "layout", "image.tar"])
        done = lab.run([*step, "true"], check=False)
        assert done.returncode != 0
        assert path in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        lab.run(["rm", "-rf", "layout", "image.tar"])


def after_request(tag: str) -> Callable[[Callable[[], object]], Fault]:
    """Return a constructor of faults. Its argument is a function to call right after a request for ``tag``.

    The fault changes no reply.
    """

    def then(happens: Callable[[], object]) -> Fault:
        def change(body: bytes) -> bytes:
            happens()
            return body

        return Fault(f"/manifests/{tag}", change=change)

    return then


def delete(registry: Server, repository: str, digest: str) -> None:
    url = f"http://{registry.host}/v2/{repository}/manifests/{digest}"
    urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).close()


@pytest.mark.parity("resolve_tags")
def test_tag_that_moves_is_one_image_for_all_nodes(lab: Lab, registry: Server) -> None:
    old, new = numbered(1), numbered(2)
    registry.pusher.image("test/moves", "a", old)
    moved = after_request("a")(lambda: registry.pusher.image("test/moves", "a", new))
    with front(lab, registry, moved) as shown:
        image = f"--container-image={shown.host}#test/moves:a"
        assert lab.run(["srun", "-N2", image, "cat", "/number"]).stdout == "1\n1\n"
        asked = [(each.method, each.path) for each in shown.seen if each.path.endswith("/manifests/a")]
        assert asked == [("HEAD", "/v2/test/moves/manifests/a")]  # once, and only by srun
        assert lab.run(["srun", "-N2", image, "cat", "/number"]).stdout == "2\n2\n"
        before = len(shown.seen)
        script = "echo $(cat /number; env | grep -c RESOLVED)"
        assert lab.run(["srun", "-N2", "--export=NONE", image, "sh", "-c", script]).stdout == "2 0\n" * 2
        assert [request.method for request in shown.seen[before:]] == ["HEAD"]


@pytest.mark.parity("resolve_tags")
def test_node_that_cannot_have_the_image_of_the_step_names_both(lab: Lab, registry: Server) -> None:
    old, new = numbered(3), numbered(4)
    registry.pusher.image("test/gone", "a", old)

    def move() -> None:
        registry.pusher.image("test/gone", "a", new)
        delete(registry, "test/gone", old.digest())

    with front(lab, registry) as shown:
        image = f"--container-image={shown.host}#test/gone:a"
        lab.run(["srun", "-w", "n1", image, "true"])
        shown.faults.append(after_request("a")(move))
        done = lab.run(["srun", "-N2", image, "cat", "/number"], check=False)
        assert done.returncode != 0
        assert done.stdout == "3\n"  # n1 has the image
        error = next(line for line in done.stderr.splitlines() if "resolved it to" in line)
        assert old.digest() in error
        assert new.digest() in error
        assert "n2" in error


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
@pytest.mark.parity("resolve_tags")
def test_nodes_resolve_the_tag_where_srun_cannot(lab: Lab, registry: Server) -> None:
    registry.pusher.image("test/far", "a", numbered(5))
    with front(lab, registry) as shown, lab.unreachable("ctl", "registry"):
        done = lab.run(["srun", "-N2", f"--container-image={shown.host}#test/far:a", "cat", "/number"])
    assert done.stdout == "5\n5\n"
    assert done.stderr.count("srun could not resolve the tag") == 1


def test_network_that_is_slow_is_not_one_that_stalls(lab: Lab, registry: Server) -> None:
    registry.pusher.image("test/slow", "a", images.busybox(entry("fill", os.urandom(1 << 20))))
    with contextlib.ExitStack() as slow, front(lab, registry) as shown:
        try:
            slow.enter_context(lab.slowed("n1", 2_000_000))  # bits a second: 4 s for the layer
        except FileNotFoundError:
            require(False, "this kernel has no tc-tbf(8)")
        began = time.monotonic()
        step = ["srun", "-w", "n1", f"--container-image={shown.host}#test/slow:a", "ls", "/fill"]
        assert lab.run(step, env={"ENROOT_STALL_TIMEOUT": "2"}).stdout == "/fill\n"
        assert time.monotonic() - began > 3


@pytest.mark.parity("resolve_timeout")
def test_step_with_a_stored_image_does_not_wait_for_its_registry(lab: Lab, registry: Server) -> None:
    registry.pusher.image("test/hangs", "a", numbered(6))
    over = threading.Event()

    def wait(body: bytes) -> bytes:
        over.wait(120)
        return body

    with front(lab, registry) as shown:
        image = f"--container-image={shown.host}#test/hangs:a"
        lab.run(["srun", "-w", "n1", image, "true"])
        shown.faults.append(Fault("/manifests/", times=99, change=wait))
        try:
            began = time.monotonic()
            with plugin_argument(lab, "resolve_timeout=1"):
                done = lab.run(["srun", "-w", "n1", image, "cat", "/number"])
            assert time.monotonic() - began < 60
        finally:
            over.set()
    assert done.stdout == "6\n" and "using the stored image" in done.stderr


@pytest.mark.parity("an image that a registry refuses is reported once")
@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("registry:5000#nope:1", "registry:5000 has no repository nope"),
        ("registry:5000#minimal:nope", "registry:5000/minimal has no tag nope"),
        ("registry:5000", "registry-1.docker.io has no repository library/registry"),
    ],
)
def test_missing_image_is_reported_once_for_all_nodes(lab: Lab, image: str, why: str) -> None:
    done = lab.run(["srun", "-N2", "--ntasks-per-node=2", f"--container-image={image}", "true"], check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "pyxis: " in line and "importing" not in line]
    assert lines[0] == f"srun: error: pyxis: failed to import docker image: {image}: {why} (--container-image)"
    assert len(lines) == 2  # the second line is a hint
    assert_nothing_left(lab)


@pytest.mark.parity("an image that a registry refuses is reported once")
def test_refused_login_is_reported_once_for_all_nodes(lab: Lab, registry: Server) -> None:
    registry.pusher.image("test/denied", "a", numbered(11))
    with front(lab, registry) as shown:
        shown.login = Login({"someone": "secret"})
        done = lab.run(["srun", "-N2", f"--container-image={shown.host}#test/denied:a", "true"], check=False)
    assert done.returncode != 0
    assert done.stderr.count("test/denied does not exist or needs a login") == 1


@pytest.mark.parity(".credentials: a password may be $VARIABLE or $(command)")
def test_login_on_a_node_uses_variables_of_the_job(lab: Lab, registry: Server) -> None:
    """The variables hold a password, or the path of a login file."""
    with front(lab, registry) as shown:
        shown.login = Login({"alice": "secret"})
        host = shown.host.partition(":")[0]
        lab.run("mkdir -p .config/enroot; cat > .config/enroot/.credentials; chmod 600 .config/enroot/.credentials",
                input=f"machine {host} login alice password $LAB_TOKEN\n")  # fmt: skip
        encoded = base64.b64encode(b"alice:secret").decode()
        lab.run("cat > auth.json", input=json.dumps({"auths": {shown.host: {"auth": encoded}}}))
        try:
            for number, variable in enumerate(
                ({"LAB_TOKEN": "secret"}, {"REGISTRY_AUTH_FILE": "/home/alice/auth.json"})
            ):
                if number:
                    lab.run("rm .config/enroot/.credentials")
                registry.pusher.image(f"test/variable{number}", "a", numbered(90 + number))
                words = [f"--container-image={shown.host}#test/variable{number}:a", "cat", "/number"]
                assert lab.run(["srun", "-N2", *words], env=variable).stdout == f"{90 + number}\n" * 2
        finally:
            lab.run("rm -rf .config/enroot auth.json")


@pytest.mark.parity("an image that a registry refuses is reported once")
def test_node_may_have_what_is_refused_to_srun(lab: Lab, registry: Server) -> None:
    """The registry refuses the tag only as long as srun asks. The nodes get the image."""
    registry.pusher.image("test/mirrored", "a", numbered(12))
    refusal = Fault("/manifests/a", status=404, times=100)

    def over(body: bytes) -> bytes:
        if not tags.times:
            refusal.times = 0
        return body

    # srun asks with HEAD and with GET, and lists the existing tags after each.
    tags = Fault("/tags/list", times=2, change=over)
    with front(lab, registry, refusal, tags) as shown:
        done = lab.run(["srun", "-N2", f"--container-image={shown.host}#test/mirrored:a", "cat", "/number"])
    assert done.stdout == "12\n12\n"
    assert done.stderr.count("has no tag a") == 1


@pytest.mark.parity("resolve_tags")
def test_components_of_a_heterogeneous_job_use_one_image(lab: Lab, registry: Server) -> None:
    old, new = numbered(13), numbered(14)
    registry.pusher.image("test/het", "a", old)
    moved = after_request("a")(lambda: registry.pusher.image("test/het", "a", new))
    with front(lab, registry, moved) as shown:
        step = f"srun --het-group=0,1 --container-image={shown.host}#test/het:a cat /number"
        assert lab.run(["salloc", "-Q", "-w", "n1", ":", "-w", "n2", *step.split()]).stdout == "13\n13\n"
        step = f"--container-image={shown.host}#test/het:a cat /number"
        assert lab.run(f"srun -Q -w n1 {step} : -w n2 cat /number").stdout == "14\n14\n"
        done = lab.run(f"srun -Q -w n1 {step.replace(':a', ':b')} : -w n2 true", check=False)
        assert done.stderr.count("test/het has no tag b") == 1


@pytest.mark.clusters("Images that many jobs fetch, and a file system that all nodes see")
@pytest.mark.parity("ENROOT_SHARED_BLOBS")
def test_four_nodes_fetch_each_blob_once(four: Lab, registry: Server, blobs: dict[str, str]) -> None:
    image = images.busybox(entry("file", os.urandom(300_000)))
    image.layers += [images.Layer(images.tar([entry(f"file{n}", os.urandom(300_000))])) for n in range(5)]
    registry.pusher.image("test/four", "a", image)
    empty_stores(four)
    with front(four, registry) as shown:
        out = four.run(
            ["srun", "-N4", f"--container-image={shown.host}#test/four:a", "sh", "-c", "cat /file* | sha256sum"],
            env=blobs,
        ).stdout
    assert len(out.splitlines()) == 4
    assert len(set(out.splitlines())) == 1
    wanted = [images.digest(blob) for blob in (image.config(), *(layer.blob for layer in image.layers))]
    asked = [request.path.rpartition("/")[2] for request in shown.seen if "/blobs/" in request.path]
    assert sorted(asked) == sorted(wanted)


@pytest.mark.parity("ENROOT_SHARED_BLOBS")
def test_node_that_dies_while_it_fetches_is_succeeded(lab: Lab, registry: Server, blobs: dict[str, str]) -> None:
    image = numbered(6)
    registry.pusher.image("test/dies", "a", image)
    digest = images.digest(image.layers[1].blob)
    with front(lab, registry, Fault(digest, stall_at=0.5)) as shown:
        command = ["srun", f"--container-image={shown.host}#test/dies:a", "cat", "/number"]
        first = lab.popen([*command[:1], "-w", "n1", *command[1:]], env=blobs)
        until(lambda: shown.sent(digest) > 0, "n1 fetches the layer")
        second = lab.popen([*command[:1], "-w", "n2", *command[1:]], env=blobs)
        try:
            lock = Path(lab.root, "home/alice", BLOBS, "sha256", digest.partition(":")[2] + ".lock")
            host, _, pid = lock.read_text().split()
            assert host == "n1"
            lab.run(["kill", "-9", pid], node="n1")
            assert first.wait(300) != 0
            assert lock.exists()
            long_ago = time.time() - 3600
            os.utime(lock, (long_ago, long_ago))  # instead of waiting until the lock has expired
            out, err = second.communicate(timeout=300)
        finally:
            for job in (first, second):
                job.kill()
                job.communicate()
    assert out == "6\n", err
    assert "has not renewed its lock" in err
    assert not lock.exists()


def test_squashfs_file_is_unpacked_once_on_each_node(lab: Lab, registry: Server) -> None:
    registry.pusher.image("test/file", "a", numbered(7))
    env = {"ENROOT_UNPACK": "yes"}
    try:
        with front(lab, registry) as shown:
            lab.run(["penroot", "import", "-o", "once.sqsh", f"docker://{shown.host}#test/file:a"], node="n1")
        step = ["srun", "-N2", "--container-image=./once.sqsh"]
        assert lab.run([*step, "cat", "/number"], env=env).stdout == "7\n7\n"
        write = ["--container-writable", "sh", "-c", "echo 8 >/number; cat /number"]
        assert lab.run([*step, *write], env=env).stdout == "8\n8\n"
        assert lab.run([*step, "cat", "/number"], env=env).stdout == "7\n7\n"
        for node in ("n1", "n2"):
            assert "unpacking" not in lab.run(["penroot", "start", "once.sqsh", "true"], node=node, env=env).stderr
            assert "/home/alice/once.sqsh" in lab.run(f"cat {STORE}/images/*/file", node=node).stdout.splitlines()
    finally:
        lab.run(["rm", "-f", "once.sqsh"])


@pytest.mark.clusters("NFS or Lustre, and no local disk")
def test_steps_from_a_store_of_squashfs_files(lab: Lab, registry: Server) -> None:
    digest = registry.pusher.image("test/form", "a", numbered(10))
    stored = f"{STORE}/images/{digest.partition(':')[2]}"
    env = {"ENROOT_STORE_FORM": "squashfs"}
    with front(lab, registry) as shown:
        step = ["srun", "-N2", f"--container-image={shown.host}#test/form:a"]
        assert lab.run([*step, "cat", "/number"], env=env).stdout == "10\n10\n"
        for node in ("n1", "n2"):
            assert "image.sqsh" in lab.run(["ls", stored], node=node).stdout.split()
        before = len(shown.seen)
        write = ["--container-writable", "sh", "-c", "echo 8 >/number; cat /number"]
        assert lab.run([*step, *write], env=env).stdout == "8\n8\n"
        assert [request.method for request in shown.seen[before:]] == ["HEAD"]


@pytest.mark.clusters("NFS or Lustre, and no local disk")
def test_prune_keeps_what_another_node_runs(lab: Lab, registry: Server) -> None:
    """Nodes share the store. A node does not see mounts of another node, but sees its leases: files in the store."""
    registry.pusher.image("test/lease", "a", numbered(9))
    store = "/home/alice/store"
    env = {"ENROOT_CACHE_PATH": store}
    lab.run(["mkdir", "-m", "700", "-p", store + "/leases"])  # as if on a network file system
    try:
        with front(lab, registry) as shown:
            command = [
                "penroot",
                "start",
                f"docker://{shown.host}#test/lease:a",
                "sh",
                "-c",
                "echo up; cat; cat /number",
            ]
            job = lab.popen(command, node="n1", env=env)
            assert next_line(job) == "up\n"
        stderr = lab.run(["penroot", "cache", "prune"], node="n2", env=env).stderr
        assert "a start on n1" in stderr
        assert job.communicate("", timeout=300)[0] == "9\n"
        lab.run("touch -d '40 days ago' store/leases/*.n1")
        lab.run(["penroot", "cache", "prune", "--dry-run"], node="n2", env=env)
        assert len(lab.run(["ls", store + "/images"]).stdout.split()) == 1
        lab.run(["penroot", "cache", "prune"], node="n2", env=env)
        assert lab.run(["ls", store + "/images", store + "/layers", store + "/leases"]).stdout.split() == [
            *(f"{store}/images:", f"{store}/layers:", f"{store}/leases:")
        ]
    finally:
        lab.run(["rm", "-rf", store])


def test_steps_that_import_an_image_at_once_run_at_once(lab: Lab, registry: Server) -> None:
    """Each step waits until the others are in their containers, like ranks of two jobs on the same nodes."""
    registry.pusher.image("test/together", "a", numbered(20))
    script = "touch /meet/$0; until [ -e /meet/a -a -e /meet/b -a -e /meet/c ]; do sleep 0.1; done"

    def when_two_wait(body: bytes) -> bytes:
        """Delay the first blob until two processes wait for its lock: proc_locks(5)."""
        until(lambda: lab.run("grep -e '-> FLOCK' /proc/locks; :", node="n1").stdout.count("\n") == 2, "two wait")
        return body

    lab.run(["mkdir", "/home/alice/meet"])
    try:
        with front(lab, registry, Fault("/blobs/", change=when_two_wait)) as shown:
            image = f"--container-image={shown.host}#test/together:a"
            step = ["srun", "-w", "n1", "--overlap", "--mem=100", image, "--container-mounts=/home/alice/meet:/meet"]
            steps = [lab.popen([*step, "sh", "-c", script, name]) for name in "abc"]
            for each in steps:
                _, errors = each.communicate(timeout=120)
                assert each.returncode == 0, errors
    finally:
        lab.run(["rm", "-rf", "/home/alice/meet"])


@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
def test_password_in_an_image_is_kept_by_no_job(lab: Lab, command: str) -> None:
    """Slurm shows the options of a job to everybody."""
    image = "--container-image=docker://me:hunter2@registry:5000#minimal:1"
    words = {"sbatch": ["--wrap", "true"], "salloc": ["true"]}.get(command, ["true"])
    done = lab.run([command, image, *words], check=False)
    assert done.returncode != 0
    assert "passwords are not accepted here, because this reference is stored and shown" in done.stderr
    assert "penroot login --username USER registry:5000" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert lab.run("squeue -h -u alice").stdout == ""
