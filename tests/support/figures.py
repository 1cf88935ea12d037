"""Figures of a report that may be None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """`value`, which must be there."""
    assert value is not None
    return value
