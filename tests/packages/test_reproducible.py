"""Two builds of a commit are identical, and one set of headers is enough for the plugins of all Slurm releases."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from packages import place, tree
from tests.packages.conftest import PROJECT, machine, make_packages


def sums(place: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.iterdir()}


@pytest.mark.parity("make packages")
def test_two_builds_are_equal_bytes(packages: Path, tmp_path: Path) -> None:
    """The second build runs later, and in another directory."""
    cache = tmp_path / "elsewhere"
    cache.mkdir()
    for kept in (place.CACHE / "wheels", tree.builder().parents[1]):
        (cache / kept.name).symlink_to(kept)
    make_packages(tmp_path / "made", PENROOT_PACKAGES=str(cache))
    once, again = sums(packages), sums(tmp_path / "made")
    assert len(again) == 13
    if "PENROOT_PACKAGES_MADE" in os.environ:  # `make packages` builds fewer files
        del once["SHA256SUMS"]
        again = {name: again[name] for name in once}
    assert again == once


def interface(include: Path, work: Path) -> str:
    """Return the numbers that the plugin is compiled with: Slurm's constants, and the layout of its struct."""
    text = "".join(path.read_text() for path in sorted((PROJECT / "c_shims/spank").glob("*.[ch]")))
    words = sorted(set(re.findall(r"\b(?:S_(?:CTX|JOB|SLURM|STEP|TASK)|ESPANK)_[A-Z_]+\b", text)))
    assert {"S_JOB_UID", "S_CTX_REMOTE", "ESPANK_SUCCESS"} <= set(words)
    lines = [f'printf("{word} %ld\\n", (long){word});' for word in words]
    fields = ("name", "arginfo", "usage", "has_arg", "val", "cb")
    lines += [f'printf("{name} %zu\\n", offsetof(struct spank_option, {name}));' for name in fields]
    body = "\n".join([*lines, 'printf("%zu\\n", sizeof(struct spank_option));'])
    heads = "".join(f"#include <{name}>\n" for name in ("stddef.h", "stdio.h", "slurm/slurm.h", "slurm/spank.h"))
    (work / "words.c").write_text(f"{heads}\nint main(void) {{\n{body}\n}}\n")
    subprocess.run(["gcc", "-isystem", include, "-o", work / "words", work / "words.c"], check=True)
    return subprocess.run([work / "words"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("release", ["trixie", "forky"])
def test_headers_of_other_slurms_have_the_same_numbers(release: str, tmp_path: Path) -> None:
    """The plugin depends on no other numbers of the headers, so each set of headers makes the same plugin."""
    ours = interface(Path("/usr/include"), tmp_path)
    with machine(release, f"headers-{release}", slurm=False) as debian:
        script = "apt-get -qq update; cd /srv; apt-get -qq download libslurm-dev; dpkg-deb -x libslurm-dev_*.deb ."
        debian.run(script)
        assert interface(debian.path / "srv/usr/include", tmp_path) == ours
