"""runtime/penroot of Slurm 26.11, read as text: no package has the headers to compile it."""

from __future__ import annotations

import pathlib
import re

from tests.unit.test_imports import ROOT

PLUGIN = (ROOT / "c_shims/runtime/penroot.c").read_text()
OF_SUBMIT = {"spank_option_register", "spank_job_control_setenv"}  # called in srun and sbatch


def linked() -> list[pathlib.Path]:
    """Return the files of the SPANK plugin that the runtime plugin links."""
    makefile = (ROOT / "c_shims/runtime/Makefile").read_text()
    left_out = re.search(r"filter-out \$\(addprefix \$\(SPANK\)/,([^)]*)\)", makefile)
    assert left_out
    return [path for path in (ROOT / "c_shims/spank").glob("*.c") if path.name not in left_out[1].split()]


def test_plugin_has_all_items_and_functions_that_spank_uses() -> None:
    text = "".join(path.read_text() for path in linked())
    items = set(re.findall(r"get_item\(step, (S_\w+)", text))
    functions = set(re.findall(r"\b(spank_\w+)\((?:step->spank|\))", text)) - OF_SUBMIT
    assert {"S_JOB_ENV", "S_TASK_ID"} <= items and {"spank_setenv", "spank_context"} <= functions
    assert items == set(re.findall(r"(?:case |ITEM\()(S_\w+)", PLUGIN))
    assert functions | {"spank_get_item"} == set(re.findall(r"^\w+ (spank_\w+)\(", PLUGIN, re.MULTILINE))
