"""rpms, as far as a Debian can tell: rpm(8) installs them there, their scripts run, a job does, and they go again."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.packages.conftest import NEEDS, PROJECT, bring_lab, demo, machine


def test_an_rpm_installs_runs_a_job_and_goes(packages: Path) -> None:
    with machine("bookworm", "rpm", slurm=True) as debian:
        environ = bring_lab(debian)
        debian.run(f"apt-get -qq install --yes --no-install-recommends rpm python3 {NEEDS}; rpm --initdb")
        files = " ".join(debian.put(packages / path.name) for path in packages.glob("*.rpm"))
        before = debian.files()
        # No package of this machine's is known to rpm, so that nothing can be required.
        said = debian.run(f"rpm --install --nodeps {files} 2>&1").stdout
        assert "[INFO] the plugin is that for Slurm 22.05\n" in said
        assert debian.run("penroot --version").stdout.endswith(", rpm)\n")
        assert debian.run("rpm --verify penroot penroot-slurm-plugin --nodeps").stdout == ""
        debian.run("pyxis-py install")
        demo(debian, environ)
        debian.run("rpm --erase --nodeps penroot-enroot-names penroot-slurm-plugin penroot")
        after = debian.files()
        assert {path for path in after.keys() - before.keys() if not path.startswith("/var/lib/rpm")} == set()


def test_what_is_required_and_watched(packages: Path) -> None:
    def asked(name: str, what: str) -> str:
        (path,) = packages.glob(f"{name}-1*.rpm")
        return subprocess.run(["rpm", "-qp", what, path], capture_output=True, text=True, check=True).stdout

    assert "(python(abi) = 3.10 or python(abi) = 3.11 or" in asked("penroot", "--requires")
    assert "transfiletriggerin scriptlet (using /bin/sh) -- /etc/apparmor.d/abi/4.0, /usr/bin/python3\n" in asked(
        "penroot", "--filetriggers"
    )
    assert "-- /usr/bin/srun, /usr/sbin/slurmd, " in asked("penroot-slurm-plugin", "--filetriggers")
    assert "enroot\n" in asked("penroot-enroot-names", "--conflicts")


def test_rpmlint_has_nothing_to_say(packages: Path) -> None:
    rpms = sorted(packages.glob("*.rpm"))
    assert len(rpms) == 3
    command = ["rpmlint", "--config", PROJECT / "packages/files/rpmlint.toml", *rpms]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "0 errors, 0 warnings" in done.stdout, done.stdout
