"""Records that do not change: what dataclasses would give, without what importing them costs a start."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Frozen:
    """A record whose fields are the annotations of its class; its constructor takes them by name."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the {name} of a {type(self).__name__} does not change")
