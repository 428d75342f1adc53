"""Immutable records, like frozen dataclasses. On the start path, where the import of dataclasses would be too slow."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(frozen_default=True)
class Frozen:
    """A record with a field for each annotation of its class. Records with equal fields are equal."""

    def __init__(self, *values: object, **named: object) -> None:
        self.__dict__.update(zip(self.__annotations__, values, strict=False), **named)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the {name} of a {type(self).__name__} does not change")

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__annotations__)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Frozen) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())
