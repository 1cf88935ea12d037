"""What a run shows and logs: progress and warnings on stderr, results on stdout, stages in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
PLAIN_SECONDS = 30.0  # between two lines of progress where there is no terminal
_collected: ContextVar[list[str] | None] = ContextVar("warnings of the run", default=None)
_log = logging.getLogger(__name__)


def out() -> Console:
    """Results; a new one each time so that redirected streams are respected."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Progress and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def readable(text: str) -> str:
    """`text` as UTF-8 can hold it: bytes of file names that are none are written \\udcff."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def warn(message: str) -> None:
    """One line on stderr; said once, and kept for the report, where the run asked for it with `collect_warnings`."""
    message = readable(" ".join(message.split()))
    if (collected := _collected.get()) is not None:
        if message in collected:  # images are read more than once
            return
        collected.append(message)
    _log.warning(message)
    err().print(f"corp: warning: {message}", style="yellow", markup=False)


def collect_warnings() -> list[str]:
    """A list to which every later `warn` adds its message, until the next call."""
    collected: list[str] = []
    _collected.set(collected)
    return collected


def track(items: Iterable[T], description: str, total: int, each: int = 1) -> Iterator[T]:
    """`items`, which do `each` of `total` units of work: a bar with the time left on a terminal, else plain lines."""
    console = err()
    # FORCE_COLOR asks for colours in a file, but a bar would fill it with control characters.
    if not (console.is_interactive and console.file.isatty()):
        yield from _track_plainly(items, description, total, each)
        return
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        for number, item in enumerate(items, 1):
            yield item
            progress.update(task, completed=min(number * each, total))


def _track_plainly(items: Iterable[T], description: str, total: int, each: int) -> Iterator[T]:
    """`items`, with a line on stderr at most every PLAIN_SECONDS; none where all is done before."""
    start = said = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        done, now = min(number * each, total), time.monotonic()
        if now - said >= PLAIN_SECONDS and done < total:
            left = duration((now - start) / done * (total - done))
            err().print(f"corp: {description} {done}/{total}, about {left} left", markup=False)
            said = now


def duration(seconds: float) -> str:
    """`seconds` as a person says it: 40 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log that the body begins as `name`, and that it is done, with its seconds."""
    _log.info("%s: begins", name)
    start = time.perf_counter()
    yield
    _log.info("%s: done in %.1f s", name, time.perf_counter() - start)


@dataclass
class Stopwatch:
    """Seconds spent in each stage, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as the stage `name`, adding to what it took before."""
        start = time.perf_counter()
        try:
            with stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
