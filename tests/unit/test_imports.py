"""The house's rules about imports: one direction, and a start path that imports next to nothing."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

# Lower layers never import higher ones; a module may import its own layer.
LAYERS = (
    {"enroot_py", "errors", "log"},
    {"linux", "run", "settings", "reference", "imagefiles", "rc", "tar", "workers", "filesystems",
     "progress", "ldcache", "memory", "yamlcache", "yamlconf", "configs", "trees", "trusted"},
    {"paths", "mounts", "namespaces", "environ", "hooks", "originals", "addresses", "connections", "credentials",
     "registry", "squashfs", "layers",
     "store", "manifests", "registries", "rootfs", "scripts", "private", "processes", "devices", "ldcache", "cdi",
     "making", "claims", "fuseoverlay", "login", "squashfuse", "pmix", "ranks", "masks"},
    {"devices", "cdi", "nvidia", "nvml"},
    {"tags", "merge", "forms", "images", "containers", "start", "bundle", "sources", "blobs", "cache", "listing",
     "manual", "doctor"},
    {"cli"},
    {"main"},
)  # fmt: skip

# Each costs more than a whole start may.
HEAVY = set(
    "re typing enum dataclasses json subprocess pathlib logging click urllib3 socket ctypes yaml shutil tempfile "
    "collections functools contextlib signal inspect".split()
)


def imports(path: pathlib.Path) -> set[str]:
    """Modules of ours that a file imports anywhere, for types excepted."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in ("enroot_py", "pyxis_py"):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.startswith(("enroot_py", "pyxis_py"))}


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in (ROOT / "enroot_py").glob("*.py")} - {"__init__"}
    assert modules <= set().union(*LAYERS)


def test_imports_go_one_way() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    for path in (ROOT / "enroot_py").glob("*.py"):
        for name in imports(path):
            package, _, module = name.partition(".")
            assert package == "enroot_py", f"{path.name} imports {name}"
            target = level.get(module, 0)
            assert target <= level.get(path.stem, 0), f"{path.name} imports {module}, which is above it"


def test_pyxis_reaches_enroot_where_it_enters_containers() -> None:
    shared = {"enroot_py.errors", "enroot_py.log", "enroot_py.__version__", "enroot_py.run", "enroot_py.doctor"}
    for path in (ROOT / "pyxis_py").glob("*.py"):
        beyond = {name for name in imports(path) if name.startswith("enroot_py.")} - shared
        may = ("step", "entrypoint", "attached", "submit", "check", "manual")
        assert not beyond or path.stem in may, f"{path.name} imports {beyond}"


@pytest.mark.parametrize("module", ["enroot_py.start", "pyxis_py.helper", "pyxis_py.step", "pyxis_py.submit"])
def test_start_path_imports_nothing_heavy(module: str) -> None:
    code = (
        "import sys; before = set(sys.modules); sys.path[:0] = sys.argv[1].split(':'); "
        f"import {module}; print(*(set(sys.modules) - before))"
    )
    site = next(p for p in sys.path if p.endswith("site-packages"))
    command = [sys.executable, "-IS", "-c", code, f"{ROOT}:{site}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_version_imports_neither_click_nor_cffi() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'penroot'\n"
        "from enroot_py.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-IS", "-c", code, str(ROOT), "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"click", "cffi", "_cffi_backend"} & set(done.stdout.split())
