"""Environment files are expanded as bash expands text in double quotes. Sarus Suite runs bash for this."""

from __future__ import annotations

import subprocess

import pytest

from enroot_py.features.environments import expansion

VALUES = {"A": "alpha.tar.gz", "B": "beta", "E": "", "N": "2", "P": "/a/b:/c d/e:/f", "S": "a*b?c[d]", "L": "x\ny"}
SAME_AS_BASH = r"""
${A} ${B:-x} ${E:-x} ${E-x} ${U:-x} ${U-x} ${U:-} ${A:+x} ${E:+x} ${E+x} ${U+x} ${U:=x} ${A:?x}
${#A} ${#E} ${A:1} ${A:1:3} ${A: -2} ${A: -4:2} ${A:1:-3} ${A:99} ${A:$N} ${A:${N}:1} ${B:0:0}
${A#*.} ${A##*.} ${A%.*} ${A%%.*} ${A#x} ${A#alpha} ${A%gz} ${P##*/} ${P%/*} ${P%%:*} ${A#?} ${A#[a-c]} ${A%[!x]}
${A/a/x} ${A//a/x} ${A/#a/x} ${A/%z/x} ${A//./} ${A/./} ${P//:/ } ${P//\//_} ${A/l*r/-} ${A//[aeiou]/.} ${A/nope/x}
${A//$B/x} ${S//\*/x} ${S#a\*} ${S/$S/all} ${L#*y} ${L%x*} ${L/?y/z} ${A//a/$B} ${E/x/y} ${P/%f/\/g}
${A^} ${A^^} ${A,} ${A^^}x ${B^}${B,,}
${U:-${B}} ${U:-${U:-${A%%.*}}} ${U:-$B} ${U:-a:b/c} ${U:-{x\}} ${U:-a\}b} ${B:+${A}-${N}} ${U:-$B/$N}
""".split()


@pytest.mark.parity("bash's forms of ${NAME}")
@pytest.mark.parametrize(
    "text", [*SAME_AS_BASH, "${A: -2}", "${P//:/ }", "${U:-a b}", "pre${A%.*}post", "${A: 1 }", "${U:- x }"]
)
def test_expression_is_expanded_as_by_bash(text: str) -> None:
    done = subprocess.run(
        ["bash", "-r", "-c", f'set -u; printf %s "{text}"'], env=VALUES, capture_output=True, text=True, check=False
    )
    try:
        ours = expansion.expand(text, VALUES.get)
    except ValueError:
        ours = "refused"
    assert ours == (done.stdout if not done.returncode else "refused"), done.stderr


@pytest.mark.parity("bash's forms of ${NAME}")
@pytest.mark.parametrize(
    "text",
    ["${!A}", "${A@P}", "${A[0]}", "${}", "${A", "${1}", "${A:x}", "${A:1:-30}", "${A^^a}", "${U}", "${U:?}", "${U%x}"]
    + ["${A:" + "${U:-" * 12 + "1" + "}" * 13, "${A#[z-a]}", "${A:$B}"],
)
def test_unsupported_expression_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        expansion.expand(text, VALUES.get)
    assert len(caught.value.args) == 2 and all(caught.value.args)


def test_no_command_is_ever_run() -> None:
    values = {"X": "$(touch /tmp/x)`id`", "Y": "a[$(id)]"}
    assert expansion.expand("${X}$(id)`id`", values.get) == "$(touch /tmp/x)`id`$(id)`id`"
    assert expansion.expand("${U:-$(id)}", values.get) == "$(id)"
    with pytest.raises(ValueError, match="not numbers"):
        expansion.expand("${X:${Y}}", values.get)


def test_names_are_those_within_expressions_too() -> None:
    assert expansion.names("${A:-${B#$C}}$D$${E}${#F}${G/${H}/$I}") == ["A", "B", "C", "F", "G", "H", "I"]
