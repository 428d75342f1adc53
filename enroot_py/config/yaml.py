"""Parse penroot.yaml.

Keys are names of settings in lower case, without ENROOT_. The key ``environment`` holds variables for hooks, such as
NVIDIA_*, and for connections with registries, such as proxies::

    data_path: /local/${USER}/containers
    cache_limit: 200G
    mount_home: yes
    devices: [nvidia.com/gpu=all, /dev/kfd]
    environment:
      MELLANOX_VISIBLE_DEVICES: all

An unknown key, a duplicate key and a value of the wrong type are errors with file and line. parsed.py caches the
result, so most starts do not import this module.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from enroot_py.base.errors import ConfigError
from enroot_py.config.table import all_settings, check_key
from enroot_py.config.words import nearest

_SETTINGS = all_settings()
_NAMES = {setting.name: variable for variable, setting in _SETTINGS.items()}
# part of a message of PyYAML -> hint; the first match counts
_HINTS = {
    r"'\t'": "use spaces instead of tabs",
    "cannot start any token": 'quote the value: KEY: "VALUE"',
    "mapping values": 'quote a value that contains ": ", and begin each setting in the first column',
    "block": "begin each setting in the first column",
    "": 'write KEY: VALUE, and quote a value with special characters: KEY: "VALUE"',
}


def parse(path: str, data: bytes) -> list[tuple[str, int, str]]:
    """Return (variable, line, text) of each setting. Raises ConfigError."""
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        problem = str(e.problem or e.context)
        hint = next(hint for part, hint in _HINTS.items() if part in problem)
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {problem}", hint=hint) from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}:1: {str(e).splitlines()[0]}", hint="save the file as plain UTF-8 text") from e
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
                        hint=f"write {_SETTINGS[variable.value].name}: VALUE outside of environment",
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
            suggestion = nearest(name.lower().removeprefix("enroot_"), _NAMES)
            hint = (
                f"did you mean {suggestion}?"
                if suggestion
                else "penroot info lists the settings; write them without ENROOT_"
            )
            raise ConfigError(f"{path}:{line}: unknown key {name!r}", hint=hint)


def _pairs(path: str, node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the pairs of a mapping. Raises ConfigError unless the keys are unique scalars."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: this is not a mapping", hint="write KEY: VALUE")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: the key is a list or a mapping", hint="write KEY: VALUE")
        if key.value in seen:
            raise ConfigError(
                f"{path}:{line}: {key.value} is already set in line {seen[key.value]}", hint="remove one of the lines"
            )
        seen[key.value] = line
        yield key, value


def _scalar(path: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: the value is empty, a list or a mapping", hint="write KEY: VALUE"
        )
    return str(node.value)
