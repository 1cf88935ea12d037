"""Products of float32 matrices on devices that round what is multiplied, and sum up in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def rounds_products(device: torch.device) -> bool:
    """Whether products of float32 matrices on `device` are not formed in float32 at present: in TF32."""
    matmul: Any = torch.backends.cuda.matmul
    rounded = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return device.type == "cuda" and bool(rounded)


def centred(x: Tensor, mean: Tensor, root: Tensor | None = None) -> Tensor:
    """(x - μ) √w of the rows of x [n, d], as `product` takes it fastest: in bfloat16, where products are rounded anyway
    and sums can stay in float32.

    TF32 rounds what is multiplied to ten bits behind the point and bfloat16 to seven. Of what is rounded each way in
    turn little is left in a Gram matrix of n vectors, some 2⁻⁸ / √n; where many are equal, as what GELU and ReLU make
    of negative ones, they are rounded alike, and variances are off by up to 1e-4 and 7e-4 of themselves.
    """
    if not (x.dtype == torch.float32 and rounds_products(x.device) and keeps_sums(x.device)):
        return x - mean if root is None else (x - mean).mul_(root[:, None])
    x, mean, rounded = x.detach(), mean.detach(), torch.empty_like(x, dtype=torch.bfloat16)
    if root is None:
        return torch.sub(x, mean, out=rounded)
    return torch.mul(x - mean, root.detach()[:, None], out=rounded)


def product(a: Tensor, b: Tensor) -> Tensor:
    """ab, in float32 for bfloat16 where the device can, and in their dtype otherwise."""
    return _summed(a, b) if a.dtype == torch.bfloat16 and keeps_sums(a.device) else a @ b


def _summed(a: Tensor, b: Tensor) -> Tensor:
    summed: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return summed


@cache
def keeps_sums(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices on `device` can be had in float32: by CUDA, since PyTorch 2.8."""
    x = torch.ones(32, 16, dtype=torch.bfloat16, device=device)
    try:
        return _summed(x[:, :8].T, x).dtype == torch.float32
    except torch.OutOfMemoryError:  # which says nothing of it
        raise
    except (TypeError, RuntimeError):
        return False
