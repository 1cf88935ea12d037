"""Forward passes on the clock: synchronised, warmed up, the models taking turns."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn

from corp_cli.measure.precision import autocast

WARM_UP = 1  # turns that are not counted
ENOUGH = 2  # seconds of timing, for a figure beside others


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.inference_mode()
def pass_seconds(
    models: dict[str, nn.Module], images: Tensor, repeats: int, max_seconds: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of every forward pass on `images` by model name, in turns: a machine whose speed drifts slows all alike.

    Stops after `repeats` turns, or sooner once `max_seconds` are over and three turns are counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    begin = time.perf_counter()
    for turn in range(repeats + WARM_UP):
        for name, model in models.items():
            synchronize(images.device)
            start = time.perf_counter()
            model(images)
            synchronize(images.device)
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
        if turn >= WARM_UP + 2 and time.perf_counter() - begin > max_seconds:
            break
    return seconds


def throughput(
    models: dict[str, nn.Module], images: Tensor, repeats: int, precision: str = "float32"
) -> dict[str, float]:
    """Images per second of every model in `precision`: the median over `repeats` passes, or those of `ENOUGH` time."""
    with autocast(images.device, precision):
        seconds = pass_seconds(models, images, repeats, ENOUGH)
    return {name: len(images) / median(times) for name, times in seconds.items()}
