"""When memory runs out: the stage starts again with batches of half the size."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from corp_cli.errors import CorpError
from corp_cli.runtime import console, ranks
from corp_cli.runtime.environment import linux

T = TypeVar("T")
Config = TypeVar("Config")


# What C++ libraries say in a plain RuntimeError or OSError: PyTorch's allocators on Linux, Windows and Apple, oneDNN,
# mmap, the CUDA runtime and libraries, new, and threads without room for their stack.
WORDS = (
    "defaultcpuallocator: ",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a memory",
    "could not create a primitive",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
    "can't start new thread",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device or this machine has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    library = isinstance(error, RuntimeError | OSError | ImportError)
    return library and any(word in str(error).lower() for word in WORDS)


def halving_batches(work: Callable[[Config], T], cfg: Config, name: str) -> T:
    """work(cfg); each time memory runs out, again with half of `cfg.batch_size`, down to 1, and a warning.

    `name` is that of the config section in messages. The work starts afresh, so that no statistics of a half-processed
    batch are left in its sums. That costs little: all batches are of one size, so memory runs out on the first of them
    if at all. Raises CorpError at batches of 1, and with several processes, of which the others would have to start
    afresh too.
    """
    smaller: Any = cfg
    while True:
        try:
            return work(smaller)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if smaller.batch_size == 1:
                raise CorpError(
                    f"Memory ran out even with {name}.batch_size=1; close other programs, or use device=cpu or a "
                    "smaller model."
                ) from error
            if ranks.count() > 1:
                raise CorpError(
                    f"Memory ran out with {name}.batch_size={smaller.batch_size}, which several processes do not make "
                    f"smaller by themselves; set {name}.batch_size={smaller.batch_size // 2}."
                ) from error
        half = smaller.batch_size // 2
        console.warn(f"memory ran out with {name}.batch_size={smaller.batch_size}; going on with {half}.")
        smaller = replace(smaller, batch_size=half)
        release()


def free_memory(device: torch.device) -> int | None:
    """Bytes that a CUDA device has left; None of others, which share the memory of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def free_host_memory() -> int | None:
    """Bytes that processes can still take, as Linux sees it; None on other systems."""
    available = linux("meminfo").get("MemAvailable")  # in kB
    return None if available is None else 1024 * int(available.split()[0])


def room_of(device: torch.device) -> int:
    """Bytes that work done many times over at once may take: half of those free on CUDA; elsewhere 512 MiB."""
    return (free_memory(device) or 2**30) // 2


def release() -> None:
    """Give back what only a dead exception or an allocator's cache still holds."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used


@contextmanager
def plain_memory_errors() -> Iterator[None]:
    """Raise CorpError where memory runs out in the body."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise CorpError("Memory ran out; close other programs, or use device=cpu or a smaller model.") from error
