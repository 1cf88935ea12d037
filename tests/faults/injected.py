"""Faults at the n-th write, replacement or new folder of a run: the process ends, or the disk is full or broken."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tests.faults.forks import KILLED, Outcome, begin

ERRORS = {"no space": errno.ENOSPC, "broken": errno.EIO, "quota": errno.EDQUOT}
WHERE = {  # what may go wrong at each place; "half" leaves half of what was to be written
    "open": ("kill", "kill half", "error", "error half"),
    "save_file": ("kill half", "error", "error half"),
    "replace": ("kill", "error"),
    "mkdir": ("kill or error",),
    "unlink": ("kill or broken",),
}


def faults(site: str, at: int) -> list[str]:
    """What goes wrong at the `at`-th call at `site`: the errors take turns."""
    kinds = list(ERRORS)
    found = ["kill" if " or " in one and at % 2 else one.replace("kill or ", "") for one in WHERE[site]]
    return [one.replace("error", kinds[(at + turn) % len(kinds)]) for turn, one in enumerate(found)]


def strike(fault: str, half: Callable[[], Any] = lambda: None, error: Callable[..., Exception] = OSError) -> None:
    """Let it go wrong."""
    what = fault.removesuffix(" half")
    if what != fault:
        half()
    if what == "kill":
        os._exit(KILLED)
    if what == "interrupt":
        raise KeyboardInterrupt
    raise error(ERRORS[what], os.strerror(ERRORS[what]))


def of_safetensors(number: int, text: str) -> SafetensorError:
    """As safetensors words it."""
    return SafetensorError(f"Error while serializing: I/O error: {text} (os error {number})")


class Torn:
    """A file that takes half of the first write."""

    def __init__(self, file: Any, fault: str) -> None:
        self.file, self.fault = file, fault

    def write(self, data: Any) -> None:
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        strike(self.fault.removesuffix(" half"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def install(folder: Path, site: str = "", at: int = 0, fault: str = "") -> Counter[str]:
    """Put counting versions in place of what writes below `folder`; the one at `site` fails at its `at`-th call."""
    calls: Counter[str] = Counter()
    inside = str(folder) + os.sep

    def due(where: str, path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not os.path.abspath(os.fspath(path)).startswith(inside):
            return False
        calls[where] += 1
        if where != site or calls[where] != at:
            return False
        kept = [path for path in folder.glob("run/.resume/*.safetensors") if not path.name.startswith(".")]
        Path(f"{folder}.kept").write_text(json.dumps([path.name for path in kept]))  # outside of it: not counted
        return True

    whole_open = io.open

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        if not writes or not due("open", file):
            return whole_open(file, mode, *args, **kwargs)
        if fault.endswith("half"):
            return Torn(whole_open(file, mode, *args, **kwargs), fault)
        if fault == "kill":
            whole_open(file, mode, *args, **kwargs)
        return strike(fault)

    builtins.open = io.open = opening

    def calling(whole: Any, where: str, path: Any, *args: Any, **kwargs: Any) -> Any:
        idle = os.path.lexists(path) == (where == "mkdir") if where != "replace" else False  # says so before it tries
        return whole(path, *args, **kwargs) if idle or not due(where, path) else strike(fault)

    for name in ("replace", "mkdir", "unlink"):
        setattr(os, name, partial(calling, getattr(os, name), name))

    from safetensors.torch import save_file

    def saving(tensors: Any, path: Any, **kwargs: Any) -> None:
        def half() -> None:
            save_file(tensors, path, **kwargs)
            os.truncate(path, os.path.getsize(path) // 2)

        if due("save_file", path):
            return strike(fault, half, OSError if "broken" in fault else of_safetensors)
        return save_file(tensors, path, **kwargs)

    for module in [module for name, module in sys.modules.items() if name.startswith("corp_cli")]:
        if hasattr(module, "save_file"):
            module.save_file = saving  # type: ignore[attr-defined]
    return calls


def counted(folder: Path, argv: list[str]) -> tuple[Outcome, dict[str, int]]:
    """(what came of `corp <argv>` in `folder`, how often it came to each place)."""
    path = Path(f"{folder}.calls")

    def count() -> None:
        calls = install(folder)
        end = os._exit

        def noting(code: int) -> None:
            path.write_text(json.dumps(calls))
            end(code)

        os._exit = noting  # type: ignore[assignment]

    outcome = begin(folder, *argv, before=count).wait()
    return outcome, json.loads(path.read_text())


def kept_at(folder: Path) -> list[str]:
    """What the run in `folder` had kept for resume when the fault struck; nothing where it never did."""
    path = Path(f"{folder}.kept")
    return json.loads(path.read_text()) if path.exists() else []
