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
def places(count: int) -> Iterator[list[Callable[[], None]]]:
    """What puts a process in its place among `count`; they meet by a store in this one, as torchrun has it."""
    store = TCPStore("127.0.0.1", 0, count + 1, is_master=True, wait_for_workers=False)

    def place(rank: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), TORCHELASTIC_RESTART_COUNT="0")

    yield [partial(place, rank) for rank in range(count)]


def corp_of(count: int, folder: Path, *argv: str, before: Callable[[int], object] = lambda rank: None) -> list[Outcome]:
    """`corp <argv>` in `count` processes; `before(rank)` is done in each of them first."""
    with places(count) as every:
        children = [
            begin(folder, *argv, before=lambda rank=rank, place=place: (place(), before(rank)))  # type: ignore[misc]
            for rank, place in enumerate(every)
        ]
        return [child.wait() for child in children]


def each_of(count: int, folder: Path, work: Callable[[], Any]) -> None:
    """Do `work` in `count` processes that have met; an assertion that fails in one of them fails here."""

    def met(place: Callable[[], None]) -> None:
        place()
        ranks.start()
        work()
        ranks.stop()

    with places(count) as every:
        for child in [fork(partial(met, place), folder, 60) for place in every]:
            outcome = child.wait()
            assert outcome.code == 0, outcome.err
