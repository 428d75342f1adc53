"""The public names of enroot_py and their signatures do not change, because programs of users depend on them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import enroot_py
from tests.docs import api

STREAMS = "stdin: Stream = None, stdout: Stream = None, stderr: Stream = None"
PLACE = "cwd: Path | None = None, env: Mapping[str, str] | None = None"
RUN = f"{PLACE}, input: Any = None, {STREAMS}, capture_output: bool = False, text: bool | None = None"
KIND = "writable: bool = False, root: bool | None = None, net: str | None = None, publish: Sequence[str] = ()"
SIGNATURES = {
    "pull": "(reference: str, *, arch: str | None = None) -> Image",
    "run": "(image: Image | Path, argv: Sequence[str], *, mounts: Sequence[str] = (), "
    f"{PLACE}, {KIND}, input: Any = None, {STREAMS}, capture_output: bool = False, text: bool | None = None, "
    "timeout: float | None = None, check: bool = False) -> subprocess.CompletedProcess[Any]",
    "Container": "(image: Image | Path, *, mounts: Sequence[str] = (), env: Mapping[str, str] | None = None, "
    f"{KIND}) -> None",
    "Container.popen": f"(self, argv: Sequence[str], *, {PLACE}, {STREAMS}, text: bool | None = None, "
    "encoding: str | None = None, errors: str | None = None, bufsize: int = -1) -> Process",
    "Container.run": f"(self, argv: Sequence[str], *, {RUN}, timeout: float | None = None, "
    "check: bool = False) -> subprocess.CompletedProcess[Any]",
    "Container.run_async": f"(self, argv: Sequence[str], *, {RUN}, timeout: float | None = None, "
    "check: bool = False) -> subprocess.CompletedProcess[Any]",
    "Container.copy_to": "(self, source: Path, target: str) -> None",
    "Container.copy_from": "(self, source: str, target: Path) -> None",
    "Container.export": "(self, path: Path, *, overwrite: bool = False) -> None",
    "Container.close": "(self) -> None",
    "Image": "(reference: str, digest: str, config: Mapping[str, Any], layers: tuple[Mapping[str, Any], ...], "
    "size: int) -> None",
    "Process.kill_group": "(self) -> None",
    "Process.wait_async": "(self) -> int",
}
ERRORS = (
    "CommandError ConfigError ContainerError HookError ImageError ImageReferenceError MountError NamespaceError "
    "PenrootError PolicyError RegistryError UsageError"
).split()


def signature(name: str) -> str:
    thing: object = enroot_py
    for part in name.split("."):
        thing = getattr(thing, part)
    return str(inspect.signature(thing)).replace("'", "")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_stable(name: str) -> None:
    """To add an argument, make it keyword-only with a default, and append it to the row in SIGNATURES."""
    assert signature(name) == SIGNATURES[name]


def test_public_names_are_stable() -> None:
    assert sorted(enroot_py.__all__) == sorted(["Container", "Image", "Process", "pull", "run", *ERRORS])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        enroot_py.nothing  # noqa: B018


def test_import_loads_no_module_of_the_api() -> None:
    program = "import sys, enroot_py; print([name for name in sys.modules if name.startswith('enroot_py.api')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_reference_describes_every_argument() -> None:
    page = api.pages()["python.md"]
    for name in SIGNATURES:
        assert f"{name}\n" in page
    for name in ("mounts", "env", "writable", "root", "net", "cwd", "timeout", "check", "overwrite", "arch"):
        assert f"- `{name}`: " in page
