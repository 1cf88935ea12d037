"""Values on their way between the processes of a run: what is small as bytes, tensors beside it as they are."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach().contiguous())
        return tuple(value.shape), value.dtype, value.device.type


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, described: Any) -> Tensor:
        shape, dtype, device = described
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]


def packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """`value` without the numbers in its tensors, and those tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def unpacked(content: bytes) -> tuple[Any, list[Tensor]]:
    """What was `packed`, by a process of the same run; its tensors are to be filled, each on this process's device."""
    unpacker = _Unpacker(io.BytesIO(content))
    return unpacker.load(), unpacker.tensors
