"""A sample of the cases of every kind; `make faults` runs all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from tests.faults import crashes, doors, fuzz, mistakes, races, tampering
from tests.faults.cases import Case

KINDS: dict[str, tuple[Callable[[], list[Case]], int]] = {
    "crash": (partial(crashes.cases, ("uniform", "resume sequential")), 10),
    "mistake": (mistakes.cases, 4),
    "tamper": (tampering.cases, 8),
    "door": (doors.cases, 12),
    "race": (races.cases, 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_faults(kind: str) -> None:
    cases, count = KINDS[kind]
    lost = [line for case in random.Random(0).sample(cases(), count) for line in case.failures()]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("name", fuzz.BATCHES)
def test_fuzz(name: str) -> None:
    count = 10 if name in fuzz.SLOW else 100
    case = Case(f"fuzz/{name}/0", partial(fuzz.batch, name, 0, count=count), count)
    lost = case.failures()
    assert not lost, "\n".join(lost)
