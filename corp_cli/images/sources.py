"""Where images come from: a folder, a list of files, a file of tensors, or a dataset that timm knows by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.images.decode import EXTENSIONS
from corp_cli.images.rows import read_rows, require_regular
from corp_cli.runtime import console
from corp_cli.runtime.pickles import defect, load_pickle

LISTS = (".txt", ".csv", ".tsv", ".lst", ".list")
TENSORS = (".npy", ".pt", ".pth", ".safetensors")
TIMM_PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")  # of the names that timm.data.create_dataset takes
KINDS = "give a folder of images, a .txt or .csv list of files, or a .npy, .pt or .safetensors of uint8 images"


class Reader(Protocol):
    """Images by index, with their class index (-1 where unknown), from anything but plain files."""

    in_order: bool  # a stream: indices may only grow, and one process reads it

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Image `index` of the dataset; raises what reading it raises."""
        ...


@dataclass(frozen=True)
class Sample:
    """One image of a dataset that is read through `reader`."""

    reader: Reader
    index: int
    name: str

    def __str__(self) -> str:
        return self.name


# One class index per image, -1 where unknown; or several right ones per image, filled up with -1.
Labels = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ImageSet:
    """Images in a fixed order. `items` are files, samples of a dataset, or images [H, W] or [H, W, C] in memory.

    Where they are `prepared`, items are float32 [C, H, W], as the model takes them, and no transform is applied.
    `folders` holds the sub-folder (or the class name in a list or dataset) of every image; `classes` the source's own
    order of those names where it has one; `labels` the class indices of the model where known.
    """

    source: str
    items: tuple[Path | Tensor | Sample, ...]
    folders: tuple[str, ...]
    labels: Labels | None = None
    classes: tuple[str, ...] | None = None
    labels_on_read: bool = False  # a stream tells the class of an image only with the image
    prepared: bool = False

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labelled(self) -> bool:
        """Whether `batches` gives classes."""
        return self.labels is not None or self.labels_on_read

    def identities(self) -> set[Path | str]:
        """What tells two images apart: files without links, samples by name; those in memory only by their source."""
        files = {item.resolve() for item in self.items if isinstance(item, Path)}
        names = {item.name if isinstance(item, Sample) else self.source for item in self.items}
        return files | (names if len(files) < len(self) else set())

    def subset(self, indices: Sequence[int]) -> ImageSet:
        """The images at `indices`, in that order."""
        labels: Any = None if self.labels is None else tuple(self.labels[i] for i in indices)
        items, folders = tuple(self.items[i] for i in indices), tuple(self.folders[i] for i in indices)
        return replace(self, items=items, folders=folders, labels=labels)


def expand(path: str | os.PathLike[str]) -> Path:
    """`path` with ~ replaced by the home folder."""
    return Path(os.path.expanduser(path))


def is_timm_name(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a dataset of timm, as hfds/food101 does, and nothing on disk."""
    prefix, slash, _ = str(path).partition("/")
    return bool(slash) and prefix.lower() in TIMM_PREFIXES and not Path(path).exists()


def read_images(path: str | os.PathLike[str], key: str) -> ImageSet:
    """All images at `path`: a folder (nested, flat or both), folders by a pattern, a list of files, a file of tensors.

    Raises CorpError, naming the config key, when there is nothing to read.
    """
    path = expand(path)
    where, suffix = f"{key}={path}", path.suffix.lower()
    try:
        if path.is_dir():
            return _read_folder(path, where)
        if not path.exists() and (found := glob(str(path))):
            fixed = next(parent for parent in path.parents if not has_magic(str(parent)))
            return _read_folder(fixed, where, [folder for folder in sorted(found) if os.path.isdir(folder)])
        if not path.exists():
            raise CorpError(f"{where} does not exist; {KINDS}.")
        require_regular(path, where)
        if suffix in TENSORS:
            return _read_tensors(path, where)
        if suffix in LISTS:
            return _read_list(path, where)
    except PermissionError as error:
        raise CorpError(f"{where} cannot be read (permission denied: {error.filename}); change its mode.") from error
    one = "one image; give the folder that holds it" if suffix in EXTENSIONS else f"a file of another kind; {KINDS}"
    raise CorpError(f"{where} is {one}.")


def joined(sets: Sequence[ImageSet]) -> ImageSet:
    """The images of all `sets`, in that order; classes go by the names of their folders.

    Raises CorpError for data sets of timm, some of which can only be read from the first image to the last.
    """
    for one in sets:
        if isinstance(one.items[0], Sample):
            raise CorpError(f"{one.source} cannot be read together with others; give it alone.")
    items, folders = (tuple(chain.from_iterable(getattr(one, name) for one in sets)) for name in ("items", "folders"))
    return ImageSet(", ".join(one.source for one in sets), items, folders)


# --- folders --------------------------------------------------------------------------------------------------


def _read_folder(path: Path, where: str, within: Sequence[str] = ()) -> ImageSet:
    """All images in `path`, or those in the folders `within` it.

    Links to folders are followed, each folder once; hidden files are passed over, and other kinds with a warning.
    """

    def refuse(error: OSError) -> None:
        raise error

    files: list[Path] = []
    others: Counter[str] = Counter()
    seen: set[str] = set()
    walks = [os.walk(root, onerror=refuse, followlinks=True) for root in within or [str(path)]]
    for folder, folders, names in chain.from_iterable(walks):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        files += [path for path in paths if path.suffix.lower() in EXTENSIONS]
        others.update(path.suffix.lower() or "no type" for path in paths if path.suffix.lower() not in EXTENSIONS)
    kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(5))
    if not files:
        held = f", but {others.total()} files of other types ({kinds})" if others else ""
        raise CorpError(
            f"{where} holds no images (.jpg, .png, .webp, .tiff and the like){held}; give a folder that does."
        )
    if others:
        console.warn(f"{path} holds files of other types ({kinds}), which are left out.")
    files.sort()
    return ImageSet(str(path), tuple(files), tuple(str(f.parent.relative_to(path)) for f in files))


# --- lists ----------------------------------------------------------------------------------------------------


def _read_list(path: Path, where: str) -> ImageSet:
    """A line holds a path, relative to the list, and perhaps a class, behind a blank or tab, or in a column."""
    rows = read_rows(path, where)
    name, label = 0, 1
    if rows and len(rows[0]) > 0 and path.suffix.lower() in (".csv", ".tsv"):
        titles = [cell.casefold() for cell in rows[0]]
        if not titles[0].endswith(EXTENSIONS):
            name = _column(titles, ("path", "file", "filename", "file_name", "image", "name"), 0)
            label = _column(titles, ("label", "class", "target", "wnid", "category"), len(titles))
            rows = rows[1:]
    files, classes, missing = [], [], []
    for row in rows:
        cells = [row[0]] if len(row) == 1 else [row[i] if i < len(row) else "" for i in (name, label)]
        file = path.parent / expand(cells[0])
        if len(cells) == 1 and not os.path.isfile(file) and len(split := cells[0].rsplit(maxsplit=1)) == 2:
            cells, file = split, path.parent / expand(split[0])
        if not os.path.isfile(file):  # Path.is_file raises for names that are too long
            missing.append(cells[0])
        files.append(file)
        classes.append(cells[1] if len(cells) > 1 else "")
    if missing:
        raise CorpError(
            f"{where} names {len(missing)} files that do not exist, first {missing[0]}; correct the list, whose paths "
            "are relative to it."
        )
    if not files:
        raise CorpError(f"{where} names no images; write one path a line.")
    folders = classes if any(classes) else [os.path.relpath(f.parent, path.parent) for f in files]
    return ImageSet(str(path), tuple(files), tuple(folders))


def _column(titles: list[str], names: tuple[str, ...], default: int) -> int:
    return next((titles.index(name) for name in names if name in titles), default)


# --- tensors --------------------------------------------------------------------------------------------------


def _read_tensors(path: Path, where: str) -> ImageSet:
    images, labels = _open_tensors(path, where)
    images = _channels_last(images, where)
    if images.is_floating_point():
        low, high = (float(t) for t in images.aminmax())
        if not (low >= 0 and high <= 1):  # also when NaN
            raise CorpError(
                f"{where} holds values from {low:g} to {high:g}; floats must be in [0, 1], not yet normalised."
            )
    elif images.dtype not in (torch.uint8, torch.uint16):
        raise CorpError(f"{where} holds {images.dtype} values; save the images as uint8, or as floats in [0, 1].")
    if labels is not None and labels.shape != images.shape[:1]:
        raise CorpError(f"{where} holds {len(images)} images and labels of shape {list(labels.shape)}; give one each.")
    known = None if labels is None else tuple(int(label) for label in labels)
    return ImageSet(path.name, tuple(images), ("",) * len(images), known)


def _open_tensors(path: Path, where: str) -> tuple[Tensor, Tensor | None]:
    """(images, labels) of the file: its only tensor, or those of these names. Never runs a pickle."""
    content: Any
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, mmap_mode="c", allow_pickle=False)  # copy-on-write: read page by page, as needed
            content = torch.from_numpy(array)
        elif path.suffix.lower() == ".safetensors":
            content = load_file(path)
        else:
            content = load_pickle(path)
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, EOFError) as error:
        reason = str(error).split("\n")[0]
        raise CorpError(f"{where} is not a whole file of plain tensors ({reason}); {KINDS}.") from error
    except Exception as error:  # torch.load has no common ancestor for its errors
        raise CorpError(
            f"{where} is not a file of plain tensors ({type(error).__name__}), and pickled objects are never opened; "
            "save the images with torch.save(tensor, FILE)."
        ) from error
    if isinstance(content, dict) and "images" not in content and len(content) == 1:
        content = next(iter(content.values()))
    labels = None
    if isinstance(content, dict):
        content, labels = content.get("images"), content.get("labels")
    if not isinstance(content, Tensor) or not isinstance(labels, Tensor | None):
        raise CorpError(f"{where} does not hold a tensor named images; {KINDS}.")
    for tensor in () if path.suffix.lower() == ".npy" else (content, labels):
        if tensor is not None and (wrong := defect(tensor, path)):
            raise CorpError(f"{where} holds a tensor that is {wrong}; save the images as a plain tensor.")
    return content, labels


def _channels_last(images: Tensor, where: str) -> Tensor:
    """[N, H, W] or [N, H, W, C], as a view."""
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.permute(0, 2, 3, 1)
    if images.numel() == 0 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (1, 3)):
        raise CorpError(
            f"{where} holds a tensor of shape {list(images.shape)}; images are [N, H, W], [N, H, W, C] or "
            "[N, C, H, W] with 1 or 3 channels."
        )
    return images
