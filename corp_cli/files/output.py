"""Files that a run writes: whole or not at all, in a folder that was tried before the long work."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from corp_cli.errors import CorpError

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT = "pruned.safetensors"
STATE = ".resume"  # in the output folder of corp prune until it is done: what an interrupted run goes on from
MARGIN = 2**20  # for the report and Hydra's own files


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A new name beside `path` to write to: it becomes `path` when the body is done, or goes where that fails."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")  # runs may write side by side
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[TextIO], Any]) -> None:
    """Let `write` fill the text file `path`, which appears only when whole. Raises CorpError if that fails."""
    try:
        with appearing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            write(file)
    except OSError as error:
        raise CorpError(cannot_write(path, error)) from error


def write_json(content: Any, path: Path) -> None:
    """Write `content` to `path` with its floats rounded."""
    text = json.dumps(rounded(content), indent=2, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text))


def rounded(value: Any) -> Any:
    """`value` with every float at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def cannot_write(path: Path, error: Exception, key: str = "hydra.run.dir") -> str:
    """The sentence for a file that cannot be written; `key` sets the folder."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path} cannot be written ({why}); check space and permissions, or set {key} to another folder."


def size_in_bytes(model: nn.Module) -> int:
    """What the state dict of `model` takes in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def require_room(folder: Path, needed: int = 0, key: str = "hydra.run.dir") -> None:
    """Raise CorpError unless files of `needed` bytes can be written to `folder`: better now than after an hour."""
    existing = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"corp")
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise CorpError(cannot_write(folder, error, key)) from error
    if free < needed + MARGIN:
        raise CorpError(
            f"{folder} has {free / 2**20:.0f} MiB left and the result takes up to {(needed + MARGIN) / 2**20:.0f} MiB; "
            f"make room, or set {key} to another folder."
        )
