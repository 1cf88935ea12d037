"""Passes below float32: mixed precision by torch.autocast, or the products alone; the weights are as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from corp_cli.errors import CorpError


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Within it, products on `device` are computed in `precision`; float32 changes nothing."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def require_precision(device: torch.device, precision: str) -> None:
    """Raise CorpError where `device` cannot compute in `precision`."""
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("error")  # torch warns, and goes on in float32
            with autocast(device, precision):
                done = F.linear(torch.ones(1, 8, device=device), torch.ones(8, 8, device=device)).dtype
        if done == getattr(torch, precision):
            return
        why = f"it computes in {str(done).removeprefix('torch.')}"
    except (RuntimeError, UserWarning) as error:
        why = str(error).strip().split("\n")[0].rstrip(".")
    raise CorpError(f"evaluation.precision={precision} is not for the device {device} ({why}); use float32.")


def settled_precision(device: torch.device, asked: str) -> str:
    """float32 or tf32: what `asked` says, and for auto the faster one that `device` has.

    Raises CorpError where it has no tf32.
    """
    has = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if asked == "tf32" and not has:
        raise CorpError(
            f"calibration.precision=tf32 is for NVIDIA GPUs since Ampere, and the device is {device}; use auto."
        )
    return "tf32" if asked != "float32" and has else "float32"


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Within it, products of float32 matrices on a GPU are formed in `precision`, and summed up in float32.

    tf32 rounds what is multiplied to ten bits behind the point, as bfloat16 does to seven.
    """
    matmul: Any = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")  # since torch 2.9, where the older switch fails once this one was used
    name = "fp32_precision" if newer else "allow_tf32"
    before, rounds = getattr(matmul, name), precision == "tf32"
    setattr(matmul, name, ("tf32" if rounds else "ieee") if newer else rounds)
    try:
        yield
    finally:
        setattr(matmul, name, before)
