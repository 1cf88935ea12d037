"""What a run shows and logs: progress and warnings on stderr, results on stdout, stages in the log."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import IO, Any, Optional, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment

T = TypeVar("T")
PLAIN_SECONDS = 30.0  # between two lines of progress where there is no terminal
_collected: ContextVar[list[str] | None] = ContextVar("warnings of the run", default=None)
_bar: ContextVar[Bar | None] = ContextVar("bar of the stage", default=None)
_place: ContextVar[str] = ContextVar("stage of the run", default="")
_log = logging.getLogger(__name__)


def printable(text: str) -> str:
    """`text` without control characters other than newlines: names in files must not steer the terminal."""
    return "".join(letter for letter in text if letter == "\n" or unicodedata.category(letter) != "Cc")


def give_up(stream: IO[str]) -> None:
    """Send to nowhere what `stream` still holds and gets: else Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Screen(Console):
    """A console that prints no control characters of others, and outlives a reader that leaves and a full disk."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments of `renderable`, in which only rich itself steers the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, if that is possible: a run whose last line is lost is still done."""
        try:
            super().print(*objects, **how)
        except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
            give_up(self.file)
            if not self.stderr:
                _lost.append("stdout")


_lost: list[str] = []


def lost() -> bool:
    """Whether something could not be written to stdout since this was last asked."""
    found = bool(_lost)
    _lost.clear()
    return found


def out() -> Console:
    """Results; a new one each time so that redirected streams are respected."""
    return Screen(highlight=False, soft_wrap=True)


def err() -> Console:
    """Progress and warnings."""
    return Screen(stderr=True, highlight=False, soft_wrap=True)


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
    with shown(description) as show:
        start = time.monotonic()
        for number, item in enumerate(items, 1):
            yield item
            done, now = min(number * each, total), time.monotonic()
            show(done, total, (now - start) / done * (total - done))


Show = Callable[[int, int, float], None]  # units done, of how many, seconds left
Outlook = Callable[[float], Optional[float]]  # seconds left of what is counted → of the whole run, if that is known


@contextmanager
def shown(description: str) -> Iterator[Show]:
    """Where progress goes: to the bar of the stage, to one of its own, or to plain lines where there is no terminal."""
    live, place = _bar.get(), _place.get()
    if live is not None:
        yield live.counting(description)
        live.idle()
    elif on_terminal():
        with Bar.opened(description) as own:
            yield own.counting(description)
    else:
        yield plain_lines(f"{place}, {description}" if place else description)


def on_terminal() -> bool:
    """Whether stderr can hold a bar; FORCE_COLOR asks for colours in a file, which a bar would fill with controls."""
    console = err()
    return console.is_interactive and console.file.isatty()


def plain_lines(description: str) -> Show:
    """Lines on stderr, one every PLAIN_SECONDS at most; none where all is done before."""
    said = time.monotonic()

    def show(done: int, total: int, left: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PLAIN_SECONDS and done < total:
            err().print(f"corp: {description} {done}/{total}, about {duration(left)} left", markup=False)
            said = now

    return show


@dataclass(frozen=True)
class Bar:
    """One line at the foot of a terminal: what is done, how far it is, and that the program lives."""

    progress: Progress
    task: TaskID
    words: str
    outlook: Outlook

    @staticmethod
    @contextmanager
    def opened(words: str, outlook: Outlook = lambda part: None) -> Iterator[Bar]:
        """A bar while the body runs."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[said]}")
        with Progress(*columns, TimeElapsedColumn(), console=err(), transient=True) as progress:
            bar = Bar(progress, progress.add_task(words, total=None, said=""), words, outlook)
            bar.idle()
            yield bar

    def counting(self, description: str) -> Show:
        """Show units of `description`."""
        words = self.words if self.words.endswith(description) else f"{self.words}, {description}"

        def show(done: int, total: int, left: float) -> None:
            said = f"{done}/{total}, {duration(left)} left{self.in_all(left, '; ')}"
            self.progress.update(self.task, description=words, total=total, completed=done, said=said)

        return show

    def idle(self) -> None:
        """Show that something goes on which is not counted."""
        task = self.progress.tasks[0]
        task.total = task.finished_time = None  # for `update`, None is no change
        self.progress.update(self.task, description=self.words, said=self.in_all(0.0))

    def in_all(self, part: float, before: str = "") -> str:
        """What is left of the whole run, where that is known."""
        left = self.outlook(part)
        return "" if left is None else f"{before}{roughly(left)} left in all"


def duration(seconds: float) -> str:
    """`seconds` as a person says it: 40 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def roughly(seconds: float) -> str:
    """`seconds` as an estimate deserves: a few seconds, about 40 s, about 4 min, about 1 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 10:
        return "a few seconds"
    if seconds < 55:
        return f"about {round(seconds, -1):.0f} s"
    if minutes < 60:
        return f"about {minutes} min"
    hours, rest = divmod(round(minutes, -1), 60)
    return f"about {hours} h {rest} min" if rest else f"about {hours} h"


@contextmanager
def stage(name: str, place: str = "", outlook: Outlook = lambda part: None) -> Iterator[None]:
    """Log that the body begins as `name`, and that it is done, with its seconds; a terminal sees its `place` in all."""
    _log.info("%s: begins", name)
    start = time.perf_counter()
    if _bar.get() is None and on_terminal():
        with Bar.opened(f"{place}: {name}" if place else name, outlook) as bar, put(_bar, bar):
            yield
    else:
        with put(_place, place):
            yield
    _log.info("%s: done in %.1f s", name, time.perf_counter() - start)


@contextmanager
def busy(words: str) -> Iterator[None]:
    """A terminal sees `words`, and that the program lives, while the body runs."""
    with Bar.opened(words) if on_terminal() else contextlib.nullcontext():
        yield


@contextmanager
def put(variable: ContextVar[T], value: T) -> Iterator[None]:
    """`variable` is `value` while the body runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass
class Stopwatch:
    """Seconds spent in each stage, in order; `stages` names them all where it is known, so that each has its place."""

    stages: Sequence[str] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)  # estimated; of no stage where nothing is known

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as the stage `name`, adding to what it took before."""
        place = f"stage {self.stages.index(name) + 1} of {len(self.stages)}" if name in self.stages else ""
        start = time.perf_counter()
        try:
            with stage(name, place, lambda part: self.left(name, time.perf_counter() - start, part)):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def left(self, name: str, spent: float, part: float) -> float | None:
        """Seconds left of all stages, `spent` seconds into `name`, of which `part` at least are to come.

        Estimates of what is to come go by the pace so far: what the stages took of what was expected. A stage that a
        cache saved says nothing of it.
        """
        if name not in self.expected:
            return None
        done = [stage for stage, seconds in self.expected.items() if self.seconds.get(stage, 0.0) > seconds / 4]
        hoped = sum(self.expected[stage] for stage in done)
        pace = min(4.0, sum(self.seconds[stage] for stage in done) / hoped) if hoped else 1.0
        after = self.stages[self.stages.index(name) + 1 :]
        rest = sum(self.expected.get(stage, 0.0) for stage in after)
        return max(part, pace * self.expected[name] - spent) + pace * rest
