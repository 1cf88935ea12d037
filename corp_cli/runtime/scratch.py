"""Where streams wait while another block is at work: on the host, or in files that nobody sees."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from corp_cli.errors import CorpError

Keep = Callable[[Tensor], Tensor]  # a tensor of the device → the same, where it may wait


def keeper(folder: str | None, device: torch.device, room: bool) -> Keep:
    """What keeps tensors in `folder`, or else on `device` if that has `room`, or else on the host."""
    if folder is None:
        return on_device if room else on_pinned_host if device.type == "cuda" else on_host
    place = Path(folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        on_disk(place, torch.zeros(1))
    except OSError as error:
        raise _cannot(place, error) from error
    return partial(on_disk, place)


def on_device(tensor: Tensor) -> Tensor:
    """Where it is: the host is many times slower to reach than a block is to run."""
    return tensor


def on_host(tensor: Tensor) -> Tensor:
    """In ordinary memory."""
    return tensor.cpu()


def on_pinned_host(tensor: Tensor) -> Tensor:
    """In memory of fixed place, which a GPU reads fast."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def on_disk(folder: Path, tensor: Tensor) -> Tensor:
    """In a file of `folder`, mapped into memory. It has no name, so that it is gone with the tensor, or the process.

    Raises CorpError where the disk is full.
    """
    content = tensor.detach().cpu().contiguous()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content.flatten().view(torch.uint8).numpy().data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable; nobody writes
    except OSError as error:
        raise _cannot(folder, error) from error
    return torch.frombuffer(mapped, dtype=content.dtype).view(content.shape)


def _cannot(folder: Path, error: OSError) -> CorpError:
    why = error.strerror or str(error)
    return CorpError(f"calibration.scratch={folder} cannot be written ({why}); make room, or choose another folder.")
