"""Which class of the model every image shows: read off folder names, a class map, or a file of labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.images.rows import read_rows, read_text
from corp_cli.images.sources import ImageSet, Labels, expand

WORDNET = re.compile(r"n\d{8}")
IMAGENET_VAL = re.compile(r"ILSVRC2012_val_(\d{8})")
ENOUGH_MAPPED = 0.5  # of the folders must be words for a class before folder names are taken for classes


@dataclass(frozen=True)
class Head:
    """What the outputs of a classifier mean: their number, and the indices of WordNet ids and of plain names."""

    num_classes: int
    wordnet: dict[str, int]
    names: dict[str, int]


@dataclass(frozen=True)
class Labelled:
    """Images with the classes that were found, and what of it the user should hear."""

    images: ImageSet
    warnings: tuple[str, ...] = ()


def make_head(num_classes: int, wordnet: dict[str, int], names: Sequence[tuple[str, ...]]) -> Head:
    """A Head from the names of every class, by index; names that two classes share are left out, as crane is."""
    found: dict[str, int] = {}
    shared: set[str] = set()
    for index, words in enumerate(names):
        for word in {plain(word) for word in words}:
            if found.setdefault(word, index) != index:
                shared.add(word)
    return Head(num_classes, wordnet, {word: index for word, index in found.items() if word not in shared})


def plain(name: str) -> str:
    """`name` in lower case, with underscores, hyphens and runs of blanks as one blank."""
    return " ".join(re.split(r"[\s_-]+", name.casefold())).strip()


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts 2 before 10, as timm does."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def few(names: Iterable[str]) -> str:
    """The first three of `names`."""
    listed = list(names)
    return ", ".join(listed[:3]) + (" …" if len(listed) > 3 else "")


# --- folders --------------------------------------------------------------------------------------------------


def with_labels(images: ImageSet, head: Head, class_map: dict[str, int] | None = None) -> Labelled:
    """`images` with class indices read off their folders, where the folders name classes of the model.

    Tried in turn: the class map; WordNet ids; numbers below the number of classes; class names; and, where there are
    as many folders as the model has classes, the folders in order. Of nested folders the innermost that fits counts.
    Images whose folder fits nothing have class -1 and are not scored. Labels that the images came with stay. Of a model
    without a classifier every folder is a class of its own.
    """
    if images.labels is not None:
        return Labelled(images)
    folders = sorted(set(images.folders), key=natural_key)
    if head.num_classes == 0:  # k-NN knows of no classes but those of the images
        own = {folder: index for index, folder in enumerate(filter(None, folders))}
        labels = tuple(own.get(folder, -1) for folder in images.folders)
        return Labelled(replace(images, labels=labels) if len(own) > 1 else images)
    index = folder_classes(folders, head, class_map, images.classes)
    unknown = [folder for folder in folders if folder not in index]
    if not index:
        asked = class_map is not None or any(WORDNET.search(folder) for folder in folders)
        hint = f"None of the {len(folders)} folders of {images.source} ({few(folders)}) names a class of the model, "
        return Labelled(images, (hint + "so accuracy is not measured; see evaluation.class_map.",) if asked else ())
    warnings: tuple[str, ...] = ()
    if unknown:
        count = sum(folder in unknown for folder in images.folders)
        warnings = (
            f"{len(unknown)} of the {len(folders)} folders of {images.source} ({few(unknown)}) name no class of the "
            f"model; their {count} images are not scored.",
        )
    return Labelled(replace(images, labels=tuple(index.get(folder, -1) for folder in images.folders)), warnings)


def folder_classes(
    folders: list[str], head: Head, class_map: dict[str, int] | None, order: tuple[str, ...] | None
) -> dict[str, int]:
    """folder → class index, for those that name one; empty where they are not classes."""
    last = {folder: PurePath(folder).name for folder in folders}
    if class_map is not None:
        by_name = {plain(name): index for name, index in class_map.items()}
        return {f: found for f in folders if (found := _innermost(f, by_name, plain)) is not None}
    wordnet = {f: found for f in folders if (found := _innermost(f, head.wordnet, str)) is not None}
    if wordnet:
        return wordnet
    if all(name.isdecimal() and int(name) < head.num_classes for name in last.values()):
        return {folder: int(name) for folder, name in last.items()}
    named = {f: found for f in folders if (found := _innermost(f, head.names, plain)) is not None}
    in_order = order or tuple(sorted(set(last.values()), key=natural_key))
    if len(in_order) == head.num_classes > 1 and len(named) < len(folders):
        return {folder: in_order.index(name) for folder, name in last.items()}
    return named if len(named) >= ENOUGH_MAPPED * len(folders) else {}


def _innermost(folder: str, index: dict[str, int], normal: Any) -> int | None:
    return next((index[normal(part)] for part in reversed(PurePath(folder).parts) if normal(part) in index), None)


# --- class maps -----------------------------------------------------------------------------------------------


def read_class_map(path: str, head: Head) -> dict[str, int]:
    """name → class index of evaluation.class_map: one name a line in order, name,index CSV, or a JSON object or list.

    In place of an index a WordNet id or a class name of the model may stand. Raises CorpError where a line is broken.
    """
    file = expand(path)
    where = f"evaluation.class_map={path}"
    if file.suffix.lower() == ".json":
        content = _json(file, where)
        if isinstance(content, list):
            content = {str(name): index for index, name in enumerate(content)}
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise CorpError(f"{where} holds a {kind}; give an object of name: index, or a list of names.")
        pairs = [(str(name), str(index)) for name, index in content.items()]
    else:
        rows = read_rows(file, where)
        if all(len(row) == 1 for row in rows):
            pairs = [(row[0], str(index)) for index, row in enumerate(rows)]
        else:
            pairs = [(row[0], row[1] if len(row) > 1 else "") for row in rows]
            if pairs and resolve(pairs[0][1], head) is None and not pairs[0][1].strip("-").isdecimal():
                pairs = pairs[1:]  # a line of titles
    found: dict[str, int] = {}
    for name, token in pairs:
        index = resolve(token, head)
        if index is None:
            raise CorpError(
                f"{where} maps {name} to '{token}', which is no class of the model; give an index from 0 to "
                f"{head.num_classes - 1}, or a name that the model knows."
            )
        found[name] = index
    if not found:
        raise CorpError(f"{where} names no classes; write one name a line, in the order of the model's classes.")
    return found


def resolve(token: str, head: Head) -> int | None:
    """The class index that `token` stands for: a number, a WordNet id or a class name of the model."""
    if token.isdecimal():
        return int(token) if int(token) < head.num_classes else None
    return head.wordnet.get(token, head.names.get(plain(token)))


def _json(path: Path, where: str) -> Any:
    try:
        return json.loads(read_text(path, where))
    except (ValueError, RecursionError) as error:
        raise CorpError(f"{where} is not valid JSON ({error}); correct it.") from error


# --- files of labels ------------------------------------------------------------------------------------------


def with_label_file(images: ImageSet, path: str, head: Head, class_map: dict[str, int] | None = None) -> Labelled:
    """`images` with the classes that the file evaluation.labels=`path` gives them.

    Either `name class` lines, CSV, or a JSON object, by path, file name or stem; or one entry for every image, in order
    of the file names: lines of numbers, or the JSON list of lists of ImageNet-ReaL (several right classes, or none: not
    scored). ImageNet's validation images find their entry by the number in their name, so that part of them will do.
    """
    file, where = expand(path), f"evaluation.labels={path}"
    by_name, in_order = _entries(file, where)
    tokens = [_entry(item, by_name) for item in images.items] if by_name else _ordered(images, in_order, where)
    known = [entry for entry in tokens if entry is not None]
    if not known:
        raise CorpError(f"{where} names none of the images in {images.source}; give their paths or file names.")
    shift, warnings = _first_index(known, head, class_map), []
    if shift:
        warnings.append(f"{where} counts classes from 1 to {head.num_classes}; one was subtracted.")
    indices, wrong = [], []
    for entry in tokens:
        found = [_index(token, head, class_map, shift) for token in entry or ()]
        wrong += [token for token, index in zip(entry or (), found, strict=True) if index is None]
        indices.append(tuple(index for index in found if index is not None))
    if wrong:
        raise CorpError(
            f"{where} holds {len(wrong)} labels that are no class of the model, first '{wrong[0]}'; give indices from "
            f"0 to {head.num_classes - 1}, names that the model knows, or evaluation.class_map."
        )
    unscored = sum(not entry for entry in indices)
    if unscored:
        warnings.append(f"{where} gives no class to {unscored} of {len(images)} images; they are not scored.")
    return Labelled(replace(images, labels=_filled(indices)), tuple(warnings))


Entry = tuple[str, ...]  # the labels of one image, as written


def _entries(path: Path, where: str) -> tuple[dict[str, Entry], list[Entry]]:
    """(labels by name, labels in order); one of them is empty."""
    if path.suffix.lower() == ".json":
        content = _json(path, where)
        if isinstance(content, dict):
            return {str(name): _entry_of(value) for name, value in content.items()}, []
        if isinstance(content, list):
            return {}, [_entry_of(value) for value in content]
        kind = type(content).__name__
        raise CorpError(f"{where} holds a {kind}; give a list with one entry per image, or an object.")
    rows = [row if len(row) > 1 else row[0].rsplit(maxsplit=1) for row in read_rows(path, where)]
    if not rows:
        raise CorpError(f"{where} is empty; write one label per image.")
    if all(len(row) == 1 for row in rows):
        return {}, [(row[0],) for row in rows]
    return {row[0]: (row[1],) for row in rows if len(row) > 1}, []


def _entry_of(value: Any) -> Entry:
    return tuple(str(item) for item in (value if isinstance(value, list) else [value]))


def _entry(item: Any, by_name: dict[str, Entry]) -> Entry | None:
    path = PurePath(str(item))
    tails = ("/".join(path.parts[start:]) for start in range(len(path.parts)))  # the longest known path wins
    return next((by_name[name] for name in (*tails, path.stem) if name in by_name), None)


def _ordered(images: ImageSet, entries: list[Entry], where: str) -> list[Entry | None]:
    names = [PurePath(str(item)).name if isinstance(item, Path) else "" for item in images.items]
    numbers = [IMAGENET_VAL.search(name) for name in names]
    if all(numbers) and len(entries) == 50_000:
        return [entries[int(number[1]) - 1] for number in numbers if number]
    if len(entries) != len(images):
        raise CorpError(f"{where} holds {len(entries)} labels for {len(images)} images; give one per image, in order.")
    order = sorted(range(len(images)), key=lambda i: (names[i], i))
    placed: list[Entry | None] = [None] * len(images)
    for entry, position in zip(entries, order, strict=True):
        placed[position] = entry
    return placed


def _first_index(entries: list[Entry], head: Head, class_map: dict[str, int] | None) -> int:
    """1 where the labels are numbers that can only be counted from 1."""
    tokens = {token for entry in entries for token in entry}
    if class_map is not None or not all(token.isdecimal() for token in tokens):
        return 0
    numbers = {int(token) for token in tokens}
    return int(bool(numbers) and min(numbers) == 1 and max(numbers) == head.num_classes)


def _index(token: str, head: Head, class_map: dict[str, int] | None, shift: int) -> int | None:
    if class_map is not None and token in class_map:
        return class_map[token]
    return resolve(str(int(token) - shift), head) if token.isdecimal() else resolve(token, head)


def _filled(indices: list[tuple[int, ...]]) -> Labels:
    """One index per image where no image has several, else tuples of one length."""
    longest = max(map(len, indices))
    if longest == 1:
        return tuple(entry[0] if entry else -1 for entry in indices)
    return tuple((*entry, *[-1] * (longest - len(entry))) for entry in indices)


# --- a mapping that cannot be right -----------------------------------------------------------------------------


def near_chance(top1: float, images: int, num_classes: int) -> str | None:
    """A warning where `top1` percent of `images` is what guessing among `num_classes` gives; else None."""
    from scipy.special import bdtr  # here, since scipy takes long to import

    hits = round(top1 * images / 100)
    fewer = bdtr(hits - 1, images, 1 / max(num_classes, 1)) if hits else 0.0  # the chance to guess fewer
    if images < 10 or fewer >= 0.999:
        return None
    return (
        f"the dense model is right on {hits} of {images} labelled images, which is no better than guessing among "
        f"{num_classes} classes: the labels probably do not mean the model's classes; check the names of the folders, "
        "evaluation.class_map and evaluation.labels (ImageNet's devkit numbers its classes in another order)."
    )
