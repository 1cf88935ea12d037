"""Images that a program holds, prepared for its model: a tensor, or what gives batches, such as a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.images.sources import ImageSet

MOST_BYTES = 2**33  # of images that are kept: about 14000 at 224 x 224
GIVE = "give a tensor [N, C, H, W], or a DataLoader or other iterable of batches [B, C, H, W] or (images, labels)"


def held_images(images: Any, key: str, size: list[int], classes: int, limit: int | None) -> ImageSet:
    """The images of a tensor [N, C, H, W], or the first `limit` or more of batches [B, C, H, W], in float32 on the CPU.

    size: C, H, W of the model. Batches may be pairs of images and labels [B], class indices below `classes` (0: of any
    size), -1 where unknown. Batches are copied and read once, a tensor is not copied where it need not be. Raises
    CorpError, naming the argument `key`, for anything else, for no images at all, and for values that are not finite.
    """
    source = f"the {type(images).__name__} given as {key}"
    if isinstance(images, Tensor):
        pixels = _checked(images.detach().to("cpu", torch.float32), images.dtype, key, size)
        if len(pixels) == 0:
            raise CorpError(f"{key} holds no images; {GIVE}.")
        return ImageSet(source, tuple(pixels), ("",) * len(pixels), prepared=True)
    if not isinstance(images, Iterable) or isinstance(images, dict | str | bytes):
        raise CorpError(f"{key} is a {type(images).__name__}; {GIVE}.")
    items: list[Tensor] = []
    labels: list[int] = []
    labelled = False
    for number, batch in enumerate(images, 1):
        where = f"batch {number} of {key}"
        pixels, classed = _split(batch, where)
        copy = pixels.detach().to("cpu", torch.float32, copy=True)  # whoever gives batches may use their memory again
        items += _checked(copy, pixels.dtype, where, size)
        labels += [-1] * len(pixels) if classed is None else _labels(classed, len(pixels), classes, where)
        labelled = labelled or classed is not None
        if items and len(items) * items[0].nbytes > MOST_BYTES:
            raise CorpError(
                f"{key} has given {len(items)} images, more than the {MOST_BYTES / 2**30:.0f} GiB that are kept in "
                "memory; give fewer, or judge the saved model by corp evaluate, which keeps none."
            )
        if limit is not None and len(items) >= limit:
            break
    if not items:
        raise CorpError(f"{key} gives no images; a generator gives its own only once, so make a new one, or {GIVE}.")
    return ImageSet(source, tuple(items), ("",) * len(items), tuple(labels) if labelled else None, prepared=True)


def _split(batch: Any, where: str) -> tuple[Tensor, Any]:
    """(images, labels or None) of one batch."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        return batch[0], batch[1] if len(batch) > 1 else None
    raise CorpError(f"{where} is a {type(batch).__name__}; {GIVE}.")


def _checked(pixels: Tensor, dtype: torch.dtype, where: str, size: list[int]) -> Tensor:
    """`pixels`, which were of `dtype`, where they are finite floats [B, *size]."""
    if pixels.ndim != 4 or list(pixels.shape[1:]) != size:
        one = " of one image" if list(pixels.shape) == size else ""
        raise CorpError(
            f"{where} has the shape {list(pixels.shape)}{one}, and the model takes batches {['B', *size]}; prepare the "
            "images for it, or build it for their size.".replace("'", "")
        )
    if not dtype.is_floating_point:
        raise CorpError(f"{where} holds {dtype} values; give floats, scaled and normalised as the model wants them.")
    if not bool(pixels.isfinite().all()):
        raise CorpError(f"{where} holds NaN or infinite values; leave such images out.")
    return pixels


def _labels(given: Any, count: int, classes: int, where: str) -> list[int]:
    """The class index of every image of a batch."""
    found = torch.as_tensor(given) if isinstance(given, list | tuple) else given
    whole = isinstance(found, Tensor) and not found.is_floating_point() and found.dtype != torch.bool
    if not whole or found.shape != (count,):
        shape = list(found.shape) if isinstance(found, Tensor) else type(given).__name__
        raise CorpError(
            f"{where} has labels of {shape} for {count} images; give one class index each, or the images alone."
        )
    indices = [int(label) for label in found]
    wrong = next((label for label in indices if label < -1 or 0 < classes <= label), None)
    if wrong is not None:
        raise CorpError(f"{where} has the label {wrong}, and the model has {classes} classes; give the images alone.")
    return indices
