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
SHARDS = f"pruned-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"  # of one that is too large for one file
REPORT, PLAN, PAGE = "report.json", "plan.yaml", "report.html"
STATE = ".resume"  # in the output folder of corp prune until it is done: what an interrupted run goes on from
PARTIAL = ".partial"
MARGIN = 2**20  # for the report and Hydra's own files


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A file to write, in a new folder beside `path`: it becomes `path` after the body, or goes where that fails.

    In a folder, since what writes the file may make others beside it.
    """
    folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")  # runs may write side by side
    try:
        folder.mkdir()
        yield folder / path.name
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_partial(folder: Path, name: str = "*") -> None:
    """Remove what a run that was killed had begun to write of `name`: for who knows that no other run is at it."""
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 32}{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def clear_results(folder: Path) -> None:
    """Remove what an earlier run has written into `folder`, so that what is in it is always of one run."""
    report = folder / REPORT
    exported: list[Any] = []
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        exported = [Path(entry["file"]) for entry in json.loads(report.read_text("utf-8"))["export"]]
    names = [path.name for path in exported if path.name == str(path)]
    data = [f"{name}.data" for name in names]  # beside an ONNX file that is too large for one
    try:
        shards = [f"{CHECKPOINT}.index.json", *(path.name for path in folder.glob(SHARDS))]
        for name in (*names, *data, *shards, CHECKPOINT, PLAN, PAGE, REPORT):  # the report last: it names the others
            if (folder / name).is_file():
                (folder / name).unlink()
    except OSError as error:
        raise CorpError(cannot_write(folder / name, error)) from error


def write_whole(path: Path, write: Callable[[TextIO], Any], key: str = "hydra.run.dir") -> None:
    """Let `write` fill the text file `path`, which appears only when whole.

    Raises CorpError, naming the `key` that sets the folder, if that fails.
    """
    try:
        with appearing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            write(file)
    except OSError as error:
        raise CorpError(cannot_write(path, error, key)) from error


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
