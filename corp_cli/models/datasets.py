"""Datasets that timm knows by name (torch/, hfds/, hfids/, tfds/, wds/) as an ImageSet."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from PIL import Image
from timm.data import create_dataset

from corp_cli.errors import CorpError
from corp_cli.images.decode import FORMATS
from corp_cli.images.sources import ImageSet, Sample, expand
from corp_cli.runtime import hub

PACKAGES = {"hfds": "datasets", "hfids": "datasets", "tfds": "tensorflow-datasets", "wds": "webdataset"}
LABEL_FIELDS = ("targets", "labels", "_labels")  # where torchvision's datasets keep their classes


class Indexed:
    """A dataset with random access. Images come undecoded where timm allows it."""

    in_order = False

    def __init__(self, dataset: Any) -> None:
        self.source = getattr(dataset, "reader", dataset)  # timm's own reader would put the next image for a broken one

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Image `index` and its class, -1 where unknown."""
        image, target, *_ = self.source[index]
        opened = image if isinstance(image, Image.Image) else Image.open(image, formats=FORMATS)
        return opened, target if isinstance(target, int) else -1


class Stream:
    """A dataset that can only be read from its start; going back starts anew."""

    in_order = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.position = 0
        self.iterator: Iterator[Any] | None = None

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Image `index` and its class, -1 where unknown."""
        if self.iterator is None or index < self.position:
            self.iterator, self.position = iter(self.dataset), 0
        skipped = index - self.position
        self.position = index + 1
        image, target = next(itertools.islice(self.iterator, skipped, None))
        return image, target if isinstance(target, int) else -1


def read_dataset(
    name: str,
    root: str | None,
    split: str,
    key: str,
    limit: int | None,
    image_key: str | None = None,
    label_key: str | None = None,
) -> ImageSet:
    """The images of timm's dataset `name`; of a stream at most the first `limit`.

    image_key, label_key: the columns that hold them, where timm would look for others. Raises CorpError where the
    package that it needs is missing, the network is out of reach, or there is no such data.
    """
    prefix = name.partition("/")[0].lower()
    where, place = f"{key}={name}", key.rpartition(".")[0]
    columns = {} if prefix == "torch" else {"input_key": image_key, "target_key": label_key}
    if prefix == "torch" and root is None:
        raise CorpError(f"{where} needs {place}.root=FOLDER, the one that it was downloaded to.")
    silence, on_hub = None, PACKAGES.get(prefix) == "datasets"
    if on_hub:
        with contextlib.suppress(ImportError):  # it is told what came of asking the hub only where it is there before
            import_module("datasets")
    try:
        with (
            hub.asked() if on_hub else contextlib.nullcontext() as silence,
            contextlib.redirect_stdout(io.StringIO()),  # timm prints its own advice
        ):
            dataset = create_dataset(name, root and str(expand(root)), split=split, input_img_mode="", **columns)
            stream = prefix in ("hfids", "tfds", "wds")
            count = _stream_length(dataset, limit) if stream else len(dataset)
    except ImportError as error:
        package = PACKAGES.get(prefix, error.name or "it")
        raise CorpError(f"{where} needs the package {package}; pip install {package}.") from error
    except Exception as error:  # every backend has its own errors
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if "download=True" in why:
            arguments = f"'{name}', '{root}', split='{split}', download=True"
            command = f'python -c "import timm.data; timm.data.create_dataset({arguments})"'
            raise CorpError(f"{where} is not in {place}.root={root}; download it first: {command}") from error
        why = f"{silence}; {why}" if silence else f"{type(error).__name__}: {why}"
        raise CorpError(
            f"{where} cannot be opened ({why}); check the name, {place}.split={split} and "
            f"{place}.root={root or 'null'}, or without a network give a folder of images."
        ) from error
    if count == 0:
        raise CorpError(f"{where} holds no images in the split {split}; choose another.")
    names, targets = _classes(dataset, count) if not stream else (None, None)
    unlabelled = prefix == "hfds" and not _has_labels(dataset.reader, label_key, where, place)
    reader = Stream(dataset) if stream else Indexed(dataset)
    folders = tuple(names[target] if names else str(target) for target in targets) if targets else ("",) * count
    items = tuple(Sample(reader, index, f"{name} {split} {index}") for index in range(count))
    return ImageSet(name, items, folders, classes=names, labels_on_read=targets is None and not unlabelled)


def _has_labels(reader: Any, label_key: str | None, where: str, place: str) -> bool:
    """Whether the columns of timm's `reader` include classes; where not, every image gets -1.

    Raises CorpError where the column of images is missing, or that of classes which was asked for.
    """
    columns = reader.dataset.column_names
    if reader.dataset[0].get(reader.image_key) is None:  # casting a column that is not there makes an empty one
        columns = [column for column in columns if column != reader.image_key]
    for key, column, needed in (("image_key", reader.image_key, True), ("label_key", reader.label_key, label_key)):
        if needed and column not in columns:
            raise CorpError(f"{where} has no column {column}, only {', '.join(columns)}; name one by {place}.{key}.")
    found = reader.label_key in columns
    if not found:
        reader.dataset = reader.dataset.add_column(reader.label_key, [-1] * len(reader.dataset))
    return found


def _stream_length(dataset: Any, limit: int | None) -> int:
    known = len(dataset)
    count = known or sum(1 for _ in itertools.islice(iter(dataset), limit))
    return min(count, limit or count)


def _classes(dataset: Any, count: int) -> tuple[tuple[str, ...] | None, list[int] | None]:
    """(names of the classes in the dataset's order, class of every image), where known without reading images."""
    reader: Any = getattr(dataset, "reader", None)
    index = getattr(reader or dataset, "class_to_idx", None) or {}
    names = tuple(sorted(index, key=index.__getitem__)) if sorted(index.values()) == list(range(len(index))) else None
    targets: Any = None
    if hasattr(reader, "dataset"):  # Hugging Face datasets: a column
        targets = reader.dataset[reader.label_key] if reader.label_key in reader.dataset.column_names else None
    else:
        targets = next((getattr(dataset, field) for field in LABEL_FIELDS if hasattr(dataset, field)), None)
    if targets is None or len(targets) != count:
        return names, None
    try:
        return names, [int(target) for target in targets]
    except (TypeError, ValueError):
        return names, None
