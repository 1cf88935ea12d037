"""What came of a fit whose rounds are decided by data that it does not see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """Rounds taken, the λ of each, and errors relative to the energy of the targets, before and after."""

    rounds: int
    ridges: tuple[float, ...]
    fitted: tuple[float, float]
    held_out: tuple[float, float]
