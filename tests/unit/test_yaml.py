from __future__ import annotations

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.config import yaml
from enroot_py.config.table import Setting, all_settings


def test_settings_by_name_with_their_lines() -> None:
    text = b"""\
# a comment
data_path: /local/${USER}/containers
remap_root: yes
max_connections: 3
squash_options: [-comp, lz4]
environment:
  MELLANOX_VISIBLE_DEVICES: all
  https_proxy: "http://proxy:3128"
"""
    assert yaml.parse("x", text) == [
        ("ENROOT_DATA_PATH", 2, "/local/${USER}/containers"),
        ("ENROOT_REMAP_ROOT", 3, "yes"),
        ("ENROOT_MAX_CONNECTIONS", 4, "3"),
        ("ENROOT_SQUASH_OPTIONS", 5, "-comp lz4"),
        ("MELLANOX_VISIBLE_DEVICES", 7, "all"),
        ("https_proxy", 8, "http://proxy:3128"),
    ]


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.name)
def test_every_setting_has_its_key(setting: Setting) -> None:
    text = f'{setting.name}: "{setting.default}"'
    assert yaml.parse("x", text.encode()) == [(setting.variable, 1, setting.default)]


@pytest.mark.parametrize("text", [b"", b"\n# nothing\n"])
def test_empty_file_sets_nothing(text: bytes) -> None:
    assert yaml.parse("x", text) == []


@pytest.mark.parity("penroot.yaml and penroot.yaml.d/*.yaml")
@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("a: 1\n", 1, "penroot info"),
        ("\nremap_rot: yes\n", 2, "remap_root"),
        ("ENROOT_REMAP_ROOT: yes\n", 1, "remap_root"),
        ("login_shell: no\nlogin_shell: yes\n", 2, "remove one"),
        ("login_shell:\tno\n", 1, "spaces instead of tabs"),
        ("environment:\n\tFOO: a\n", 2, "spaces instead of tabs"),
        ("cache_path: a: b\n", 1, "quote a value"),
        ("cache_limit: @x\n", 1, "quote the value"),
        ("  login_shell: no\nmpi: no\n", 2, "first column"),
        ("login_shell:\n", 1, "KEY: VALUE"),
        ("login_shell: {a: b}\n", 1, "KEY: VALUE"),
        ("- login_shell\n", 1, "KEY: VALUE"),
        ("login_shell: [\n", 2, "KEY: VALUE"),
        ("x: *nowhere\n", 1, ""),
        ("environment:\n  PATH: /bin\n", 2, "ENROOT_*"),
        ("environment:\n  ENROOT_REMAP_ROOT: yes\n", 2, "remap_root"),
        ("? [a]\n: b\n", 1, "KEY: VALUE"),
        ("login_shell: !!python/name:os.system x\n", 1, ""),
        ("a: \x01\n", 1, "UTF-8"),
    ],
)
def test_mistakes_name_file_and_line(text: str, line: int, hint: str) -> None:
    if "python" in text:  # the tag creates no object: the value is the text x
        assert yaml.parse("x", text.encode()) == [("ENROOT_LOGIN_SHELL", 1, "x")]
        return
    with pytest.raises(ConfigError, match=rf"^/etc/penroot\.yaml:{line}: ") as caught:
        yaml.parse("/etc/penroot.yaml", text.encode())
    assert hint in caught.value.hint
