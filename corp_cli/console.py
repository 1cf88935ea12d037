"""What a run shows on the terminal: progress on stderr, results on stdout."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
_collected: ContextVar[list[str] | None] = ContextVar("warnings of the run", default=None)


def out() -> Console:
    """Results; a new one each time so that redirected streams are respected."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Progress and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """One line on stderr; said once, and kept for the report, where the run asked for it with `collect_warnings`."""
    message = " ".join(message.split())
    if (collected := _collected.get()) is not None:
        if message in collected:  # images are read more than once
            return
        collected.append(message)
    err().print(f"corp: warning: {message}", style="yellow", markup=False)


def collect_warnings() -> list[str]:
    """A list to which every later `warn` adds its message, until the next call."""
    collected: list[str] = []
    _collected.set(collected)
    return collected


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """`items`, with a progress bar and the time left on a terminal; silent elsewhere."""
    console = err()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=description)


@dataclass
class Stopwatch:
    """Seconds spent in each stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the body as `stage`, adding to what it took before."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
