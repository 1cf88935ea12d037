"""Freed memory that is kept: the second tensor of a size costs no page, and all is as usual afterwards."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from corp_cli.runtime.heap import _glibc, freed_memory_kept, give_back
from corp_cli.runtime.memory import release

BYTES = 2**27
PAGES = BYTES // resource.getpagesize()
GLIBC = pytest.mark.skipif(_glibc() is None, reason="the C library is not glibc")


def pages_of_a_tensor() -> int:
    """How many pages the system has to clear for a tensor that is written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(BYTES // 4).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@GLIBC
def test_memory_is_cleared_once_and_given_back() -> None:
    """In a process of its own, whose heap nobody else has touched."""
    code = (
        "from tests.runtime.test_heap import PAGES, pages_of_a_tensor\n"
        "from corp_cli.runtime.heap import freed_memory_kept\n"
        "usual = [pages_of_a_tensor() for _ in range(3)]\n"
        "with freed_memory_kept():\n"
        "    pages_of_a_tensor()\n"
        "    with freed_memory_kept():\n"
        "        kept = [pages_of_a_tensor() for _ in range(3)]\n"
        "    kept.append(pages_of_a_tensor())\n"
        "after = [pages_of_a_tensor() for _ in range(3)]\n"
        "print(min(usual) / PAGES, max(kept) / PAGES, min(after) / PAGES)\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    usual, kept, after = map(float, done.stdout.split())
    # where the system hands out huge pages by itself there is little to clear as usual either
    assert kept < 0.01
    assert (after > 0.5) == (usual > 0.5)


def test_what_the_library_was_told_by_the_user_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setattr("corp_cli.runtime.heap._set", lambda libc, values: pytest.fail("the settings were changed"))
    with freed_memory_kept():
        release()


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp_cli.runtime.heap._glibc", lambda: None)
    with freed_memory_kept():
        give_back()


@GLIBC
def test_an_error_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    asked: list[dict[int, int]] = []
    monkeypatch.setattr("corp_cli.runtime.heap._set", lambda libc, values: asked.append(values))
    with pytest.raises(ValueError, match="inside"), freed_memory_kept():
        raise ValueError("inside")
    assert [values[-4] for values in asked] == [0, 65536]
