"""options.h of the SPANK plugin, made of the tables of options and arguments when the plugin is built."""

from __future__ import annotations

from pyxis_py.job import PROTOCOL
from pyxis_py.options import all_options
from pyxis_py.settings import SETTINGS


def c_header() -> str:
    """The header: a row of the table as Slurm wants it, ``val`` being its index."""
    options = all_options()
    names = [option.name for option in options]
    rows = ""
    for i, o in enumerate(options):
        texts = ", ".join(map(_c_string, (o.name, o.arginfo, f"[pyxis] {o.usage}")))
        rows += f"\t{{{texts}, {int(o.parse is not None)}, {i}, option_given}},\n"
    variables = "".join(f"\t{_c_string(o.variable)},\n" for o in options)
    selects = ", ".join(str(int(o.selects)) for o in options)
    return f"""\
/* Generated from the tables of options when the plugin is built: do not edit, do not commit. */
#ifndef PENROOT_OPTIONS_H
#define PENROOT_OPTIONS_H

#define PROTOCOL {PROTOCOL}
#define OPTION_COUNT {len(options)}
#define ENVIRONMENT_OPTION {next((i for i, o in enumerate(options) if o.describes), -1)}
#define IMAGE_OPTION {names.index("container-image")}
#define NAME_OPTION {names.index("container-name")}
#define ENVIRONMENT_VARIABLE {_c_string(next((o.variable for o in options if o.describes), "PYXIS_ENVIRONMENT"))}
#define DEFAULT_RUNTIME_PATH {_c_string(SETTINGS["runtime_path"].default)}

static int option_given(int val, const char *optarg, int remote);

static struct spank_option option_table[] = {{
{rows}\tSPANK_OPTIONS_TABLE_END
}};

/* The variable that stands in for each option, or NULL. */
static const char *const option_variables[OPTION_COUNT] = {{
{variables}}};

/* Which options ask for a container at all. */
static const bool option_selects[OPTION_COUNT] = {{ {selects} }};

#endif
"""


def _c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if text else "NULL"
