"""Statistics by several processes against one: synthetic images, so that nothing is decoded.

    torchrun --nproc-per-node=2 scripts/bench/ranks.py                          # 8192 images, DeiT-III Large
    torchrun --nproc-per-node=2 scripts/bench/ranks.py --model vit_digits --num-images 2048 --device cpu

The first process does all images while the others wait, then all do their parts and pool what they found, in turns.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn

from corp_cli.config.prune import ModelConfig
from corp_cli.images.batches import resolve_device
from corp_cli.measure.precision import products, settled_precision
from corp_cli.measure.timing import synchronize
from corp_cli.method.calibrate import calibrate
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import load_dense
from corp_cli.runtime import ranks

GROUPS = frozenset({"mlp", "qk", "vo"})


def seconds(model: nn.Module, pixels: Tensor, images: int) -> float:
    """How long the slowest process takes for the statistics of its part of so many images, `pixels` over and over."""
    own, blocks = len(ranks.part(images)), blocks_of(model)
    synchronize(pixels.device)
    ranks.gathered(None)  # all begin at once
    start = time.perf_counter()
    calibrate(model, blocks, (pixels[: own - done] for done in range(0, own, len(pixels))), GROUPS)
    synchronize(pixels.device)
    return max(ranks.gathered(time.perf_counter() - start))


def alone(model: nn.Module, pixels: Tensor, images: int) -> float:
    """The same by this process, of all images."""
    with ranks.alone():
        return seconds(model, pixels, images)


def main() -> None:
    """Print both times, each with the least and the most, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit3_large_patch16_224", help="a timm or bundled name (%(default)s)")
    parser.add_argument("--num-images", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    ranks.start()
    device = resolve_device(args.device)
    model, spec = load_dense(ModelConfig(args.model, pretrained=False))
    model.to(device)
    pixels = torch.randn(args.batch_size, *spec.data["input_size"], device=device)
    precision = settled_precision(device, "auto")
    found: dict[str, list[float]] = {"one process alone": [], f"{ranks.count()} together": []}
    with products(precision, device):
        seconds(model, pixels, ranks.count() * args.batch_size)  # warm up
        for _ in range(args.repeats):
            each = ranks.once(alone, model, pixels, args.num_images), seconds(model, pixels, args.num_images)
            for times, taken in zip(found.values(), each, strict=True):
                times.append(taken)
    if ranks.leads():
        threads = f"{precision}, {torch.get_num_threads()} threads a process"
        print(f"{args.model}, {args.num_images} images in batches of {args.batch_size}, {device}, {threads}")
        for name, times in found.items():
            print(f"{name}: {median(times):.2f} s, from {min(times):.2f} to {max(times):.2f}")
        one, several = map(median, found.values())
        print(f"{one / several:.2f} times as fast")
    ranks.stop()


if __name__ == "__main__":
    main()
