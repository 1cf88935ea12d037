"""Statistics kept in a file for later runs: safetensors, never a pickle, under a key of all that they depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from corp_cli.files.kept import Kept, Key, read_kept, write_kept
from corp_cli.method.statistics import BlockStatistics, Statistics

KIND = "statistics"


@dataclass(frozen=True)
class Measured:
    """The content of a cache file."""

    key: Key
    statistics: Statistics
    good: int  # images measured on
    bad: list[str]  # those that could not be read


def write_statistics(measured: Measured, path: Path) -> None:
    """Write `path`, which appears only when whole. Raises CorpError if it cannot be written."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, block in enumerate(measured.statistics):
        for name, value in _flat(block, f"{index}."):
            (tensors if isinstance(value, Tensor) else scalars)[name] = value
    content = {
        "blocks": len(measured.statistics),
        "scalars": scalars,
        "good": measured.good,
        "bad": measured.bad,
    }
    write_kept(path, KIND, Kept(measured.key, content, tensors))


def read_statistics(path: Path, device: torch.device) -> Measured:
    """What is kept in `path`, its tensors on `device`. Raises ForeignError or DamagedError for anything else."""
    kept = read_kept(path, KIND)
    content = kept.content
    values: dict[str, Any] = {name: tensor.to(device) for name, tensor in kept.tensors.items()} | content["scalars"]
    blocks = range(content["blocks"])
    statistics = tuple(_built(BlockStatistics, values, f"{index}.") for index in blocks)
    return Measured(kept.key, statistics, content["good"], content["bad"])


# --- dataclasses of tensors, numbers and further dataclasses, as flat names ------------------------------------


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(value):
        item = getattr(value, field.name)
        if is_dataclass(item):
            yield from _flat(item, f"{prefix}{field.name}.")
        elif isinstance(item, Tensor | int | float | str):
            yield f"{prefix}{field.name}", item
        elif item is not None:
            raise TypeError(f"{type(value).__name__}.{field.name} is a {type(item).__name__}, which cannot be kept")


def _hints(kind: Any) -> Iterator[tuple[str, Any]]:
    """(name, type without None) of every field."""
    for name, hint in get_type_hints(kind).items():
        kinds = [choice for choice in get_args(hint) if choice is not NoneType]
        yield name, kinds[0] if kinds else hint


def field_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of the tensors and numbers of a dataclass."""
    for name, inner in _hints(kind):
        yield from field_names(inner, f"{prefix}{name}.") if is_dataclass(inner) else (f"{prefix}{name}",)


def _built(kind: Any, values: dict[str, Any], prefix: str) -> Any:
    """A `kind` of the values under `prefix`; fields without any are left to their defaults."""
    found = {}
    for name, inner in _hints(kind):
        path = f"{prefix}{name}"
        if is_dataclass(inner):
            if any(other.startswith(f"{path}.") for other in values):
                found[name] = _built(inner, values, f"{path}.")
        elif path in values:
            found[name] = values[path]
    return kind(**found)
