"""Several processes that work as one, as torchrun starts them: each reads and runs its own part of the images.

With one process, as there mostly is, everything here gives back what it is given. With several, all come by the same
calls in the same order: sums are over the images of all, and what is solved once is sent to the others, so that all go
on with the same numbers. The first alone has a folder to write to, and is heard. One that fails just ends: torchrun
then ends the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from corp_cli.errors import CorpError
from corp_cli.runtime.console import put

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
# For a process that hangs; of one that dies, the others hear at once. Longer than what one does while others wait, such
# as ranking a wide block on a CPU.
PATIENCE = timedelta(minutes=30)
NAMED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by torchrun, and others that start processes of PyTorch


class LeftError(CorpError):
    """Another process has ended: it is what that one says that tells why."""


@dataclass(frozen=True)
class Group:
    """The place of this process among those of the run, and what they tell each other besides tensors."""

    rank: int = 0
    count: int = 1
    store: Any = None


ONE = Group()
_group: ContextVar[Group] = ContextVar("processes of the run", default=ONE)


def start() -> None:
    """Meet the other processes, where torchrun started several. Raises CorpError where they do not find each other."""
    if not all(os.environ.get(name) for name in NAMED) or int(os.environ["WORLD_SIZE"]) == 1:
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise CorpError(
            f"The {os.environ['WORLD_SIZE']} processes of this run do not find each other "
            f"({str(error).splitlines()[0].rstrip('.')}); start them with torchrun, or corp without it."
        ) from error
    _group.set(Group(rank, count, store))


def stop() -> None:
    """Leave the others, when all is done; one that failed does without, and ends."""
    if count() > 1:
        import torch.distributed as dist

        dist.destroy_process_group()
        _group.set(ONE)


def alone() -> AbstractContextManager[None]:
    """Within it, this process does what it does without the others."""
    return put(_group, ONE)


def rank() -> int:
    """The number of this process, from 0."""
    return _group.get().rank


def count() -> int:
    """How many processes there are."""
    return _group.get().count


def leads() -> bool:
    """Whether this is the first process, which writes and is heard."""
    return rank() == 0


def speaks() -> bool:
    """Whether this process is the first to say why the run ends; what the others have to say follows from that."""
    store, name = _group.get().store, str(rank())
    try:
        return store is None or store.compare_set("corp: says why", "", name) == name.encode()
    except RuntimeError:  # the store has gone with its process
        return True


def leave_word(error: BaseException, message: str) -> None:
    """Let torchrun repeat `message` as the cause, in what it writes when all have ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if count() > 1 and path and not isinstance(error, LeftError):
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)


def device() -> torch.device:
    """The GPU of this process, the current one from now on. Raises CorpError where there are too few on its machine."""
    import torch

    local, there = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if local >= there:
        raise CorpError(f"There are more processes than the {there} GPUs here; start one a GPU, or use device=cpu.")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


# --- which part of the work -----------------------------------------------------------------------------------


def part(total: int) -> range:
    """Which of `total` images are this process's: one stretch of them, so that the order of all is kept."""
    return range(total * rank() // count(), total * (rank() + 1) // count())


def at_the_end(total: int) -> range:
    """As `part`, of images that come behind those of all processes: the last takes all of them."""
    return range(total if rank() == count() - 1 else 0)


def takes(number: int) -> bool:
    """Whether this process does the piece of work of this `number`, where each is done once."""
    return number % count() == rank()


# --- what is exchanged ----------------------------------------------------------------------------------------


def total(own: Tensor) -> Tensor:
    """The sum of `own` over all processes, on all of them."""
    if count() == 1:
        return own
    import torch.distributed as dist

    found = own.clone()
    with reached():
        dist.all_reduce(found)
    return found


def sent(value: T, by: int) -> T:
    """`value` as the process `by` has it, on all of them; tensors on a GPU come to the GPU of each."""
    if count() == 1:
        return value
    import torch
    import torch.distributed as dist

    from corp_cli.runtime.parcels import packed, unpacked

    own = rank() == by
    content, tensors = packed(value) if own else (b"", [])
    parcel = [content]
    with reached():
        dist.broadcast_object_list(parcel, by, device=torch.device("cpu"))
    if not own:
        value, tensors = unpacked(parcel[0])
    with reached():
        for tensor in tensors:
            dist.broadcast(tensor, by)
    return value


def gathered(own: T) -> list[T]:
    """What every process has, in order, on all of them."""
    return [sent(own, by) for by in range(count())]


def once(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """work(…), done by the first process for all. A CorpError of it is raised by all."""
    if count() == 1:
        return work(*args, **kwargs)
    found, error = None, None
    if leads():
        try:
            found = work(*args, **kwargs)
        except CorpError as mistake:
            error = mistake
    found, error = sent((found, error), 0)
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # of work, which has raised nothing


def spread(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """work(item) for every item, in order; each process does some of them, and all get all."""
    if count() == 1:  # an item may be there only until the next is asked for
        yield from map(work, items)
        return
    every = list(items)
    for start in range(0, len(every), count()):
        own = [work(item) for item in every[start : start + count()][rank() : rank() + 1]]
        for by in range(min(count(), len(every) - start)):
            yield sent(own[0] if by == rank() else None, by)  # type: ignore[misc]  # of the one that has it


@contextmanager
def reached() -> Iterator[None]:
    """Raise LeftError where another process does not take part in what is exchanged in the body."""
    try:
        yield
    except RuntimeError as error:
        raise LeftError(
            f"Another of the {count()} processes of this run has ended, and the run with it; what it or torchrun says "
            "tells why."
        ) from error
