"""Kept files, which vouch for themselves: safetensors whose head says of what kind and for which key they are, with a
checksum over all of it. Whatever does not match is not used: measured anew, and said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.files.tensors import save_whole
from corp_cli.runtime import console

FORMAT = "corp-kept"
VERSION = 1
NOT_OURS = "is not a whole file of corp's"
Key = Mapping[str, str]  # what the content depends on, by name


@dataclass(frozen=True)
class Kept:
    """What a kept file holds."""

    key: Key
    content: dict[str, Any]  # of JSON types
    tensors: dict[str, Tensor]


class ForeignError(CorpError):
    """The file is not one that corp keeps."""


class DamagedError(CorpError):
    """The file is one that corp keeps, and not whole, not as it was written, or of another version or kind."""


def checksum(head: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the `head` and the names, dtypes, shapes and bytes of contiguous CPU `tensors`, in order of name."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def write_kept(path: Path, kind: str, kept: Kept) -> None:
    """Write `path`, which appears only when whole. Raises CorpError where it cannot be written."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.tensors.items()}
    head = {"kind": kind, "version": VERSION, "key": dict(kept.key), "content": kept.content}
    text = json.dumps({**head, "checksum": checksum(head, tensors)}, sort_keys=True)
    try:
        save_whole(tensors, path, FORMAT, text)
    except (OSError, SafetensorError) as error:
        raise CorpError(f"{path} cannot be written ({error}); check space and permissions.") from error


def read_kept(path: Path, kind: str) -> Kept:
    """What is kept in `path`, whole and unchanged. Raises ForeignError or DamagedError, which say how it is not."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(FORMAT)
            if text is None:
                raise ForeignError(NOT_OURS)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ForeignError(NOT_OURS) from error
    try:
        head = json.loads(text)
        written = head.pop("checksum")
        if (head["kind"], head["version"]) != (kind, VERSION):
            raise DamagedError("was kept by another version of corp")
        if checksum(head, tensors) != written:
            raise DamagedError("was changed after it was written")
        return Kept(head["key"], head["content"], tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("was changed after it was written") from error


def kept_of_block(path: Path, kind: str, key: Key, block: str | int, instead: str) -> Kept | None:
    """What is kept in `path` of a block; None where it is not: if it was there, a warning says why, and `instead`."""
    if not path.exists():
        return None
    try:
        kept = read_kept(path, kind)
        if kept.key != key or kept.content["block"] != block:
            raise DamagedError("belongs to another run")
        return kept
    except CorpError as error:
        console.warn(f"{path} {error}; {instead}.")
        return None
