"""Seeded fuzz, in process: mutated files through the functions that read them. Only corp's own errors are allowed."""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError, GateError
from tests.faults import readers
from tests.faults.cases import Case
from tests.faults.forks import HUNG, fork

BATCH = 250
SECONDS = 10  # that one input may take
BATCHES = {  # of every reader
    "manifest": 9,
    "header": 8,
    "plan": 8,
    "report": 8,
    "page": 4,
    "labels": 10,
    "class map": 4,
    "list": 8,
    "image": 16,
    "weights": 6,
    "images in tensors": 4,
    "statistics": 4,
    "curves": 4,
    "config.json": 4,
    "preprocessor_config.json": 4,
    "overrides": 1,
}
SLOW = {"overrides": 100, "page": 100}  # inputs in a batch


@dataclass(frozen=True)
class Reader:
    """`lay` writes sound files into the current folder; `mutate` changes them for one input, `read` reads them."""

    lay: Callable[[], None]
    mutate: Callable[[random.Random], Any]
    read: Callable[[Any], Any]


def cases() -> list[Case]:
    return [
        Case(f"fuzz/{name}/{turn}", partial(batch, name, turn), SLOW.get(name, BATCH))
        for name, turns in BATCHES.items()
        for turn in range(turns)
    ]


def batch(name: str, turn: int, folder: Path, count: int = 0) -> list[str]:
    """The inputs of one batch that were not survived. The child that one ends is followed by another."""
    at, found, first = folder / ".at", folder / ".found", 0
    count = count or SLOW.get(name, BATCH)
    while first < count:
        child = fork(partial(work, name, turn, range(first, count)), folder, limited=True).wait()
        if child.code == 0:
            break
        first = int(at.read_text()) + 1 if at.exists() else count
        what = "hangs" if child.code == HUNG else f"ends the process with {child.code}: {child.err[-200:]}"
        with found.open("a") as file:
            file.write(f"input {first - 1}: {what}\n")
    return found.read_text().splitlines() if found.exists() else []


def work(name: str, turn: int, numbers: range) -> None:
    """Read the inputs `numbers` of a batch in this process; put down those that end in another error than corp's."""
    os.environ["COLUMNS"] = "200"
    reader: Reader = READERS[name]
    reader.lay()
    seen: set[str] = set()
    for number in numbers:
        Path(".at").write_text(str(number))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            reader.read(reader.mutate(random.Random(f"{name} {turn} {number}")))
        except (CorpError, GateError):
            continue
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            own = next((f for f in reversed(where) if "corp_cli" in f.filename), where[-1])
            what = " ".join(f"{type(error).__name__}: {error}".split())[:150]
            note(number, f"{what} ({Path(own.filename).name}:{own.lineno} {own.name})", seen)
    signal.setitimer(signal.ITIMER_REAL, 0)


def note(number: int, what: str, seen: set[str]) -> None:
    """Put down one input, and of those that end in the same place that they do."""
    where = what.rpartition("(")[2]
    text = f"input {number}: {'again at ' + where.rstrip(')') if where in seen else what}"
    seen.add(where)
    with Path(".found").open("a") as file:
        file.write(text + "\n")


READERS = {name: Reader(*parts) for name, parts in readers.ALL.items()}
