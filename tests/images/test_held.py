"""Images that a program holds: every form gives the same set, and what a model cannot take is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from corp_cli.errors import CorpError
from corp_cli.images.batches import Intake, batches
from corp_cli.images.held import held_images
from corp_cli.images.sources import ImageSet

SIZE = [3, 4, 4]
PIXELS = torch.randn(10, *SIZE, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(10) % 7


def held(images: Any, limit: int | None = None, classes: int = 7) -> ImageSet:
    return held_images(images, "images", SIZE, classes, limit)


def together(images: ImageSet) -> tuple[Tensor, Tensor]:
    found = list(batches(images, None, 4, 2, intake=Intake("images", "", 0)))
    return torch.cat([pixels for pixels, _ in found]), torch.cat([labels for _, labels in found])


def reused() -> Iterator[Tensor]:
    """Batches in one piece of memory."""
    memory = torch.empty(5, *SIZE)
    for part in PIXELS.split(5):
        yield memory.copy_(part)


@pytest.mark.parametrize(
    ("images", "labelled"),
    [
        (PIXELS, False),
        (PIXELS.requires_grad_(False).double(), False),
        (list(PIXELS.split(3)), False),
        (DataLoader(PIXELS, batch_size=3), False),  # type: ignore[arg-type]
        (DataLoader(TensorDataset(PIXELS, LABELS), batch_size=3), True),
        ([(part, part_labels) for part, part_labels in zip(PIXELS.split(4), LABELS.split(4), strict=True)], True),
        ([(PIXELS, LABELS.tolist())], True),
        (iter([[PIXELS]]), False),
        (reused(), False),
        ([PIXELS.clone().requires_grad_()], False),
    ],
)
def test_every_form_gives_the_same_images(images: Any, labelled: bool) -> None:
    found = held(images)
    assert found.prepared
    assert found.labelled == labelled
    pixels, labels = together(found)
    assert torch.equal(pixels, PIXELS)
    assert labels.tolist() == (LABELS.tolist() if labelled else [-1] * 10)


def test_batches_are_read_until_there_are_enough() -> None:
    def forever() -> Iterator[Tensor]:
        while True:
            yield PIXELS[:4]

    assert len(held(forever(), limit=9)) == 12


def test_batches_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp_cli.images.held.MOST_BYTES", 100 * PIXELS[0].nbytes)
    with pytest.raises(CorpError, match=r"images has given 110 images, more than .* give fewer"):
        held(itertools.repeat(PIXELS))
    assert len(held([PIXELS] * 10)) == 100


def test_a_tensor_is_not_copied() -> None:
    first = held(PIXELS).items[0]
    assert isinstance(first, Tensor)
    assert first.data_ptr() == PIXELS.data_ptr()


def test_batches_with_and_without_labels_may_follow_each_other() -> None:
    found = held([PIXELS[:2], (PIXELS[2:3], LABELS[2:3]), (PIXELS[3:4], torch.tensor([-1]))])
    assert found.labels == (-1, -1, 2, -1)


def test_without_classes_labels_may_be_any() -> None:
    assert held([(PIXELS, LABELS + 500)], classes=0).labels == (*range(500, 507), 500, 501, 502)


exhausted = iter([PIXELS])
next(exhausted)
NAN = PIXELS.clone()
NAN[4, 0, 0, 0] = float("nan")


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([], "images gives no images"),
        (exhausted, "a generator gives its own only once, so make a new one"),
        (iter([PIXELS[:0]]), "images gives no images"),
        (PIXELS[:0], "images holds no images"),
        (torch.tensor(1.0), r"images has the shape \[\]"),
        (None, r"images is a NoneType; give a tensor \[N, C, H, W\]"),
        ({"images": PIXELS}, "images is a dict"),
        ([{"pixel_values": PIXELS}], "batch 1 of images is a dict"),
        (np.zeros((2, 3, 4, 4)), "batch 1 of images is a ndarray"),
        ([PIXELS, (LABELS.tolist(), PIXELS)], "batch 2 of images is a tuple"),
        (PIXELS[0], r"images has the shape \[3, 4, 4\] of one image, and the model takes batches \[B, 3, 4, 4\]"),
        (TensorDataset(PIXELS), "images is a TensorDataset; .* or a DataLoader"),
        (list(PIXELS), r"batch 1 of images has the shape \[3, 4, 4\] of one image"),
        (PIXELS[:, :1], r"images has the shape \[10, 1, 4, 4\], and the model takes batches \[B, 3, 4, 4\]"),
        ([PIXELS[..., :2]], r"batch 1 of images has the shape \[10, 3, 4, 2\]"),
        (PIXELS.to(torch.uint8), r"images holds torch\.uint8 values; give floats, scaled and normalised"),
        (NAN, "images holds NaN or infinite values"),
        ([PIXELS, NAN], "batch 2 of images holds NaN or infinite values"),
        ([PIXELS / 0], "batch 1 of images holds NaN or infinite values"),
        ([(PIXELS, LABELS[:3])], r"batch 1 of images has labels of \[3\] for 10 images"),
        ([(PIXELS, LABELS.float())], "one class index each, or the images alone"),
        ([(PIXELS, "cat")], "labels of str for 10 images"),
        ([(PIXELS, LABELS + 1)], "batch 1 of images has the label 7, and the model has 7 classes"),
    ],
)
def test_other_things_are_refused(images: Any, said: str) -> None:
    with pytest.raises(CorpError, match=said):
        held(images)


def test_what_a_data_set_raises_is_not_hidden() -> None:
    def broken() -> Iterator[Tensor]:
        yield PIXELS
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        held(broken())
