"""RPMs on Debian: its dnf(8) installs, upgrades and removes them, triggers fire, and a job runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from packages import place, rpm
from tests.packages.conftest import NEEDS, PROJECT, USED, Machine, bring_lab, demo, machine

DNF = "apt-get -qq update; apt-get -qq install --yes --no-install-recommends dnf python3 rpm"
# Provides of a stand-in for Debian's packages, which penroot requires.
SYSTEM = ("/bin/sh", "python(abi) = 3.11", "libc.so.6(GLIBC_2.34)(64bit)")
PYTHON = '#!/bin/sh\nexec /usr/bin/python3.11 "$@"\n'
# Files of rpm and dnf.
KEPT = ("/var/lib/rpm", "/var/lib/dnf")


def stand_in(
    debian: Machine, name: str, version: str, *provides: str, file: str = "", text: str = "#!/bin/sh\n"
) -> str:
    """Build a stand-in for a distribution's rpm, with one program or none. Return its path on the machine."""
    top = debian.path / "srv" / f"{name}-{version}"
    top.mkdir(parents=True)
    fields = {"Name": name, "Version": version, "Release": "1", "Summary": name, "License": "none"}
    lines = [f"{field}: {value}" for field, value in fields.items()]
    lines += ["BuildArch: noarch", *(f"Provides: {each}" for each in provides), "%description", name]
    if file:
        (top / "program").write_text(text)
        lines += ["%install", f"install -D -m 755 {top}/program %{{buildroot}}{file}"]
    spec = top / "spec"
    spec.write_text("\n".join([*lines, "%files", file, ""]))
    define = ("--define", f"_topdir {top}", "--define", "__os_install_post %{nil}")
    subprocess.run(["rpmbuild", "-bb", "--quiet", *define, spec], check=True)
    return f"/srv/{top.name}/RPMS/noarch/{top.name}-1.noarch.rpm"


def newer(packages: Path, work: Path, to: Path) -> None:
    """Rebuild the packages with the version 9.9 and another commit, in their modules and plugins too."""
    root = work / "root"
    root.mkdir()
    for path in packages.glob("*.rpm"):
        subprocess.run(f"rpm2archive - < '{path}' | tar -xz", shell=True, cwd=root, check=True)
    spec = rpm.written(root, work / "rpm")
    spec.write_text(spec.read_text().replace(place.packaged_version(), "9.9"))
    library = spec.parent / "files/usr/lib/penroot-package"
    code = library / "enroot_py/__init__.py"
    code.write_text(code.read_text().replace(f'__version__ = "{place.version()}"', '__version__ = "9.9"'))
    for told in (library / "enroot_py/BUILD", library / "PLUGINS"):
        told.write_text("012345678901 2030-01-01 rpm\n")
    rpm.pack(spec, to)


def dnf(debian: Machine, words: str, *, check: bool = True) -> str:
    return debian.run(f"cd /srv; dnf --assumeyes {words} 2>&1", check=check).stdout


def left(debian: Machine, before: dict[str, str]) -> set[str]:
    return {path for path in debian.files().keys() - before.keys() if not path.startswith(KEPT)}


@pytest.mark.parity("rpm: installed")
def test_dnf_installs_a_job_runs_and_dnf_removes(packages: Path) -> None:
    with machine("bookworm", "rpm", slurm=True) as debian:
        environ = bring_lab(debian)
        debian.run(f"{DNF} {NEEDS}; rpm --initdb")
        for path in packages.glob("*.rpm"):
            debian.put(path)
        install = "install ./penroot-1*.rpm ./penroot-slurm-plugin-*.rpm"  # as in docs/howto/install.md
        assert "nothing provides libc.so.6(GLIBC_2.34)(64bit)" in dnf(debian, install, check=False)
        dnf(debian, f"install {stand_in(debian, 'system', '1', *SYSTEM)}")
        before = debian.files()
        assert "[INFO] selected the plugin for Slurm 22.05\n" in dnf(debian, install)
        dnf(debian, "install ./penroot-enroot-names-*.rpm")
        assert debian.run("enroot version; penroot --version").stdout.endswith(", rpm)\n")
        assert debian.run("rpm --verify penroot penroot-slurm-plugin penroot-enroot-names").stdout == ""
        debian.run("pyxis-py install")
        demo(debian, environ)
        dnf(debian, "remove penroot")  # also removes packages that require it
        assert "penroot" not in debian.run("rpm --query --all").stdout
        assert left(debian, before) == set()


@pytest.mark.parity("deb, rpm: the plugin for the machine's Slurm", "deb, rpm: another Python", "rpm: installed")
def test_later_slurm_and_upgrade_during_use(packages: Path, tmp_path: Path) -> None:
    with machine("bookworm", "rpm-upgrade", slurm=False) as debian:
        debian.run(f"{DNF}; rpm --initdb")
        for path in packages.glob("*.rpm"):
            debian.put(path)
        newer(packages, tmp_path, debian.path / "srv")
        python = stand_in(debian, "python3", "3.11", file="/usr/bin/python3", text=PYTHON)
        dnf(debian, f"install {stand_in(debian, 'system', '1', *SYSTEM)} {python}")
        before = debian.files()
        said = dnf(debian, "install ./penroot-1*.rpm ./penroot-slurm-plugin-1*.rpm")
        assert "[INFO] Slurm is not installed on this machine; installing Slurm selects the plugin\n" in said
        (version,) = (debian.path / "usr/lib/penroot-versions").iterdir()  # one version, although a trigger ran too
        # Install Slurm, upgrade it, reinstall Python, install AppArmor.
        for slurm in ("24.11", "25.05"):
            program = f"#!/bin/sh\necho slurm {slurm}.1\n"
            said = dnf(debian, f"install {stand_in(debian, 'slurm', slurm, file='/usr/sbin/slurmd', text=program)}")
            assert f"[INFO] selected the plugin for Slurm {slurm}\n" in said
        (compiled,) = version.glob("modules.cpython*")
        compiled.unlink()
        dnf(debian, f"reinstall {python}")
        assert list(debian.path.glob("usr/lib/penroot/modules.cpython*"))
        dnf(debian, f"install {stand_in(debian, 'apparmor', '4', file='/etc/apparmor.d/abi/4.0')}")
        assert "profile penroot /usr/bin/penroot " in (debian.path / "etc/apparmor.d/penroot").read_text()

        old = debian.run("penroot version").stdout
        script = f"""
            cd /srv; ({USED}) > said 2>&1 & used=$!
            dnf --assumeyes upgrade ./penroot-9.9-*.rpm ./penroot-slurm-plugin-9.9-*.rpm > dnf
            penroot version
            dnf --assumeyes downgrade ./penroot-1*.rpm ./penroot-slurm-plugin-1*.rpm > dnf
            penroot version
            touch stop; wait $used
        """
        assert debian.run(script).stdout == f"9.9\n{old}"
        assert set((debian.path / "srv/said").read_text().splitlines()) == {"9.9", old.strip()}
        dnf(debian, "remove penroot")
        dnf(debian, "remove slurm apparmor")
        assert left(debian, before) <= {"/etc/apparmor.d", "/etc/apparmor.d/abi"}  # of the stand-in


@pytest.mark.parity("rpm: installed")
def test_requirements_and_triggers(packages: Path) -> None:
    def asked(name: str, what: str) -> str:
        (path,) = packages.glob(f"{name}-1*.rpm")
        return subprocess.run(["rpm", "-qp", what, path], capture_output=True, text=True, check=True).stdout

    assert "(python(abi) = 3.10 or python(abi) = 3.11 or" in asked("penroot", "--requires")
    for name, directories in {
        "penroot": "/etc/apparmor.d/abi, /usr/bin",
        "penroot-slurm-plugin": "/usr/bin, /usr/sbin",
    }.items():
        assert f"transfiletriggerin scriptlet (using /bin/sh) -- {directories}\n" in asked(name, "--filetriggers")
    assert "enroot\n" in asked("penroot-enroot-names", "--conflicts")


def test_rpmlint_has_nothing_to_say(packages: Path) -> None:
    rpms = sorted(packages.glob("*.rpm"))
    assert len(rpms) == 5
    command = ["rpmlint", "--config", PROJECT / "packages/files/rpmlint.toml", *rpms]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "0 errors, 0 warnings" in done.stdout, done.stdout
