"""Check the source of the plugin runtime/penroot for Slurm 26.11.

The test cannot compile the plugin, because no package has the headers of this Slurm.
"""

from __future__ import annotations

import pathlib
import re

from tests.unit.test_imports import ROOT

PLUGIN = (ROOT / "c_shims/runtime/penroot.c").read_text()
SUBMIT_FUNCTIONS = {
    "spank_option_register",
    "spank_job_control_setenv",
}  # functions that are called only in srun and sbatch


def linked_spank_files() -> list[pathlib.Path]:
    """Return the files of the SPANK plugin that the runtime plugin links."""
    makefile = (ROOT / "c_shims/runtime/Makefile").read_text()
    left_out = re.search(r"filter-out \$\(addprefix \$\(SPANK\)/,([^)]*)\)", makefile)
    assert left_out
    return [path for path in (ROOT / "c_shims/spank").glob("*.c") if path.name not in left_out[1].split()]


def test_runtime_plugin_has_exactly_the_spank_api_in_use() -> None:
    text = "".join(path.read_text() for path in linked_spank_files())
    items = set(re.findall(r"get_item\(step, (S_\w+)", text))
    functions = set(re.findall(r"\b(spank_\w+)\((?:step->spank|\))", text)) - SUBMIT_FUNCTIONS
    assert {"S_JOB_ENV", "S_TASK_ID"} <= items and {"spank_setenv", "spank_context"} <= functions
    assert items == set(re.findall(r"(?:case |ITEM\()(S_\w+)", PLUGIN))
    assert functions | {"spank_get_item"} == set(re.findall(r"^\w+ (spank_\w+)\(", PLUGIN, re.MULTILINE))
