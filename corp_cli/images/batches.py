"""Images in batches: chosen with a seed, decoded and preprocessed in workers, the broken ones left out and counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from corp_cli.errors import CorpError
from corp_cli.images.decode import from_tensor
from corp_cli.images.sources import ImageSet, Sample
from corp_cli.runtime import console

PREFETCH = 4  # batches that every worker may have ready: evens out images that are slow to decode


@dataclass
class Intake:
    """What came of reading images: how many were good, and why the others were not. Filled by `batches`.

    More than `allowed` bad images raise CorpError, which names `where` they are and the `key` of the limit.
    """

    where: str
    key: str
    allowed: int
    good: int = 0
    bad: list[str] = field(default_factory=list)  # one sentence each

    def restart(self) -> None:
        """Forget what was read, before reading anew."""
        self.good, self.bad = 0, []

    def take(self, good: int, bad: list[str]) -> None:
        """Count one more batch."""
        self.good += good
        self.bad += bad
        if len(self.bad) > self.allowed:
            seen = self.good + len(self.bad)
            raise CorpError(
                f"{self.where} holds images that cannot be read, {len(self.bad)} of the first {seen}, first "
                f"{self.bad[0]}; remove them, or allow a larger fraction with {self.key}."
            )


def require_good(intake: Intake) -> None:
    """Say how many images could not be read. Raises CorpError when that was all of them."""
    if intake.good == 0:
        raise CorpError(f"{intake.where} holds no image that can be read, first {intake.bad[0]}; give other images.")
    warn_unread(intake)


def warn_unread(intake: Intake) -> None:
    """Say how many images could not be read, if any."""
    if intake.bad:
        total = intake.good + len(intake.bad)
        console.warn(f"{len(intake.bad)} of {total} images of {intake.where} cannot be read, first {intake.bad[0]}.")


def choose(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """(chosen, rest): `count` images drawn with `seed`, spread evenly over sub-folders; all where there are fewer."""
    generator = random.Random(seed)
    by_folder: dict[str, list[int]] = {}
    for index, folder in enumerate(images.folders):
        by_folder.setdefault(folder, []).append(index)
    queues = list(by_folder.values())
    for queue in queues:
        generator.shuffle(queue)
    generator.shuffle(queues)
    rounds = range(max(map(len, queues), default=0))
    order = [queue[r] for r in rounds for queue in queues if r < len(queue)]
    return images.subset(sorted(order[:count])), images.subset(sorted(order[count:]))


@dataclass(frozen=True)
class _Read:
    """One preprocessed image with its class(es)."""

    image: Tensor
    label: int | tuple[int, ...]


class _Preprocessed(Dataset[_Read | str]):
    """Preprocessed images with their labels; for an image that cannot be read, a sentence that says so.

    An exception raised in a worker would reach the user wrapped in that worker's traceback.
    """

    def __init__(self, images: ImageSet, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> _Read | str:
        item = self.images.items[index]
        try:
            image, own = _open(item)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's readers have no common ancestor for their errors
            why = str(error).split("\n")[0] or type(error).__name__
            return f"{item} ({why})"
        label = own if self.images.labels is None else self.images.labels[index]
        return _Read(self.transform(image), label)


def _open(item: Path | Tensor | Sample) -> tuple[Image.Image, int]:
    """The decoded image and the class that came with it, -1 where none did."""
    if isinstance(item, Tensor):
        return from_tensor(item), -1
    if isinstance(item, Sample):
        image, label = item.reader.read(item.index)
        image.load()
        return image, label
    with Image.open(item) as file:
        file.load()
        return file, -1


Batch = tuple[Tensor | None, Tensor, list[str]]  # images, labels, what is wrong with the others


def _collate(samples: list[_Read | str]) -> Batch:
    read = [sample for sample in samples if not isinstance(sample, str)]
    images = torch.stack([sample.image for sample in read]) if read else None
    return images, torch.tensor([sample.label for sample in read]), [s for s in samples if isinstance(s, str)]


def batches(
    images: ImageSet,
    transform: Callable[[Image.Image], Tensor],
    batch_size: int,
    num_workers: int,
    pin_memory: bool = False,
    intake: Intake | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ([B, C, H, W], labels), in the order of `images`, decoded in workers.

    labels are [B], -1 where unknown, or [B, L] where an image has several right classes, filled up with -1.
    Images that cannot be read are left out, so that a batch may be smaller, and put down in `intake`; without one,
    and where there are more than it allows, they raise CorpError.
    """
    if len(images) == 0:
        return
    first = images.items[0]
    alone = isinstance(first, Tensor) or (isinstance(first, Sample) and first.reader.in_order)
    workers = 0 if alone else min(num_workers, batch_count(images, batch_size))
    loader = DataLoader(
        _Preprocessed(images, transform),
        batch_size,
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        collate_fn=_collate,
        pin_memory=pin_memory,
    )
    for tensors, labels, bad in loader:
        if intake is not None:
            intake.take(len(labels), bad)
        elif bad:
            raise CorpError(f"{bad[0]} cannot be read as an image; remove or replace it.")
        if tensors is not None:
            yield tensors, labels


def batch_count(images: ImageSet, batch_size: int) -> int:
    """How many batches `batches` gives, but for those without a good image."""
    return -(-len(images) // batch_size)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU. Raises CorpError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CorpError(f"device={name} is not a device; use auto, cpu, cuda, cuda:1 or mps.") from error
    there = device.type == "cpu"
    if device.type == "cuda":
        there = (device.index or 0) < torch.cuda.device_count()
    elif device.type == "mps":
        there = torch.backends.mps.is_available()
    if not there:
        raise CorpError(f"device={name} is not available on this machine; use device=auto or device=cpu.")
    return device
