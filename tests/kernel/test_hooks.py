"""Hooks of a site beside penroot's hooks: which hooks run, in which order, and what a hook sees of earlier hooks."""

from __future__ import annotations

import os
import pathlib
from _blake2 import blake2b

import pytest

from enroot_py.runtime import etc
from tests import bashhooks
from tests.installation import copy_tree
from tests.kernel.conftest import UID, User

SHOW_RAN = ("sh", "-c", 'echo "$RAN"')


@pytest.fixture
def site(user: User) -> pathlib.Path:
    """Return the system's hooks.d."""
    directory = user.home / "etc/hooks.d"
    directory.mkdir(parents=True)
    return directory


def explained(user: User, *arguments: str, **env: str) -> list[str]:
    """Return the lines about hooks in the output of --explain. Remove the home directory from their paths."""
    out = user.start("--explain", *arguments, "box", "true", env=env)
    lines = [line for line in out.splitlines() if line.startswith(("hook ", "no hook "))]
    return [" ".join(line.replace(f"{user.home}/", "").split()) for line in lines]


@pytest.mark.parity("hooks: a site can replace a hook, or switch it off")
def test_edited_hooks_of_the_site_replace_ours(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    bashhooks.write(site, bashhooks.LIKE_ENROOTS | bashhooks.LIKE_PYXIS)
    names = sorted([*bashhooks.LIKE_ENROOTS, *bashhooks.LIKE_PYXIS])
    script = 'echo "$RAN"; cd; ls mine; cat /etc/apt/apt.conf.d/*'
    (user.home / "mine").touch()
    out = user.start("--root", "box", "sh", "-c", script, env={"ENROOT_MOUNT_HOME": "y"}, status=0).splitlines()
    assert out == [" ".join(names), "mine", "// of the site"]
    assert user.start("box", "id", "-un") == "guest\n"
    lines = explained(user)
    for name in bashhooks.LIKE_ENROOTS:
        assert f"hook etc/hooks.d/{name}.sh (in place of penroot's hook)" in lines
        assert not any(f"/{name}.py" in line for line in lines)
    assert "hook etc/hooks.d/50-slurm-pmi.sh" in lines


@pytest.mark.parity("hooks: run in the order of their names")
def test_hooks_of_both_languages_run_in_one_order(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    python = "def run(c):\n    c.environ['RAN'] = (c.environ.get('RAN', '') + ' ' + __file__[-7:-3]).strip()\n"
    for name in ("20-b", "40-d", "50-e"):
        (site / f"{name}.py").write_text(python)
    bashhooks.write(site, {"10-a": "", "30-c": "", "50-e": "", "60-f": ""})
    bashhooks.write(user.home / "config/hooks.d", {"00-u": ""})
    user.own(user.home)
    out = user.start("box", *SHOW_RAN, env={"ENROOT_CONFIG_PATH": str(user.home / "config")})
    assert out == "10-a 20-b 30-c 40-d 50-e 50-e 60-f 00-u\n"


@pytest.mark.parity("hooks: run in the order of their names")
def test_hooks_see_what_earlier_hooks_wrote(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    (site / "20-b.py").write_text(
        "def run(c):\n    assert c.environ.pop('GONE') == '1'\n    assert c.environ['QUOTED'] == 'a b'\n"
        "    c.environ['PYTHON'] = 'x'\n"
    )
    bashhooks.write(
        site,
        {
            "10-a": "printf '%s\\n' GONE=1 '  QUOTED=\"a b\"' KEPT=1 >> \"${ENROOT_ENVIRON}\"\n"
            'echo "/usr/share /mnt none x-create=dir,bind,ro" >> "${ENROOT_MOUNTS}"\n',
            "30-c": 'grep -q "^PYTHON=x$" "${ENROOT_ENVIRON}"; ! grep -q ^GONE= "${ENROOT_ENVIRON}"\n'
            'grep -q \'QUOTED="a b"\' "${ENROOT_ENVIRON}"; grep -q "^/usr/share /mnt" "${ENROOT_MOUNTS}"\n'
            'sed -i /^FROM_IMAGE=/d "${ENROOT_ENVIRON}"; echo "KEPT=2" >> "${ENROOT_ENVIRON}"\n'
            'echo ENROOT_DATA_PATH=/x >> "${ENROOT_ENVIRON}"\n',
        },
    )
    show = 'echo "$PYTHON/$GONE/$QUOTED/$FROM_IMAGE/$KEPT/$ENROOT_DATA_PATH"; ls -d /mnt/doc'
    assert user.start("box", "sh", "-c", show) == "x//a b//2/\n/mnt/doc\n"


def test_hook_can_change_the_command_script(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    """The start reads /etc/rc before the hooks, to prefetch the program, and again after the hooks."""
    run = etc.Exec("/opt", ("echo",), ("image",))
    for name, content in (("rc", etc.write_rc("docker://box", {}, run)), ("rc.local", etc.RC_LOCAL)):
        (rootfs / "etc" / name).write_text(content)
    image = str(user.home / "box.sqsh")
    user.penroot("export", "-o", image, "box")
    assert user.start(image, "argument") == "argument\n"
    (site / "50-rc.py").write_text(
        "def run(c):\n    old = c.read('/etc/rc')\n    c.write('/etc/rc', old.replace(b\"'echo'\", b\"'cat'\"))\n"
    )
    assert user.start(image, "/etc/rc.local") == etc.RC_LOCAL


@pytest.mark.parity("variables that a script of --conf exports reach hooks")
@pytest.mark.parametrize("vendor", ["MELLANOX", "NVIDIA"])
@pytest.mark.parametrize("source", ["hook", "environ()", "export"])
def test_hooks_use_the_devices_that_others_selected(
    user: User, rootfs: pathlib.Path, site: pathlib.Path, vendor: str, source: str
) -> None:
    """The devices are selected by a hook of the node, for example for MIG, or by a configuration script."""
    if vendor == "NVIDIA" and os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has GPUs")
    line = f"{vendor}_VISIBLE_DEVICES=7777"
    conf = user.home / "box.conf"
    conf.write_text({"environ()": f"environ() {{ echo {line}; }}\n", "export": f"export {line}\n"}.get(source, ""))
    if source == "hook":
        bashhooks.write(site, {"50-choose": f'echo {line} >> "${{ENROOT_ENVIRON}}"\n'})
    hook = {"MELLANOX": "99-mellanox", "NVIDIA": "98-nvidia"}[vendor]
    (site / f"{hook}.py").write_text(
        "def run(c):\n    from enroot_py.errors import HookError\n"
        f"    name = '{vendor}_VISIBLE_DEVICES'\n"
        "    raise HookError('asked for ' + c.host.get(name, c.environ.get(name, 'nothing')))\n"
    )
    assert "asked for 7777" in user.penroot("start", "-c", str(conf), "box", "true", status=1).stderr


@pytest.mark.parity("hooks: run in the order of their names")
def test_selection_by_a_hook_reaches_our_hook(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    bashhooks.write(site, {"50-choose": 'echo MELLANOX_VISIBLE_DEVICES=7777 >> "${ENROOT_ENVIRON}"\n'})
    assert "MELLANOX_VISIBLE_DEVICES=7777: no device" in user.penroot("start", "box", "true", status=1).stderr


@pytest.mark.parity("variables that a script of --conf exports reach hooks")
def test_hooks_get_settings_that_a_configuration_exports(user: User, rootfs: pathlib.Path) -> None:
    (user.home / "mine").touch()
    conf = user.write("box.conf", "export ENROOT_MOUNT_HOME=y\n")
    assert user.start("-c", str(conf), "box", "sh", "-c", "ls ~/mine") == f"{user.home}/mine\n"
    conf.write_text("export ENROOT_MOUNT_HOME=perhaps\n")
    stderr = user.penroot("start", "-c", str(conf), "box", status=1).stderr
    assert "box.conf: ENROOT_MOUNT_HOME='perhaps' must be" in stderr


@pytest.mark.parity("environ()")
def test_configuration_runs_in_one_shell(user: User, rootfs: pathlib.Path) -> None:
    conf = user.write(
        "box.conf",
        "first=$1; export SHOWN=by-export\n"
        'environ() { later=2; echo "A=${first}"; grep -q ^FROM_IMAGE=yes "${ENROOT_ENVIRON}"; }\n'
        'hooks() { echo "B=${later}" >> "${ENROOT_ENVIRON}"; touch "${ENROOT_ROOTFS}/mnt-made"; }\n'
        'mounts() { test -e "${ENROOT_ROOTFS}/mnt-made"; echo "/usr/share /mnt none x-create=dir,bind"; }\n',
    )
    user.write("etc/environ.d/50-x.env", "C=${SHOWN}\n")
    out = user.start("-c", str(conf), "box", "sh", "-c", 'echo "$A $B $C"; ls -d /mnt/doc')
    assert out == "sh 2 by-export\n/mnt/doc\n"


def known_original(user: User, site: pathlib.Path, name: str, text: str) -> pathlib.Path:
    """Install a hook with ``text``, and return penroot from a source tree that regards it as enroot's original hook."""
    bashhooks.write(site, {name: text})
    tree = user.home / "penroot"
    program = copy_tree(tree)
    digest = blake2b((site / f"{name}.sh").read_bytes(), digest_size=16).hexdigest()
    with (tree / "hooks/originals.b2sum").open("a") as known:
        known.write(f"{digest}  {name}.sh\n")
    user.own(tree)
    return program


@pytest.mark.parity("hooks: a site can replace a hook, or switch it off")
@pytest.mark.parametrize("name", ["10-shadow", "50-sharp"])
def test_unedited_hook_of_enroot_is_replaced(user: User, rootfs: pathlib.Path, site: pathlib.Path, name: str) -> None:
    main = known_original(user, site, name, "exit 1\n")
    assert user.run(str(main), "start", "box", "id", "-un").stdout == f"user{UID}\n"
    out = user.run(str(main), "start", "--explain", "box", "true").stdout
    assert f"{name}.py  (in place of {site}/{name}.sh, an original of enroot)" in out
    with (site / f"{name}.sh").open("a") as f:
        f.write("# edited\n")
    stderr = user.run(str(main), "start", "box", "id", "-un", status=1).stderr
    assert f"hook {site}/{name}.sh failed" in stderr


@pytest.mark.parity("hooks: a site can replace a hook, or switch it off")
@pytest.mark.parametrize("kind", ["empty", "null", "not executable", "py"])
def test_hook_is_switched_off(user: User, rootfs: pathlib.Path, site: pathlib.Path, kind: str) -> None:
    off = site / ("10-shadow.py" if kind == "py" else "10-shadow.sh")
    if kind == "null":
        off.symlink_to("/dev/null")
    else:
        off.write_text("#!/bin/sh\n" if kind == "not executable" else "")
    assert user.penroot("start", "box", "id", "-un", status=1).stderr.startswith("id: ")
    expected = {"null": "is empty", "py": "off by etc/hooks.d/10-shadow.py"}.get(kind, f"is {kind}")
    assert any(line.startswith("no hook 10-shadow (switched off") and expected in line for line in explained(user))
    shown = user.penroot("info").stdout
    assert "10-shadow  (switched off" in shown


def test_info_names_hooks_and_why(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    bashhooks.write(site, {"98-nvidia": "", "50-mine": ""})
    lines = user.penroot("info").stdout.partition("\nHooks:\n")[2].splitlines()
    assert f"  hook     {site}/98-nvidia.sh  (in place of penroot's hook)" in lines
    assert f"  hook     {site}/50-mine.sh" in lines
    assert [line for line in lines if line.endswith("/10-shadow.py")]


def test_functions_of_enroots_library(user: User, rootfs: pathlib.Path, site: pathlib.Path) -> None:
    script = """
made=$(common::mktmpdir of-a-hook); common::chdir "${made}"
mkdir -p closed/in; chmod 0 closed/in
common::fixperms "${made}"
printf '%s\\n' 'A=${WORD}${NONE}' 'B=$WORD' > lines
common::readstrarray lines "$(common::envsubst lines)"
printf 'SAID=%s\\n' "${lines[*]} $(stat -c %a closed/in)" >> "${ENROOT_ENVIRON}"
common::rmall "${made}"; [ ! -e "${made}" ]
"""
    bashhooks.write(site, {"50-library": script})
    out = user.start("box", "sh", "-c", 'echo "$SAID"', env={"WORD": "${WORD}", "TMPDIR": str(user.home)})
    assert out == "A=${WORD} B=$WORD 700\n"


def test_module_for_bash_hooks_is_not_imported_without_one(
    user: User, rootfs: pathlib.Path, site: pathlib.Path
) -> None:
    (site / "50-x.py").write_text(
        "def run(c):\n    import sys\n    c.environ['SEEN'] = str('enroot_py.runtime.shellhooks' in sys.modules)\n"
    )
    assert user.start("box", "sh", "-c", "echo $SEEN") == "False\n"
