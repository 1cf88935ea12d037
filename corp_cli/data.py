"""Images from a folder or from a file of tensors: chosen with a seed, preprocessed in workers, in batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from corp_cli.errors import CorpError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageSet:
    """Images in a fixed order. `items` are files, or uint8 images [H, W] or [H, W, 3] held in memory.

    `folders` holds the sub-folder of every image; `labels` its class index where known.
    """

    source: str
    items: tuple[Path | Tensor, ...]
    folders: tuple[str, ...]
    labels: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def files(self) -> set[Path]:
        """The files among the items, without links."""
        return {item.resolve() for item in self.items if isinstance(item, Path)}

    def subset(self, indices: list[int]) -> ImageSet:
        """The images at `indices`, in that order."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return ImageSet(
            self.source,
            tuple(self.items[i] for i in indices),
            tuple(self.folders[i] for i in indices),
            labels,
        )


def read_images(path: Path, key: str) -> ImageSet:
    """All images at `path`: a folder (nested or flat), or a .safetensors with `images` and perhaps `labels`.

    Raises CorpError, naming the config key, when there is nothing to read.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return _read_tensors(path)
    if not path.exists():
        raise CorpError(f"{key}={path} does not exist; give a folder of images.")
    if not path.is_dir():
        raise CorpError(f"{key}={path} is a file; give a folder of images.")
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in EXTENSIONS and f.is_file())
    if not files:
        raise CorpError(f"{key}={path} holds no images ({', '.join(EXTENSIONS)}); give a folder that does.")
    return ImageSet(str(path), tuple(files), tuple(str(f.parent.relative_to(path)) for f in files))


def _read_tensors(path: Path) -> ImageSet:
    try:
        tensors = load_file(path)
        images = tensors["images"]
    except (SafetensorError, KeyError) as error:
        raise CorpError(f"{path} does not hold a tensor named images; give a folder of images.") from error
    labels = tensors.get("labels")
    return ImageSet(
        path.name,
        tuple(images),
        ("",) * len(images),
        None if labels is None else tuple(int(label) for label in labels),
    )


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
    rounds = range(max(map(len, queues)))
    order = [queue[r] for r in rounds for queue in queues if r < len(queue)]
    return images.subset(sorted(order[:count])), images.subset(sorted(order[count:]))


def with_labels(images: ImageSet, num_classes: int, wordnet: dict[str, int]) -> ImageSet:
    """`images` with class indices read off their folders, where the folders name classes of the model.

    WordNet ids map through `wordnet`; else as many folders as the model has classes are its classes in order.
    """
    if images.labels is not None:
        return images
    names = [Path(folder).name for folder in images.folders]
    distinct = sorted(set(names))
    if all(name in wordnet for name in distinct):
        index = wordnet
    elif len(distinct) == num_classes and num_classes > 1:
        index = {name: i for i, name in enumerate(distinct)}
    else:
        return images
    return ImageSet(images.source, images.items, images.folders, tuple(index[name] for name in names))


class _Preprocessed(Dataset[tuple[Tensor, int] | str]):
    """Preprocessed images with their labels; for an image that cannot be read, a sentence that says so.

    An exception raised in a worker would reach the user wrapped in that worker's traceback.
    """

    def __init__(self, images: ImageSet, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        item = self.images.items[index]
        label = -1 if self.images.labels is None else self.images.labels[index]
        if isinstance(item, Tensor):
            return self.transform(Image.fromarray(item.numpy())), label
        try:
            with Image.open(item) as image:
                return self.transform(image), label
        except (UnidentifiedImageError, OSError, ValueError) as error:
            return f"{item} cannot be read as an image ({error}); remove or replace it."


def _collate(samples: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    read = [sample for sample in samples if not isinstance(sample, str)]
    if len(read) < len(samples):
        return next(sample for sample in samples if isinstance(sample, str))
    return torch.stack([image for image, _ in read]), torch.tensor([label for _, label in read])


def batches(
    images: ImageSet,
    transform: Callable[[Image.Image], Tensor],
    batch_size: int,
    num_workers: int,
    pin_memory: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ([B, C, H, W], labels [B], -1 where unknown), in the order of `images`, decoded in workers.

    Raises CorpError naming an image that cannot be read.
    """
    in_memory = isinstance(images.items[0], Tensor)
    loader = DataLoader(
        _Preprocessed(images, transform),
        batch_size,
        num_workers=0 if in_memory else min(num_workers, batch_count(images, batch_size)),
        collate_fn=_collate,
        pin_memory=pin_memory,
    )
    for batch in loader:
        if isinstance(batch, str):
            raise CorpError(batch)
        yield batch


def batch_count(images: ImageSet, batch_size: int) -> int:
    """How many batches `batches` gives."""
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
