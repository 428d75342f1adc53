"""Records of class Frozen are immutable."""

from __future__ import annotations

import pytest

from enroot_py.base.frozen import Frozen


class Point(Frozen):
    x: int
    y: int = 0


class Place(Frozen):
    x: int
    y: int = 0


def test_records_of_one_class_are_equal_by_their_fields() -> None:
    assert [(point.x, point.y) for point in (Point(1, 2), Point(1, y=2), Point(x=1))] == [(1, 2), (1, 2), (1, 0)]
    assert Point(1) == Point(1, 0) and {Point(1), Point(x=1, y=0)} == {Point(1)}
    assert Point(1) != Point(2) and Point(1) != Place(1)


def test_a_field_does_not_change() -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match="the x of a Point does not change"):
        point.x = 2  # type: ignore[misc]
    assert point.x == 1
