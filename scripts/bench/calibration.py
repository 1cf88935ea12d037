"""Cost of calibration: the plain forward pass of the dense model against the same pass with statistics.

    python scripts/bench/calibration.py --checkpoint deit_tiny.safetensors --images imgs/ --num-images 1000

`statistics` are what ranking and closed forms need; `weighted` has logits weighted by attention too, and token weights,
as the default recipe has them in one shot. Images are decoded once, before anything is timed. The passes take turns
over the same batches, in the same precision, so that a machine whose speed drifts slows all. Of every pass: the median
batch, and in brackets where four of five batches lie.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from setting import set_up
from torch import Tensor

from corp_cli.config.prune import CompensationConfig
from corp_cli.measure.precision import products, settled_precision
from corp_cli.measure.timing import synchronize
from corp_cli.method.calibrate import Calibration
from corp_cli.method.stream import rollout_of
from corp_cli.models.adapter import blocks_of


@torch.inference_mode()
def main() -> None:
    """Print what each pass takes, and how many times the plain one."""
    setup = set_up(__doc__)
    device, model, blocks = setup.device, setup.model, blocks_of(setup.model)
    plain, weighted = (Calibration(model, blocks, setup.groups, weighs) for weighs in (False, True))
    rollout = rollout_of(model, CompensationConfig())

    def with_maps(batch: Tensor) -> None:
        with rollout.watching(model, blocks) if rollout else nullcontext():
            weighted.add(batch)

    passes: dict[str, Callable[[Tensor], object]] = {"forward": model, "statistics": plain.add, "weighted": with_maps}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    precision = settled_precision(device, "auto")
    with products(precision, device):
        for i, batch in enumerate(setup.scaled(pixels.to(device)) for pixels in list(setup.decoded())):
            for name, step in passes.items():
                synchronize(device)
                start = time.perf_counter()
                step(batch)
                synchronize(device)
                if i > 0:  # to warm up
                    seconds[name].append(time.perf_counter() - start)
    print(f"{len(setup.images)} images, batches of {setup.batch_size}, {device}, {precision}")
    middle = torch.tensor(seconds["forward"]).median()
    for name, found in seconds.items():
        low, half, high = (1e3 * torch.tensor(found).quantile(torch.tensor([0.1, 0.5, 0.9]))).tolist()
        print(f"{name:10} {half:7.1f} ms ({low:.1f} to {high:.1f}), x{half / 1e3 / middle:.2f}")


if __name__ == "__main__":
    main()
