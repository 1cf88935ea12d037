"""What is left of a model in an exported file: logits, agreement and accuracy against the PyTorch model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.images.sources import ImageSet
from corp_cli.measure.judge import Running, running
from corp_cli.measure.results import Parity

CLOSE = 1e-3  # logits of a float32 file may differ by this much from those of PyTorch
RANDOM_IMAGES = 64


@torch.inference_mode()
def compare(
    model: nn.Module, files: dict[str, nn.Module], batches: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Running, dict[str, Parity]]:
    """(`model` itself, each of `files` against it) on images and labels, in one pass.

    Raises CorpError when outputs are not finite.
    """
    itself, metrics = running(model), {name: running(model) for name in files}
    furthest = dict.fromkeys(files, 0.0)
    for images, labels in varied(batches):
        logits = model(images)
        itself.add(logits, labels, None)
        for name, file in files.items():
            found = file(images)
            if not found.isfinite().all():
                raise CorpError(f"{name} gives NaN or infinite outputs; its number format is too narrow: use another.")
            metrics[name].add(found, labels, logits)
            furthest[name] = max(furthest[name], float((found - logits).abs().max()))
    return itself, {name: Parity(furthest[name], **vars(metrics[name].result())) for name in files}


def varied(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[Tensor, Tensor]]:
    """The same images, the first of them alone: a file that only takes the batch it was made with must not pass."""
    for i, (images, labels) in enumerate(batches):
        parts = [1, len(images) - 1] if i == 0 and len(images) > 1 else [len(images)]
        yield from zip(images.split(parts), labels.split(parts), strict=True)


def random_images(input_size: list[int], seed: int) -> ImageSet:
    """Unlabelled noise, where there are no images."""
    channels, height, width = input_size
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (RANDOM_IMAGES, height, width, channels), generator=generator, dtype=torch.uint8)
    return ImageSet("random images", tuple(pixels.squeeze(-1)), ("",) * RANDOM_IMAGES)
