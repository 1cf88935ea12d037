"""What a pruned checkpoint says of itself, read from the head of the file and believed only where it can be. No torch.

A file may come from anybody: every key, type and number is checked here, before anything is built from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from corp_cli.errors import CorpError
from corp_cli.files.shards import parsed, read_metadata
from corp_cli.models.spec import DATA_TYPES, FORMAT_VERSION, LOADING_ARGS, Manifest

FORMAT = "corp-pruned"
READABLE = (1, 2, 3, 4, 5, 6)
NAME = re.compile(r"\w+(\.[\w-]+)?")  # as in vit_small_patch16_224.dino; nothing that leads to a folder or to the hub
LARGEST = {"embed_dim": 2**15, "img_size": 2**13, "input_size": 2**13}
NUMBER, MOST_NUMBERS = 2**24, 1024  # what other numbers may be, and how many
LAYERS = re.compile("depth|layers|blocks|levels|stages")  # in the names of arguments that make timm build in a loop
MOST_LAYERS = 512


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a pruned checkpoint, of which nothing else is read. Raises CorpError for a file that has none."""
    metadata = read_metadata(Path(path))
    if FORMAT not in metadata:
        raise CorpError(
            f"{path} was not written by corp prune: it holds no manifest. Dense weights go to model.checkpoint."
        )
    try:
        content = parsed(metadata[FORMAT])
        version = content.get("format_version") if isinstance(content, dict) else None
        if type(version) is int and version not in READABLE:
            raise CorpError(
                f"{path} has format version {version}, and this corp reads {FORMAT_VERSION}; use the version of corp "
                "that wrote it, or a newer one."
            )
        manifest: Manifest = _typed(Manifest, content, "it")
        _require_plausible(manifest)
    except (ValueError, TypeError, RecursionError) as error:
        what = "its JSON is nested too deeply" if isinstance(error, RecursionError) else error
        raise CorpError(f"The manifest in {path} cannot be read ({what}); copy or make the file again.") from error
    return manifest


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value`, of JSON types, as a `kind`: a dataclass, a dict or list of a kind, a kind or None, or a plain type.

    Raises ValueError that says `where` something is missing, unknown or of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if inner and origin not in (dict, list):  # kind | None
        return None if value is None else _typed(inner[0], value, where)
    expected, given = dict if is_dataclass(kind) else origin or kind, type(value)
    if given is not expected and (expected, given) != (float, int):
        raise ValueError(f"{where} is not of type {expected.__name__}")
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        lacking, unknown = [key for key in needed if key not in value], [key for key in value if key not in hints]
        if lacking or unknown:
            raise ValueError(
                f"{where} lacks {lacking[0]}" if lacking else f"{where} has the unknown key {unknown[0][:40]}"
            )
        made: Any = kind
        return made(**{key: _typed(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    if origin is dict:
        return {key: _typed(inner[1], item, f"{where}.{key[:40]}") for key, item in value.items()}
    if origin is list:
        return [_typed(inner[0], item, where) for item in value]
    if kind is int and value < 0:
        raise ValueError(f"{where} is negative")
    return value


def _require_plausible(manifest: Manifest) -> None:
    """Raise ValueError for a manifest of the right types that is not one of a pruned vision transformer."""
    model = manifest.model
    if not NAME.fullmatch(model.name):
        raise ValueError(f"{model.name[:80]} is not the name of an architecture")
    if loading := sorted(LOADING_ARGS & model.args.keys()):
        raise ValueError(f"the argument {loading[0]} is not one of an architecture, and might load another file")
    for key, value in model.data.items():
        if key not in DATA_TYPES:
            raise ValueError(f"the preprocessing has the unknown key {key[:40]}")
        _typed(DATA_TYPES[key], value, f"the preprocessing's {key}")
    size = model.data.get("input_size", ())
    if len(size) != 3 or min(size) < 1:
        raise ValueError("the preprocessing has no input_size of channels, height and width")
    for key, value in {**model.args, **model.data}.items():
        numbers = list(_numbers(value))
        deep = LAYERS.search(key) and sum(map(abs, numbers)) > MOST_LAYERS
        if deep or len(numbers) > MOST_NUMBERS or any(abs(n) > LARGEST.get(key, NUMBER) for n in numbers):
            raise ValueError(f"{key[:40]} is larger than that of any model")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
