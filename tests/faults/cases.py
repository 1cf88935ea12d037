"""A case is one fault, or a batch of fuzzed inputs, with what must come of it; all are listed here, by kind."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.forks import scratch


@dataclass(frozen=True)
class Case:
    """`check` raises AssertionError, or gives a line for every input of a batch that was not survived."""

    name: str  # kind/…, by which `python -m tests.faults NAME` does it again
    check: Callable[[Path], list[str] | None]  # in an empty folder
    count: int = 1  # of faults or inputs

    @property
    def kind(self) -> str:
        """The first part of its name."""
        return self.name.partition("/")[0]

    def failures(self) -> list[str]:
        """What was not survived, a line each."""
        with scratch() as folder:
            try:
                return [f"{self.name}: {line}" for line in self.check(folder) or []]
            except AssertionError as error:
                return [f"{self.name}: {' '.join(str(error).split())[:400]}"]
            except Exception:
                return [f"{self.name}: the case itself failed: {traceback.format_exc()[-600:]}"]


def kinds() -> dict[str, Callable[[], list[Case]]]:
    """kind → its cases; making the list may take a few runs."""
    from tests.faults import crashes, doors, fuzz, load, mistakes, races, tampering

    return {
        "crash": crashes.cases,
        "mistake": mistakes.cases,
        "tamper": tampering.cases,
        "door": doors.cases,
        "race": races.cases,
        "fuzz": fuzz.cases,
        "load": load.cases,
    }
