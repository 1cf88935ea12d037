"""What of a config may leave the machine: files that are passed on name no folder and hold no environment variable."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SHORTEST = 4  # characters of a variable that are looked for inside other texts; fewer are there by chance


class FromEnvironment(str):
    """A value that an environment variable went into; `asked` is the text that stands for it in the config."""

    asked: str


def from_environment(value: str, asked: str) -> FromEnvironment:
    """`value`, marked."""
    marked = FromEnvironment(value)
    marked.asked = asked
    return marked


def shareable(content: T, cfg: Any) -> T:
    """`content` with every absolute path of `cfg` cut to its last part, and `${oc.env:NAME}` for what was in NAME.

    `content` and `cfg` are dataclasses, lists, dicts and plain values; the same goes for the home folder and the
    current one, wherever they stand in a text, such as a warning.
    """
    given = sorted({*_texts(cfg)}, key=len, reverse=True)
    asked = {str(text): text.asked for text in given if isinstance(text, FromEnvironment)}
    paths = [Path(text.partition(":")[2] if ":" in text else text) for text in (*given, *asked.values())]
    places = {path.parent for path in (*paths, *map(Path, _standing())) if path.is_absolute()}
    places |= {place.resolve() for place in places}
    folders = sorted((f"{place}{os.sep}" for place in places if place.name), key=len, reverse=True)
    known = re.compile("|".join(rf"(?<![\w./-]){re.escape(folder)}" for folder in folders))

    def told(text: str) -> str:
        for value, instead in asked.items():
            text = instead if text == value else text.replace(value, instead) if len(value) >= SHORTEST else text
        return known.sub("", text) if folders else text

    return _mapped(content, told)


def _standing() -> Iterator[str]:
    """A name within the home folder, and within the current one while that is there."""
    yield os.path.expanduser("~/name")
    with contextlib.suppress(OSError):
        yield os.path.abspath("name")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        yield from _texts(list(vars(value).values()))
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, told: Any) -> Any:
    if isinstance(value, str):
        return told(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _mapped(getattr(value, item.name), told) for item in fields(value)})
    if isinstance(value, dict):
        return {key: _mapped(item, told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, told) for item in value)
    return value
