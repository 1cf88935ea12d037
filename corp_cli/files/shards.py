"""Checkpoints in several files, as the Hugging Face hub has them: shards, and an index that names them. No torch.

`pruned.safetensors` is then pruned-00001-of-00003.safetensors and so on beside pruned.safetensors.index.json, which is
written last and holds the manifest. Every name and length that a file from somebody else gives is checked here.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.output import write_whole

HEADER_BYTES = 2**24  # more than the names and shapes of any model take
INDEX = ".index.json"
SHARD = re.compile(r"[\w.-]+-\d{5}-of-\d{5}\.safetensors")


def index_of(path: Path) -> Path | None:
    """The index of the shards of a checkpoint, which may be named by that too; None for one that is a single file."""
    if path.name.endswith(INDEX):
        return path
    index = path.with_name(path.name + INDEX)
    return index if not path.is_file() and index.is_file() else None


def parts_of(path: Path) -> list[Path]:
    """The files that hold the tensors of a checkpoint. Raises ValueError or OSError for an index that is none."""
    index = index_of(path)
    return [path] if index is None else [index.with_name(name) for name in _shards(_index(index))]


def checkpoint_files(path: Path) -> list[Path]:
    """All files of a checkpoint, the one that makes it whole last; of one that cannot be read, those there are."""
    index = index_of(path)
    if index is None:
        return [path]
    try:
        return [part for part in parts_of(path) if part.is_file()] + [index]
    except (OSError, ValueError):
        return [index]


def copy_checkpoint(path: Path, to: Path) -> None:
    """Copy a checkpoint to the file `to`, or to shards and an index of that name."""
    index = index_of(path)
    if index is None:
        shutil.copyfile(path, to)
        return

    def renamed(shard: str) -> str:
        return f"{to.stem}{shard[-len('-00001-of-00001.safetensors') :]}"

    content = _index(index)
    for part in parts_of(path):
        shutil.copyfile(part, to.with_name(renamed(part.name)))
    content["weight_map"] = {tensor: renamed(shard) for tensor, shard in content["weight_map"].items()}
    write_whole(to.with_name(to.name + INDEX), lambda file: file.write(index_text(content)))


def index_text(content: Any) -> str:
    """The content of an index as it is written."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def read_metadata(path: Path) -> dict[str, Any]:
    """What the head of a checkpoint says besides its tensors; the lengths of its files are compared with their heads.

    Raises CorpError where it is not there, and for what is not whole.
    """
    index = index_of(path)
    if not (index or path).is_file():
        raise CorpError(f"The checkpoint {path} does not exist.")
    if index is None:
        return _metadata_of(path)[0]
    try:
        content = _index(index)
        shards, metadata = _shards(content), dict(content["metadata"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorpError(f"{index} is not the index of a checkpoint ({error}); copy or make it again.") from error
    for name, tensors in shards.items():
        shard = index.with_name(name)
        if not shard.is_file():
            raise CorpError(f"{shard} is missing, which {index.name} names; copy it to there, or make them again.")
        if _metadata_of(shard)[1] != tensors:
            raise CorpError(f"{shard} is not of the checkpoint that {index.name} describes; copy or make them again.")
    return metadata


def parsed(text: Any) -> Any:
    """JSON as Python objects, without numbers that are infinite or none."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is not a finite number")
        return value

    return json.loads(text, parse_float=finite, parse_constant=finite)


def _metadata_of(path: Path) -> tuple[dict[str, Any], set[str]]:
    """(metadata, names of tensors) in the head of a safetensors file."""
    try:
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
            if length > min(HEADER_BYTES, size - 8):
                raise ValueError("its header is cut short")
            header = parsed(file.read(length).decode())
        metadata = dict(header.pop("__metadata__", {}))
        if max((entry["data_offsets"][1] for entry in header.values()), default=0) != size - 8 - length:
            raise ValueError("its tensors are cut short")
        return metadata, set(header)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CorpError(f"{path} is not a whole safetensors file ({error}); copy or make it again.") from error


def _index(index: Path) -> Any:
    if index.stat().st_size > HEADER_BYTES:
        raise ValueError("it is too long")
    return parsed(index.read_text("utf-8"))


def _shards(content: Any) -> dict[str, set[str]]:
    """shard → names of its tensors, in order of name."""
    found: dict[str, set[str]] = {}
    for tensor, name in content["weight_map"].items():
        if not (isinstance(name, str) and SHARD.fullmatch(name)):
            raise ValueError(f"{str(name)[:80]} is not the name of a shard")
        found.setdefault(name, set()).add(tensor)
    if not found:
        raise ValueError("it names no shard")
    return dict(sorted(found.items()))
