"""EasyBuild checks and installs our easyconfig. The Spack recipe is checked without Spack."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages import place, recipes, vendored
from packages.description import MAIN
from tests.packages.conftest import PROJECT

EASYBUILD = "easybuild-framework==5.4.* easybuild-easyblocks==5.4.* pycodestyle".split()
LMOD = "/usr/share/lmod/lmod/libexec/lmod"
USER = 65534  # EasyBuild refuses to run as root


@pytest.fixture
def archive(packages: Path) -> Path:
    (path,) = packages.glob("penroot-*-x86_64.tar.xz")
    return path


@pytest.fixture
def site(archive: Path) -> Iterator[Path]:
    """Return a directory of USER with the archive and the release's easyconfig."""
    with tempfile.TemporaryDirectory(prefix="penroot-easybuild-", dir="/var/tmp") as top:
        shutil.copy(archive, top)
        easyconfig = Path(top, f"penroot-{place.version()}.eb")
        easyconfig.write_text(recipes.filled((PROJECT / "packages/easybuild/penroot.eb").read_text(), [archive]))
        os.mkdir(f"{top}/home")
        for path in (top, f"{top}/home"):
            os.chown(path, USER, USER)
        yield Path(top)


@pytest.fixture(scope="module")
def easybuild() -> Path:
    """Install EasyBuild from PyPI once, for a Python that all users can run."""
    top = place.CACHE / "easybuild-5.4"
    if not top.exists():
        new = top.with_name(f"{top.name}.{os.getpid()}")
        subprocess.run(["/usr/bin/python3", "-m", "venv", new], check=True)
        subprocess.run([new / "bin/python", "-m", "pip", "install", "--quiet", *EASYBUILD], check=True)
        new.rename(top)
    return top


def test_easybuild_checks_and_installs_penroot(easybuild: Path, site: Path) -> None:
    eb = ["eb", "--modules-tool=Lmod", f"--prefix={site}/home"]
    python = {"EB_PYTHON": f"{easybuild}/bin/python", "PATH": f"{easybuild}/bin:/usr/bin:/bin"}
    environ = {"HOME": f"{site}/home", "LMOD_CMD": LMOD, **python}

    def run(*arguments: str | Path) -> str:
        user = {"user": USER, "group": USER, "extra_groups": []}
        done = subprocess.run(arguments, capture_output=True, text=True, env=environ, cwd=f"{site}/home", **user)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    easyconfig = site / f"penroot-{place.version()}.eb"
    assert "All contribution checks PASSed!" in run(*eb, "--check-contrib", easyconfig)
    assert "1 out of 1" in run(*eb, f"--sourcepath={site}", easyconfig)
    environ["MODULEPATH"] = f"{site}/home/modules/all"
    script = f"eval $({LMOD} bash load penroot); command -v penroot; penroot --version; penroot doctor | grep -c ^ok"
    shown = run("bash", "-c", script).splitlines()
    assert shown[0] == f"{site}/home/software/penroot/{place.version()}/bin/penroot"
    assert shown[1].endswith(", tarball)")
    assert int(shown[2]) > 0


def test_the_recipe_of_spack_is_for_the_archive(archive: Path) -> None:
    """Neither pip nor apt has Spack; docs/howto/install.md names the version that was tested by hand."""
    text = (PROJECT / "packages/spack/packages/penroot/package.py").read_text()
    tree = ast.parse(recipes.filled(text, [archive]))
    (recipe,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert (recipe.name, [ast.unparse(base) for base in recipe.bases]) == ("Penroot", ["Package"])
    lines = [node for part in recipe.body for node in (part.body if isinstance(part, ast.If) else [part])]
    calls = [node.value for node in lines if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    said = {ast.unparse(call.func): call for call in calls}
    assert ast.unparse(said["version"]) == f"version('{place.version()}', sha256=CHECKSUMS[ARCHIVE])"
    assert f"'{archive.name}': '{vendored.sha256(archive)}'" in ast.unparse(tree)
    asked = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "depends_on"}
    recommended = MAIN.deb["Recommends"].split(", ")
    assert asked <= {name.removesuffix("-tools") for name in recommended}
