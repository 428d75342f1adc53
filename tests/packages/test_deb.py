"""Debian packages: install with apt in fresh Debians without a compiler, use, and purge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.conftest import NEEDS, PLUGINS, USED, Machine, bring_lab, demo, machine


@pytest.fixture(params=PLUGINS)
def debian(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(request.param, f"deb-{request.param}", slurm=True) as made:
        yield made


def install(debian: Machine, packages: Path, *names: str) -> str:
    files = " ".join(debian.put(path) for name in names for path in packages.glob(f"{name}_*.deb"))
    done = debian.run(f"apt-get -qq install --yes --no-install-recommends {files} 2>&1")
    return done.stdout


@pytest.mark.parity("deb: apt install in a Debian without compiler and pip")
def test_two_commands_run_mpi_and_purge_leaves_nothing(debian: Machine, packages: Path) -> None:
    assert debian.run("command -v cc gcc pip pip3", check=False).stdout == ""
    environ = bring_lab(debian)
    debian.run(f"apt-get -qq install --yes --no-install-recommends python3 {NEEDS}")
    before = debian.files()
    said = install(debian, packages, "penroot", "penroot-slurm-plugin")
    assert f"[INFO] selected the plugin for Slurm {PLUGINS[debian.release]}\n" in said
    debian.run("pyxis-py install")
    demo(debian, environ)
    debian.run("apt-get -qq purge --yes penroot penroot-slurm-plugin")
    after = debian.files()
    assert {path: after[path] for path in after.keys() - before.keys()} == {}
    assert before.keys() - after.keys() == set()


@pytest.mark.parity("deb, rpm: the plugin for the machine's Slurm", "--version")
@pytest.mark.parametrize("debian", ["trixie"], indirect=True)
def test_slurm_that_comes_goes_or_is_another(debian: Machine, packages: Path) -> None:
    debian.run("apt-get -qq purge --yes slurmctld slurmd slurm-client")
    said = install(debian, packages, "penroot", "penroot-slurm-plugin", "penroot-enroot-names")
    assert said.count("[INFO] Slurm is not installed on this machine; installing Slurm selects the plugin\n") == 1
    assert debian.run("enroot version; penroot --version").stdout.splitlines()[1].endswith(", deb)")
    said = debian.run("apt-get -qq install --yes --no-install-recommends slurmd 2>&1").stdout
    assert "[INFO] selected the plugin for Slurm 24.11\n" in said
    fake = "printf '#!/bin/sh\\necho slurm 27.02.1\\n' > /usr/local/bin/slurmd; chmod 755 /usr/local/bin/slurmd"
    done = debian.run(f"{fake}; /usr/libexec/penroot/packaged plugin")
    assert done.stderr.splitlines() == [
        "[ERROR] Slurm 27.02.1 has no prebuilt plugin; there are plugins for "
        "22.05, 23.02, 23.11, 24.05, 24.11, 25.05, 25.11, 26.05",
        "[HINT] with gcc and slurm/spank.h: pyxis-py build --output /usr/lib/penroot/spank_pyxis.so",
    ]
    # Debian has no enroot; the package conflicts with NVIDIA's.
    shown = debian.run("dpkg-query --show --showformat='${Conflicts}' penroot-enroot-names").stdout
    assert shown == "enroot, enroot+caps, enroot-hardened"


@pytest.mark.parity("deb, rpm: another Python")
@pytest.mark.parametrize("debian", ["trixie"], indirect=True)
def test_apparmor_that_comes_and_a_package_that_goes(debian: Machine, packages: Path) -> None:
    install(debian, packages, "penroot")
    profile = debian.path / "etc/apparmor.d/penroot"
    assert not profile.exists()
    debian.run("apt-get -qq install --yes --no-install-recommends apparmor")
    assert "profile penroot /usr/bin/penroot flags=(unconfined) {" in profile.read_text()
    debian.run("apparmor_parser --skip-kernel-load --skip-cache /etc/apparmor.d/penroot")
    # A package replaces an unchanged profile, but keeps one that an admin has changed.
    again = "apt-get -qq install --yes --reinstall /srv/penroot_*.deb 2>&1"
    older = profile.read_text().replace("userns,", "userns, # older")
    for path in (profile, debian.path / "var/lib/penroot-package/apparmor-profile"):
        path.write_text(older)
    assert "keeping /etc/apparmor.d/penroot" not in debian.run(again).stdout
    assert "older" not in profile.read_text()
    profile.write_text(older)
    assert "[INFO] keeping /etc/apparmor.d/penroot, which an admin has changed;" in debian.run(again).stdout
    assert profile.read_text() == older
    debian.run("apt-get -qq remove --yes penroot")
    assert not profile.exists()
    assert not (debian.path / "var/lib/penroot-package").exists()


@pytest.mark.parity("deb, rpm: another Python")
@pytest.mark.parametrize("debian", ["trixie"], indirect=True)
def test_python_that_is_another_one(debian: Machine, packages: Path) -> None:
    """A trigger on python3 compiles the modules again. dpkg fires it whichever package replaces the file."""
    install(debian, packages, "penroot")
    pack = next((debian.path / "usr/lib/penroot").glob("modules.cpython*"))
    pack.unlink()
    debian.run("apt-get -qq install --yes --reinstall python3-minimal")
    assert pack.exists()


# Make the same packages with another version number, in their modules too.
OTHER = """
set -e
for package in penroot penroot-slurm-plugin; do
    dpkg-deb --raw-extract /srv/${package}_*1.0*_amd64.deb /srv/$package
    sed -i "s/^Version: .*/Version: 9.9/; s/penroot (= .*)/penroot (= 9.9)/" /srv/$package/DEBIAN/control
done
sed -i 's/^__version__ = .*/__version__ = "9.9"/' /srv/penroot/usr/lib/penroot-package/enroot_py/__init__.py
echo 012345678901 2030-01-01 deb | tee /srv/penroot/usr/lib/penroot-package/enroot_py/BUILD \\
    > /srv/penroot-slurm-plugin/usr/lib/penroot-package/PLUGINS
for package in penroot penroot-slurm-plugin; do dpkg-deb -Znone --build /srv/$package /srv/${package}_9.9.deb; done
"""
# Remove an unused version at once instead of after a minute.
AT_ONCE = r"""
import os, re, sys, zipfile
for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".new", "w") as new:
        for name in old.namelist():
            new.writestr(name, re.sub(rb"^_START_S = .*", b"_START_S = 0", old.read(name), flags=re.M))
    os.rename(path + ".new", path)
"""
HELD = """
import sys; sys.path.insert(0, __import__("os").path.realpath("/usr/lib/penroot"))
from enroot_py.base import linux
print(flush=True); input()
from enroot_py.store import tar; import urllib3
print(linux.__file__)
"""


@pytest.mark.parametrize("debian", ["trixie"], indirect=True)
def test_upgrade_and_downgrade_during_use(debian: Machine, packages: Path) -> None:
    install(debian, packages, "penroot", "penroot-slurm-plugin")
    old = debian.run("penroot version").stdout
    debian.run(OTHER)
    (debian.path / "srv/held").write_text(HELD)
    (debian.path / "srv/at-once").write_text(AT_ONCE)
    new_debs, old_debs = "/srv/penroot*_9.9.deb", "/srv/penroot*_1.0*_amd64.deb"
    script = f"""
        mkfifo /srv/go; (python3 -IS /srv/held < /srv/go > /srv/was) & exec 3> /srv/go
        (sleep 1; {USED}) > /srv/said 2>&1 & used=$!
        sleep 2
        dpkg -i {new_debs} > /srv/dpkg
        penroot version
        python3 /srv/at-once /usr/lib/penroot/modules.zip /usr/lib/penroot-package/modules.zip
        dpkg -i {old_debs} > /srv/dpkg 2>&1
        penroot version
        for delay in 0.5 1 2 3; do
            timeout --signal=KILL $delay dpkg -i {new_debs} > /srv/dpkg 2>&1 || true
            penroot version > /srv/version
        done
        dpkg --configure --pending > /srv/dpkg 2>&1 || true
        dpkg -i {new_debs} >> /srv/dpkg 2>&1
        penroot version
        ls /usr/lib/penroot-versions > /srv/versions
        echo >&3; touch /srv/stop; wait $used; sleep 1
        cat /srv/was
    """
    done = debian.run(script)
    first, second, third, *was = done.stdout.splitlines()
    assert [f"{first}\n", f"{second}\n", f"{third}\n"] == ["9.9\n", old, "9.9\n"]
    said = (debian.path / "srv/said").read_text().splitlines()
    assert set(said) == {old.strip(), "9.9"}
    held = Path(was[-1]).parts[4]
    assert held in (debian.path / "srv/versions").read_text().split()
    debian.run("apt-get -qq purge --yes penroot penroot-slurm-plugin")
    assert not list((debian.path / "usr/lib").glob("penroot*"))


def test_lintian_has_nothing_to_say(packages: Path) -> None:
    import subprocess

    debs = sorted(packages.glob("*.deb"))
    assert len(debs) == 5
    command = ["lintian", "--allow-root", "--tag-display-limit", "0", "--fail-on", "warning,error", *debs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
