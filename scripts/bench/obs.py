"""Seconds of OBS for a layer of random weights and correlated inputs, removing half of its channels, and all of them.

    python scripts/bench/obs.py --channels 3072 --device cpu

Prints the inverse of the covariance alone too, and by how much the error of choosing in groups exceeds that of choosing
one channel at a time among all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from corp_cli.linalg import obs
from corp_cli.linalg.moments import Moments
from corp_cli.measure.timing import synchronize

T = TypeVar("T")


def layer(channels: int, device: torch.device) -> tuple[torch.Tensor, Moments]:
    """fc2 [channels/4, channels] and the moments of what it reads: GELUs of mixtures of a quarter as many factors."""
    generator = torch.Generator().manual_seed(0)
    factors, count = channels // 4, 4 * channels

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    mixed = normal(count, factors) @ normal(factors, channels) / factors**0.5 + 0.3 * normal(count, channels)
    hidden = torch.nn.functional.gelu(mixed)
    centred = hidden - hidden.mean(0)
    return normal(factors, channels), Moments(count, hidden.mean(0), centred.T @ centred / count)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """(the lesser of two times, the result)."""
    seconds = []
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        result = work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def main() -> None:
    """Print the times and the extra error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=3072)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device, half = torch.device(given.device), given.channels // 2
    weight, moments = layer(given.channels, device)
    print(f"{given.channels} channels, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    alone, _ = timed(device, lambda: obs.inverse(moments, 0.1))
    part, found = timed(device, lambda: obs.removal_order(weight, moments, 0.1, half))
    whole, _ = timed(device, lambda: obs.removal_order(weight, moments, 0.1))
    print(f"inverse {alone:.2f} s, half of the channels {part:.2f} s, all of them {whole:.2f} s")
    obs.CANDIDATES = given.channels
    obs.captured.cache_clear()
    plain = obs.removal_order(weight, moments, 0.1, half)
    same = float((found.order == plain.order).double().mean())
    print(f"error {100 * float(found.error[-1] / plain.error[-1] - 1):+.4f}%, {100 * same:.1f}% of the order the same")


if __name__ == "__main__":
    main()
