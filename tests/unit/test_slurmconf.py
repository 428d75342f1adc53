"""Parse slurm.conf and plugstack.conf as Slurm does, and rewrite them for a container."""

from __future__ import annotations

import pathlib
import re

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.features.slurm_inside.slurmconf import Plugin, SlurmConf, stack_text


def conf(directory: pathlib.Path, text: str, **files: str) -> SlurmConf:
    for name, content in {"slurm.conf": text, **files}.items():
        (directory / name).write_text(content)
    return SlurmConf(f"{directory}/slurm.conf")


@pytest.mark.parity("Slurm's configuration")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("PluginDir=/a", "/a"),
        ("plugindir = /a  # PluginDir=/b", "/a"),
        ("ClusterName=x PLUGINDIR=/a AuthType=auth/munge", "/a"),
        ('PluginDir="/a b" ClusterName=x', "/a b"),
        ("ClusterName=x \\\n  PluginDir=/a", "/a"),
        ("PluginDir=/b\nPluginDir=/a", "/a"),
        ("# PluginDir=/b", ""),
        ("NoPluginDir=/b", ""),
    ],
)
def test_keys_and_their_values(tmp_path: pathlib.Path, text: str, value: str) -> None:
    slurm_conf = conf(tmp_path, f"{text}\nNodeName=n1\n")
    assert slurm_conf.value("PluginDir") == value
    changed = slurm_conf.changed({"PluginDir": "/mine"})
    assert changed.endswith("NodeName=n1\nPluginDir=/mine\n")
    again = conf(tmp_path, changed)
    assert again.value("PluginDir") == "/mine" and "/a" not in changed
    assert again.value("ClusterName") == slurm_conf.value("ClusterName")


@pytest.mark.parity("Slurm's configuration")
def test_included_files(tmp_path: pathlib.Path) -> None:
    text = f"ClusterName=big\nInclude %c.nodes\ninclude {tmp_path}/more\nPartitionName=p\n"
    slurm_conf = conf(tmp_path, text, **{"big.nodes": "NodeName=n[1-9]\n", "more": "SlurmUser=slurm\n"})
    assert slurm_conf.value("SlurmUser") == "slurm" and slurm_conf.is_open
    assert slurm_conf.changed({"SlurmUser": "7"}) == "ClusterName=big\nNodeName=n[1-9]\nPartitionName=p\nSlurmUser=7\n"
    (tmp_path / "more").chmod(0o640)
    assert not SlurmConf(f"{tmp_path}/slurm.conf").is_open


@pytest.mark.parity("Slurm's configuration")
def test_plugins(tmp_path: pathlib.Path) -> None:
    stack = "# none\nrequired  a.so\ninclude stack.d/*.conf\noptional /x/c.so one two # three\nnonsense\n"
    (tmp_path / "stack.d").mkdir()
    (tmp_path / "stack.d/b.conf").write_text("optional /x/b.so\n")
    expected = [
        Plugin(need="required", path="a.so", words=()),
        Plugin(need="optional", path="/x/b.so", words=()),
        Plugin(need="optional", path="/x/c.so", words=("one", "two")),
    ]
    slurm_conf = conf(tmp_path, "ClusterName=x\n", **{"plugstack.conf": stack})
    assert slurm_conf.plugstack == expected
    assert conf(tmp_path, f"PlugStackConfig={tmp_path}/other\n", other="").plugstack == []
    assert stack_text({expected[2]: "/y/c.so"}) == "optional /y/c.so one two\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Include slurm.conf\n", "more than 10 nested includes"),
        ("Include none.conf\n", "none.conf (named in DIRECTORY/slurm.conf): No such file"),
        ("Include /dev/zero\n", "/dev/zero (named in DIRECTORY/slurm.conf) is not a regular file"),
        ("PlugStackConfig=/no\0ne\n", "DIRECTORY/slurm.conf: invalid file name"),
        ("PlugStackConfig=/none/stack\n", "cannot read /none/stack (named in DIRECTORY/slurm.conf)"),
    ],
)
def test_unreadable_files(tmp_path: pathlib.Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error.replace("DIRECTORY", str(tmp_path)))) as caught:
        conf(tmp_path, text)
    assert caught.value.hint
