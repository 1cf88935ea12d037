"""Several processes, as torchrun starts them, but forked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from corp_cli.runtime import ranks
from tests.faults.forks import Outcome, begin, fork


@contextlib.contextmanager
def places(count: int) -> Iterator[tuple[list[Callable[[], None]], Callable[[], None]]]:
    """(what puts a process in its place among `count`, which waits; what lets all of them meet, once all are forked).

    They meet by a store in this process, as torchrun has it. It is served by a thread, and a process that is forked
    while that holds a lock waits for it in vain: so the store is made last.
    """
    reading, writing = os.pipe()
    stores: list[TCPStore] = []
    with open(reading, "rb", 0) as told, open(writing, "wb", 0) as tells:

        def place(rank: int) -> None:
            port = str(int(told.read(5)))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
            os.environ.update(TORCHELASTIC_RESTART_COUNT="0")

        def meet() -> None:
            stores.append(TCPStore("127.0.0.1", 0, count + 1, is_master=True, wait_for_workers=False))
            tells.write(count * f"{stores[0].port:05}".encode())

        yield [partial(place, rank) for rank in range(count)], meet


def corp_of(count: int, folder: Path, *argv: str, before: Callable[[int], object] = lambda rank: None) -> list[Outcome]:
    """`corp <argv>` in `count` processes; `before(rank)` is done in each of them first."""
    with places(count) as (every, meet):
        children = [
            begin(folder, *argv, before=lambda rank=rank, place=place: (place(), before(rank)))  # type: ignore[misc]
            for rank, place in enumerate(every)
        ]
        meet()
        return [child.wait() for child in children]


def each_of(count: int, folder: Path, work: Callable[[], Any]) -> None:
    """Do `work` in `count` processes that have met; an assertion that fails in one of them fails here."""

    def met(place: Callable[[], None]) -> None:
        place()
        ranks.start()
        work()
        ranks.stop()

    with places(count) as (every, meet):
        children = [fork(partial(met, place), folder, 60) for place in every]
        meet()
        outcomes = [child.wait() for child in children]
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err
