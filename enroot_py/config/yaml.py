"""Read penroot.yaml.

A mapping of settings by their names, without ENROOT_ and in small letters; ``environment``
maps variables for hooks and clients to values, such as NVIDIA_* and proxies::

    data_path: /local/${USER}/containers
    cache_limit: 200G
    mount_home: yes
    devices: [nvidia.com/gpu=all, /dev/kfd]
    environment:
      MELLANOX_VISIBLE_DEVICES: all

A key that is none, a key that comes twice and a value of the wrong kind are errors with
file and line. Off the start path: parsed.py keeps what this returns.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from enroot_py.base.errors import ConfigError
from enroot_py.config.table import all_settings, check_key
from enroot_py.config.words import nearest

_SETTINGS = all_settings()
_NAMES = {setting.name: variable for variable, setting in _SETTINGS.items()}


def parse(path: str, data: bytes) -> list[tuple[str, int, str]]:
    """Yield (variable, line, text) of each setting. Raises ConfigError."""
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {e.problem or e.context}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}:1: {str(e).splitlines()[0]}") from e
    return list(_settings(path, root)) if root is not None else []


def _settings(path: str, root: yaml.Node) -> Iterator[tuple[str, int, str]]:
    for key, value in _pairs(path, root):
        name, line = key.value, key.start_mark.line + 1
        if name == "environment":
            for variable, text in _pairs(path, value):
                origin = f"{path}:{variable.start_mark.line + 1}"
                if variable.value in _SETTINGS:
                    raise ConfigError(
                        f"{origin}: {variable.value} is a setting",
                        hint=f"write {_SETTINGS[variable.value].name} outside of environment",
                    )
                check_key(variable.value, origin)
                yield variable.value, variable.start_mark.line + 1, _scalar(path, text)
        elif name in _NAMES:
            if isinstance(value, yaml.SequenceNode):
                words = [_scalar(path, word) for word in value.value]
                yield _NAMES[name], line, _SETTINGS[_NAMES[name]].separator.join(words)
            else:
                yield _NAMES[name], line, _scalar(path, value)
        else:
            meant = nearest(name.lower().removeprefix("enroot_"), _NAMES)
            hint = f"did you mean {meant}?" if meant else "penroot info lists the settings; write them without ENROOT_"
            raise ConfigError(f"{path}:{line}: unknown key {name!r}", hint=hint)


def _pairs(path: str, node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the pairs of a mapping with unique string keys."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: this is not a mapping", hint="write KEY: VALUE")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key is a word")
        if key.value in seen:
            raise ConfigError(f"{path}:{line}: {key.value} is in line {seen[key.value]} already")
        seen[key.value] = line
        yield key, value


def _scalar(path: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: not a single value", hint="write KEY: VALUE")
    return str(node.value)
