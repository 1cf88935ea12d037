"""Memory that is freed and asked for again soon: kept by the process, and not cleared by the system in between."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # parameters of glibc's mallopt
KEEPS = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}  # nothing is mapped, and nothing given back
# What glibc comes to by itself once 32 MiB were freed; asked for by hand, it adapts no longer.
AS_USUAL = {MMAP_MAX: 65536, MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}

_kept = False


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within it, glibc keeps what is freed, and gives it back at the end; other C libraries do as they do.

    PyTorch frees and asks for every tensor anew, and one above 32 MiB comes from the system every time, which clears it
    page by page: on a CPU that can take longer than what is computed. One within another does nothing, nor does one
    where variables such as MALLOC_ARENA_MAX say what the library is to do.
    """
    global _kept
    libc = _glibc()
    if libc is None or _kept or any(name.startswith("MALLOC_") for name in os.environ):
        yield
        return
    _set(libc, KEEPS)
    _kept = True
    try:
        yield
    finally:
        _kept = False
        _set(libc, AS_USUAL)
        libc.malloc_trim(0)


def give_back() -> None:
    """Return to the system what is kept and not in use."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _set(libc: Any, values: dict[int, int]) -> None:
    for parameter, value in values.items():
        libc.mallopt(parameter, value)


@cache
def _glibc() -> Any:
    """The C library of this process, if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        return libc if all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")) else None
    except (OSError, TypeError):  # TypeError: Windows, where a process has no library without a name
        return None
