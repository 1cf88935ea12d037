"""What the benchmarks of calibration work on: a model, images, and the flags that choose them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.config.prune import ModelConfig
from corp_cli.images.batches import Transform, batches, choose, resolve_device
from corp_cli.images.sources import ImageSet, read_images
from corp_cli.method.calibrate import Calibration
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import load_dense
from corp_cli.prepare.batches import Scale, preparation


@dataclass(frozen=True)
class Setup:
    """The dense model on its device, and how its images are read."""

    device: torch.device
    model: nn.Module
    groups: frozenset[str]
    images: ImageSet
    transform: Transform | None
    scaled: Scale
    batch_size: int
    workers: int | None

    def decoded(self) -> Iterator[Tensor]:
        """Batches of pixels, on the host, as `corp prune` reads them; `scaled` makes of them what the model takes."""
        for pixels, _ in batches(self.images, self.transform, self.batch_size, self.workers):
            yield pixels

    def calibration(self) -> Calibration:
        """Statistics of nothing yet."""
        return Calibration(self.model, blocks_of(self.model), self.groups)


def set_up(about: str | None) -> Setup:
    """What the command line asks for; `about` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="a timm or bundled name (%(default)s)")
    parser.add_argument("--checkpoint", help="weights; random ones without it")
    parser.add_argument("--images", type=Path, required=True, help="a folder of images")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, help="that decode images; as `corp prune` without it")
    parser.add_argument("--groups", nargs="+", default=["mlp", "qk"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = resolve_device(args.device)
    model, spec = load_dense(ModelConfig(args.model, pretrained=False, checkpoint=args.checkpoint))
    images, _ = choose(read_images(args.images, "--images"), args.num_images, seed=0)
    return Setup(
        device,
        model.to(device),
        frozenset(args.groups),
        images,
        *preparation(images, spec),
        args.batch_size,
        args.workers,
    )
