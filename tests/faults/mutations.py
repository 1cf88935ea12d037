"""Changes of sound inputs, from a generator."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NUMBERS = (0, -1, 1, 2, 10**9, 2**63, 2**70, 10**400, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"))
WORDS = (
    "",
    "x",
    "../x",
    "/etc/passwd",
    "\x1b[31m",
    "\0",
    "é",
    "😀",
    "a" * 5000,
    "hf-hub:a/b",
    "None",
    "${oc.env:HOME}",
)
JUNK: tuple[Any, ...] = (None, True, False, *NUMBERS, *WORDS, [], {}, [[]], [None], {"a": 1}, [1] * 2000, {"": {}})


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a value of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def in_json(value: Any, rng: Random) -> Any:
    """The value with one to three places changed, removed, doubled or exchanged."""
    found = {"top": copy.deepcopy(value)}
    if rng.random() < 0.01:
        return (
            {**found["top"], rng.choice(list(found["top"])): deep(rng.choice((50, 900)))}
            if isinstance(value, dict)
            else deep(900)
        )
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = [place for place in places(found) if len(place) > 1] or [("top",)]
        *path, key = rng.choice(spots) if rng.random() < 0.98 else ("top",)
        parent: Any = found
        for step in path:
            parent = parent[step]
        what = rng.random()
        if what < 0.6:
            parent[key] = copy.deepcopy(rng.choice(JUNK))
        elif what < 0.75 and key != "top":
            del parent[key]
        elif what < 0.85 and isinstance(parent, dict):
            parent[str(rng.choice(WORDS))] = parent[key]
        else:
            other: Any = found
            for step in rng.choice(spots):
                other = other[step]
            parent[key] = copy.deepcopy(other)
    return found["top"]


def as_text(value: Any) -> str:
    """JSON as Python writes it, NaN included."""
    return json.dumps(value)


def in_text(text: str, rng: Random) -> str:
    """Characters changed, removed, doubled; lines exchanged; cut."""
    for _ in range(rng.choice((1, 2, 5))):
        at, size = rng.randrange(len(text) + 1), rng.choice((1, 1, 3, 20))
        what = rng.randrange(6)
        if what == 0:
            text = (
                text[:at]
                + rng.choice((*WORDS, ",", '"', "\t", "\n", "\r", "{", "[", ":", "-", "&a *a", "!!x"))
                + text[at:]
            )
        elif what == 1:
            text = text[:at] + text[at + size :]
        elif what == 2:
            text = text[:at] + text[at : at + size] * rng.choice((2, 50)) + text[at:]
        elif what == 3:
            text = text[:at]
        elif what == 4:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines)
        else:
            text = text[:at] + repr(rng.choice(NUMBERS)) + text[at + size :]
    return text


def in_bytes(data: bytes, rng: Random) -> bytes:
    """Bits turned, bytes set, removed, doubled; cut."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 2, 4, 16))):
        if not found:
            break
        # the head says what the rest means
        at = rng.randrange(len(found)) if rng.random() < 0.6 else rng.randrange(min(len(found), 80))
        size, what = rng.choice((1, 2, 4, 64)), rng.randrange(7)
        if what == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            found[at : at + size] = bytes([rng.choice((0, 255, 127, 128))]) * size
        elif what == 2:
            found[at : at + size] = rng.randbytes(size)
        elif what == 3:
            del found[at : at + size]
        elif what == 4:
            found[at:at] = found[at : at + size]
        elif what == 5:
            del found[at:]
        else:
            found[at : at + 4] = rng.choice((2**31 - 1, 2**16, 2**32 - 1, 0)).to_bytes(4, rng.choice(("big", "little")))
    return bytes(found)
