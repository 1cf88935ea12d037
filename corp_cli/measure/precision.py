"""Passes below float32: mixed precision by torch.autocast, or the products alone; the weights are as they are."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F

from corp_cli.errors import CorpError

_SEARCHES: ContextVar[bool] = ContextVar("searches", default=False)  # see `searches_in_bfloat16`


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
def products(precision: str, device: torch.device, exact: bool = True) -> Iterator[None]:
    """Within it, products of float32 matrices on a GPU are formed in `precision`, and summed up in float32.

    tf32 rounds what is multiplied to ten bits behind the point, as bfloat16 does to seven. On a CPU they are formed by
    oneDNN, where that keeps float32; `exact`: a search for steps there too, see `searches_in_bfloat16`.
    """
    matmul: Any = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")  # since torch 2.9, where the older switch fails once this one was used
    name, rounds = "fp32_precision" if newer else "allow_tf32", precision == "tf32"
    before = _SEARCHES.set(not exact)
    try:
        with switched(matmul, name, ("tf32" if rounds else "ieee") if newer else rounds), by_onednn(device):
            yield
    finally:
        _SEARCHES.reset(before)


def searches_in_bfloat16() -> bool:
    """Whether a CPU may at present round what only a search needs, see `products`, and is faster for it."""
    return _SEARCHES.get() and bfloat16_is_faster()


@cache
def bfloat16_is_faster() -> bool:
    """Whether this processor multiplies matrices of bfloat16 in less than 3/4 of the time of float32.

    It is timed: with units for bfloat16 it takes half of the time or less, and many times as long without, or where
    oneDNN is kept from using them.
    """
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, seconds = torch.ones(512, 512, dtype=dtype, device="cpu"), []
        for _ in range(4):
            start = time.perf_counter()
            _ = x @ x
            seconds.append(time.perf_counter() - start)
        best[dtype] = min(seconds)
    return best[torch.bfloat16] < 0.75 * best[torch.float32]


@contextmanager
def switched(settings: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, an attribute of `settings` is `value`."""
    before, backends = getattr(settings, name), cast(Any, torch.backends)
    if name == "fp32_precision" and before == backends.fp32_precision:  # follows that, and shall go on to do so
        before = "none"
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


def by_onednn(device: torch.device) -> AbstractContextManager[None]:
    """Within it, oneDNN multiplies float32 matrices if `device` is a CPU, in place of BLAS, where that is exact.

    PyTorch asks it only where it may round to bfloat16, which it does where the processor has units for that alone
    (AMX). On others it is exact, and on AMD's twice as fast as MKL, which PyTorch takes by itself.
    """
    return asking_onednn() if device.type == "cpu" and onednn_is_exact() else nullcontext()


def asking_onednn() -> AbstractContextManager[None]:
    """Within it, PyTorch asks oneDNN."""
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    return nullcontext() if settings is None else switched(settings, "fp32_precision", "bf16")


@cache
def onednn_is_exact() -> bool:
    """Whether products by oneDNN are in float32 on this processor, as one shows that bfloat16 would get wrong."""
    x = torch.rand(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    with asking_onednn(), torch.autocast("cpu", enabled=False):
        found = x @ x
    exact = x.double() @ x.double()
    return bool((found - exact).norm() < 1e-5 * exact.norm())
