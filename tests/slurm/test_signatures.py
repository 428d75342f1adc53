"""Images that must be signed: srun refuses other images before it queues a job, and each node verifies them too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import images, otherimages
from tests.images import OCI, entry
from tests.kernel.registry import Server
from tests.signing import Signer, payload, push, sign
from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, assert_nothing_left, next_line, plugin_argument, refused, sbatch, sh, srun
from tests.slurm.test_pull import front

SIGNER, OTHER = Signer(), Signer("ed25519")
POLICY = "/etc/enroot/policy.json"
KEY = "/etc/enroot/keys/cosign.pub"
ACCEPT, REJECT = {"type": "insecureAcceptAnything"}, {"type": "reject"}
WANTED = {"type": "sigstoreSigned", "keyPath": KEY, "signedIdentity": {"type": "matchRepository"}}


def write(lab: Lab, default: object, **transports: object) -> None:
    policy = {"default": [default], "transports": transports}
    Path(f"{lab.root}{POLICY}").write_text(json.dumps(policy, indent=2))


@pytest.fixture(autouse=True)
def policy(lab: Lab) -> Iterator[None]:
    SIGNER.write(Path(f"{lab.root}{KEY}"))
    write(lab, WANTED)
    yield
    os.unlink(f"{lab.root}{POLICY}")
    assert_nothing_left(lab)


def image(registry: Server, name: str, number: int) -> str:
    """Push a new image, and return its digest."""
    made = images.busybox(entry("number", b"%d" % number), entry("fill", os.urandom(100_000)), kinds=OCI)
    return registry.pusher.image(f"test/{name}", "1", made)


def jobs(lab: Lab) -> str:
    return lab.run(["sacct", "-n"], check=False).stdout + lab.run(["squeue", "-h"]).stdout


@pytest.mark.parity("srun: nodes get the signatures of srun")
def test_nodes_get_signatures_from_srun(lab: Lab, registry: Server) -> None:
    digest = image(registry, "signed", 1)
    with front(lab, registry) as shown:
        sign(registry.pusher, "test/signed", digest, SIGNER, f"{shown.host}/test/signed")
        option = f"--container-image={shown.host}#test/signed:1"
        assert lab.run(["srun", "-N2", option, "cat", "/number"]).stdout.split() == ["11"]
        asked = shown.asked(".sig")
        assert asked == 2  # by srun at submit, and by the tracker that srun starts for its nodes. No node asks.
        shown.seen.clear()
        assert lab.run(["srun", "-N2", option, "cat", "/number"]).stdout == "11"
        assert shown.asked(".sig") == 1  # by srun: the nodes have the signature in their stores


@pytest.mark.parity("srun, sbatch: refused before anything is queued")
def test_unsigned_image_is_refused_before_it_is_queued(lab: Lab, registry: Server) -> None:
    image(registry, "plain", 2)
    digest = image(registry, "other", 3)
    with front(lab, registry) as shown:
        sign(registry.pusher, "test/other", digest, OTHER, f"{shown.host}/test/other")
        for name, why in (("plain", "it has no signature"), ("other", f"none of 1 signature is by {KEY}")):
            option = f"--container-image={shown.host}#test/{name}:1"
            stderr = refused(lab, option, "true")
            assert f"{option}: {shown.host}/test/{name}:1 (" in stderr
            assert f"is not signed as {POLICY}: default[0] (default) requires: {why}" in stderr
            assert "queued" not in stderr and "srun: job" not in stderr
            lab.run("cat > job.sh", input="#!/bin/sh\necho ran > ran\n")
            done = sbatch(lab, option, "job.sh", check=False)
            assert done.returncode != 0 and why in done.stderr and done.stdout == ""
    assert lab.run("ls ran; rm -f job.sh", check=False).stdout == ""


@pytest.mark.parametrize("way", ["lock", "pin"])
def test_digest_of_a_pinned_tag_must_be_signed(lab: Lab, registry: Server, way: str) -> None:
    """The signature of the tag's current image does not matter."""
    with front(lab, registry) as shown:
        name = f"{shown.host}#test/{way}:1"
        option = f"--container-image={name}"
        signed = image(registry, way, 5)
        sign(registry.pusher, f"test/{way}", signed, SIGNER, f"{shown.host}/test/{way}")
        step = f"srun -w n1 {option} cat /number"
        if way == "pin":
            script = f"until [ -e moved ]; do sleep 0.1; done; {step}"
            job = lab.popen(["salloc", "-Q", "-w", "n1", f"--container-pin={name}", "sh", "-c", f"echo $$; {script}"])
            assert next_line(job)
            image(registry, way, 6)
            lab.run("touch moved")
            assert job.communicate(timeout=300)[0] == "5"
            lab.run("rm moved")
            return
        lab.run(["penroot", "lock", "my.lock", name])
        unsigned = image(registry, way, 6)
        assert srun(lab, "--container-lock=my.lock", option, "cat", "/number") == "5"
        assert "it has no signature" in refused(lab, option, "true")
        # The reverse: a signed tag, pinned to an unsigned digest.
        lab.run(["penroot", "lock", "my.lock", name])
        sign(registry.pusher, f"test/{way}", image(registry, way, 5), SIGNER, f"{shown.host}/test/{way}")
        stderr = refused(lab, "--container-lock=my.lock", option, "true")
        assert f"({unsigned[:19]}" in stderr and "it has no signature" in stderr and "queued" not in stderr
        lab.run("rm my.lock")


@pytest.mark.parity("srun: nodes get the signatures of srun")
@pytest.mark.security("S2")
def test_each_node_looks_for_itself(lab: Lab, registry: Server) -> None:
    """While the step waits, another signer's signature replaces the image's signature. The node refuses the image."""
    digest = image(registry, "stripped", 4)
    with front(lab, registry) as shown:
        sign(registry.pusher, "test/stripped", digest, SIGNER, f"{shown.host}/test/stripped")
        option = f"--container-image={shown.host}#test/stripped:1"
        step = lab.popen(f"exec srun -w n1 --hold {option} cat /number 2>&1")
        line = ""
        while "queued" not in line:  # srun prints "srun: job 17 queued and waiting for resources"
            line = next_line(step)
            assert line
        job = line.split()[2]
        wrong = payload(f"{shown.host}/test/stripped", digest)
        push(registry.pusher, "test/stripped", digest, [(wrong, OTHER.sign(wrong))])
        lab.run(["scontrol", "release", job], user="root")
        output, _ = step.communicate(timeout=300)
        assert step.returncode != 0
        assert "is not signed as" in output and "none of 1 signature" in output


@pytest.mark.parity("squashfs files, bcast:")
def test_files_by_their_place(lab: Lab) -> None:
    """The rule of a file's directory applies to the file, but not if bcast: sends it."""
    write(lab, REJECT, docker={"registry:5000": [ACCEPT]})
    lab.run(["penroot", "import", "-o", "x.sqsh", f"docker://{MINIMAL}"])
    for name in ("./x.sqsh", "bcast:./x.sqsh"):
        assert f"is rejected by {POLICY}: default[0] (default)" in refused(lab, f"--container-image={name}", "true")
    write(lab, REJECT, squashfs={"/home/alice": [ACCEPT]})
    assert srun(lab, "--container-image=./x.sqsh", "echo", "ran") == "ran\n"
    assert "is rejected" in refused(lab, "--container-image=bcast:./x.sqsh", "true")
    write(lab, REJECT, squashfs={"": [ACCEPT]})
    assert srun(lab, "--container-image=bcast:./x.sqsh", "echo", "ran") == "ran\n"
    lab.run(["rm", "x.sqsh"])


@pytest.mark.parity("existing containers")
def test_named_container_is_verified_at_each_use(lab: Lab) -> None:
    write(lab, ACCEPT)
    srun(lab, f"--container-image={MINIMAL}", "--container-name=kept", "true")
    write(lab, REJECT)
    stderr = refused(lab, "--container-name=kept", "true")
    assert f"registry:5000/minimal:1 is rejected by {POLICY}: default[0] (default)" in stderr
    lab.run(["penroot", "remove", "-f", "pyxis_kept"], node="n1")


@pytest.mark.parity("srun, sbatch: refused before anything is queued")
def test_policy_of_the_user_applies_before_anything_is_queued(lab: Lab) -> None:
    """The user's policy applies even without a policy of the site."""
    lab.run("mkdir -p .config/enroot; cat > .config/enroot/policy.json", input=json.dumps({"default": [REJECT]}))
    try:
        os.unlink(f"{lab.root}{POLICY}")
        for command, words in {"srun": ["true"], "sbatch": ["--wrap", "true"], "salloc": ["true"]}.items():
            before = jobs(lab)
            done = lab.run([command, f"--container-image={MINIMAL}", *words], check=False)
            assert done.returncode != 0, done.stderr
            assert "is rejected by /home/alice/.config/enroot/policy.json: default[0] (default)" in done.stderr
            assert jobs(lab) == before
    finally:
        write(lab, WANTED)
        lab.run("rm -r .config/enroot")


@pytest.mark.parity("srun, sbatch: refused before anything is queued")
def test_srun_inside_asks_the_policy_of_the_site(lab: Lab) -> None:
    """srun in a container with --container-slurm also refuses the image."""
    write(lab, ACCEPT, docker={"registry:5000/minimal": [REJECT]})
    inner = f"srun --overlap --mem=50 --chdir=/ --container-image={MINIMAL} true"
    outer = [f"--container-image={otherimages.debian()}", "--container-slurm", "--mem=500", *sh(inner)]
    stderr = refused(lab, *outer)
    assert f"srun: error: pyxis: --container-image={MINIMAL}: registry:5000/minimal:1 is rejected by" in stderr, stderr


@pytest.mark.security("S3")
def test_the_users_variables_do_not_take_the_policy_away(lab: Lab) -> None:
    write(lab, REJECT)
    elsewhere = {"ENROOT_SYSCONF_PATH": "/home/alice", "ENROOT_CONFIG_PATH": "/home/alice", "HOME": "/home/alice"}
    assert f"by {POLICY}" in refused(lab, f"--container-image={MINIMAL}", "true", env=elsewhere)
    done = lab.run(["penroot", "start", f"docker://{MINIMAL}", "true"], env=elsewhere, check=False)
    assert done.returncode == 1 and f"is rejected by {POLICY}: default[0] (default)" in done.stderr


@pytest.mark.parity("squashfs files, bcast:")
def test_image_of_an_importer_counts_by_its_path(lab: Lab) -> None:
    """The importer itself verifies signatures. A rule may reject the requested name, or the path from the importer."""
    lab.run(
        "mkdir -p imported; cat > importer; chmod +x importer",
        input="#!/bin/sh\n[ $1 = release ] || echo $HOME/x.sqsh\n",
    )
    write(lab, ACCEPT)
    lab.run(["penroot", "import", "-o", "x.sqsh", f"docker://{MINIMAL}"])
    with plugin_argument(lab, "importer=/home/alice/importer"):
        write(lab, ACCEPT, docker={"registry:5000": [REJECT]})
        assert "is rejected by" in refused(lab, f"--container-image={MINIMAL}", "true")
        write(lab, REJECT, docker={"registry:5000": [WANTED]}, squashfs={"/home/alice": [ACCEPT]})
        assert srun(lab, f"--container-image={MINIMAL}", "echo", "ran") == "ran\n"
        write(lab, ACCEPT, squashfs={"/home/alice": [REJECT]})
        assert "is rejected by" in refused(lab, f"--container-image={MINIMAL}", "true")
    lab.run(["rm", "-rf", "importer", "imported", "x.sqsh"])
