"""Check the files of `make install`. Run `make enroot-names` and `make uninstall` on a copy of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from enroot_py import __version__
from tests.installation import IS_INSTALLED, ROOT
from tests.kernel.conftest import PREFIX, require

# The pack is a file with the compiled modules of a start. Python imports the modules of ENTRANCE before it loads the
# pack. EXTRAS are libraries of optional features, which are installed only on request.
ENTRANCE = {"enroot_py.base", "enroot_py.base.pack"}
EXTRAS = ("asyncssh", "cryptography", "typing_extensions")
MAX_FILES, MAX_BYTES = 300, 20 << 20


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    require(IS_INSTALLED, "the test needs an installation: set PENROOT_PREFIX")
    copy = Path(shutil.copytree(PREFIX, tmp_path / "prefix", symlinks=True))
    (copy / "share/bash-completion/completions/enroot").unlink(missing_ok=True)  # part of enroot-names
    return copy


def make(target: str, prefix: Path) -> None:
    command = ["make", "--no-print-directory", target, f"PREFIX={prefix}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_uninstall_removes_everything(prefix: Path) -> None:
    make("enroot-names", prefix)
    completion = prefix / "share/bash-completion/completions/enroot"
    assert "complete -o nosort -F _enroot_completion enroot" in completion.read_text()
    assert (prefix / "share/man/man1/enroot.1").resolve().name == "penroot.1"
    assert list(prefix.rglob("*.so"))
    make("uninstall", prefix)
    assert not prefix.exists()


def test_uninstall_keeps_files_of_others(prefix: Path) -> None:
    for name in ("enroot", "other"):
        (prefix / "bin" / name).unlink(missing_ok=True)
        (prefix / "bin" / name).write_text("")
    make("uninstall", prefix)
    assert sorted(path.name for path in prefix.rglob("*") if not path.is_dir()) == ["enroot", "other"]


def imported(prefix: Path, *modules: str) -> dict[str, str]:
    """Import modules of an installation. Return name -> loader of all modules of penroot that are then loaded."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"import {', '.join(modules)}\n"
        "for name, module in sys.modules.items():\n"
        "    if name.startswith(('enroot_py.', 'pyxis_py.')) and not name.startswith('enroot_py.base._linux'):\n"
        "        print(name, type(module.__loader__).__name__)\n"
    )
    command = ["/usr/bin/python3", "-IS", "-c", code, str(prefix / "lib/penroot")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: loader for name, loader in map(str.split, done.stdout.splitlines()) if name not in ENTRANCE}


def test_a_start_and_a_step_find_their_modules_in_one_file(prefix: Path) -> None:
    loaders = imported(prefix, "enroot_py.cli.start", "pyxis_py.helper", "pyxis_py.node.step")
    assert {"enroot_py.runtime.enter", "pyxis_py.node.step"} < set(loaders)
    assert set(loaders.values()) == {"Pack"}


def modules(prefix: Path, before: str) -> str:
    """Run the code ``before``, import the modules of a start, and return the attributes of each module."""
    code = f"""
import sys; sys.path.insert(0, sys.argv[1])
import enroot_py; {before}
import enroot_py.main, enroot_py.cli.start
for name, module in sorted(sys.modules.items()):
    if name.startswith("enroot_py.") and not name.startswith(("enroot_py.base._linux", "enroot_py.base.pack")):
        above, _, last = name.rpartition(".")
        assert getattr(sys.modules[above], last) is module
        if name == "enroot_py.base":
            continue
        print(name, module.__file__, module.__package__, getattr(module, "__path__", None), module.__loader__)
        print(*(str(getattr(module.__spec__, word)) for word in ("name", "origin", "submodule_search_locations")))
"""
    command = ["/usr/bin/python3", "-IS", "-c", code, str(prefix / "lib/penroot")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.sub(r" object at \w+", "", done.stdout)


def test_start_loads_its_modules_from_the_pack(prefix: Path) -> None:
    """pack.load() loads all modules of a start without a search on the module path. They are as after an import."""
    one_by_one = modules(prefix, "pass")
    in_c = "import enroot_py.main, _cffi_backend, enroot_py.base._linux"
    load = "from enroot_py.base import pack; pack.load(pack.START)"
    assert modules(prefix, f"{in_c}; {load}; sys.meta_path.clear()") == one_by_one
    (prefix / "lib/penroot/modules.zip").touch()
    done = modules(prefix, f"{load}; assert 'enroot_py.runtime' not in sys.modules")
    assert "zipimporter" in done and "Pack" not in done


def test_step_loads_its_modules_from_the_pack(prefix: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pyxis_py, _cffi_backend, enroot_py.base._linux\n"
        "from enroot_py.base import pack; pack.load(pack.STEP); sys.meta_path.clear()\n"
        "import pyxis_py.helper\n"
        "from pyxis_py.node import container, held, step"
    )
    command = ["/usr/bin/python3", "-IS", "-c", code, str(prefix / "lib/penroot")]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("columns", ["", "0", "x", "60", "79", "80", "200"])
def test_installed_help_is_the_help_of_click(prefix: Path, columns: str) -> None:
    """The stored help text is the text that click prints. If the archive has changed, click is imported to print it."""
    results = []
    for _ in range(2):
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'penroot'\n"
        code += "from enroot_py.main import main\ntry: main()\nfinally: print('click' in sys.modules)"
        command = ["/usr/bin/python3", "-IS", "-c", code, str(prefix / "lib/penroot"), "--help"]
        environ = {**os.environ, "COLUMNS": columns}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        results.append(done.stdout.rpartition("\n")[0].rpartition("\n"))
        (prefix / "lib/penroot/modules.zip").touch()
    assert results[0][0] == results[1][0]
    assert (results[0][2], results[1][2]) == (str(columns in ("60", "79")), "True")


def test_changed_hook_is_compiled_from_its_file(prefix: Path) -> None:
    library = prefix / "lib/penroot"
    (library / "enroot_py/standard_hooks/10-home.py").touch()
    code = "import sys; sys.path.insert(0, sys.argv[1]); from enroot_py.base import pack; print(*pack.hooks())"
    command = ["/usr/bin/python3", "-IS", "-c", code, library]
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert f"{library}/enroot_py/standard_hooks/10-shadow.py" in paths
    assert f"{library}/enroot_py/standard_hooks/10-home.py" not in paths


def test_version_is_small(prefix: Path) -> None:
    library = (prefix / "lib/penroot").resolve()
    files = [path for path in library.rglob("*") if path.is_file() and not path.is_symlink()]
    files = [path for path in files if not str(path.relative_to(library)).startswith((*EXTRAS, "__pycache__"))]
    assert len(files) <= MAX_FILES
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_a_module_in_c_that_is_newer_is_imported(prefix: Path) -> None:
    """Even if a module in C is newer than the pack, the Python modules come from the pack."""
    for module in (*prefix.glob("lib/penroot/_cffi_backend.*"), prefix / "lib/penroot/enroot_py/base/_linux.abi3.so"):
        shutil.copy(module, module.with_name("new"))  # another inode with another time
        module.with_name("new").rename(module)
    assert imported(prefix, "enroot_py.cli.start")["enroot_py.base.linux"] == "Pack"


def test_start_from_the_archive_alone(prefix: Path) -> None:
    """Without the pack, all modules come from modules.zip."""
    (pack,) = prefix.glob("lib/penroot/modules.cpython*")
    pack.unlink()
    loaders = imported(prefix, "enroot_py.cli.start", "pyxis_py.node.step", "enroot_py.cli.verbs")
    assert set(loaders.values()) == {"zipimporter"}


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_start_works_without_the_pack(prefix: Path, damage: str) -> None:
    (pack,) = prefix.glob("lib/penroot/modules.cpython*")
    if damage == "missing":
        pack.unlink()
    else:
        os.truncate(pack, 20_000 if damage == "cut" else 0)
    assert "enroot_py.runtime.enter" in imported(prefix, "enroot_py.cli.start")
    done = subprocess.run([prefix / "bin/penroot", "version"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{__version__}\n", "")
