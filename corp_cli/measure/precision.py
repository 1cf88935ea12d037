"""Forward passes below float32: mixed precision by torch.autocast, the weights as they are."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

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
