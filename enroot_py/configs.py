"""The ``NAME.d`` directories of the system and the user, merged with what we ship."""

import os
from _collections_abc import Iterator, Mapping


def fragments(directories: "tuple[str, ...]", suffix: str, shipped: "Mapping[str, str]") -> "Iterator[tuple[str, str]]":
    """Yield (origin, text) of each ``*.suffix`` file, by name, one directory after the other.

    A file of the first directory (the system's) replaces a shipped one of the
    same name, so that a site changes a default without deleting ours.
    """
    for index, directory in enumerate(directories):
        try:
            found = {name for name in os.listdir(directory) if name.endswith(suffix)}
        except OSError:
            found = set()
        for name in sorted(found | set(shipped) if index == 0 else found):
            if name in found:
                path = f"{directory}/{name}"
                with open(path, "rb") as f:
                    yield path, os.fsdecode(f.read())
            else:
                yield name, shipped[name]
