"""What kept things depend on, by name: a thing is found again only under the same key."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from corp_cli.files.cache.statistics import field_names
from corp_cli.files.kept import Key
from corp_cli.images.sources import ImageSet
from corp_cli.method.statistics import BlockStatistics
from corp_cli.models.loaded import LoadedModel


def images_sha256(*sets: ImageSet) -> str:
    """SHA-256 over the content of every image, in order.

    Content, not names and times: a copied or renamed folder is the same images, and a file replaced under its old name
    is not. Reading the bytes takes about a hundredth of measuring on them. Samples of a timm dataset, whose bytes are
    out of reach, count by dataset, split and index.
    """
    digest = hashlib.sha256()
    for images in sets:
        digest.update(f"{len(images)}\n".encode())
        for item in images.items:
            if isinstance(item, Path):
                content = item.read_bytes() if os.access(item, os.R_OK) and item.is_file() else b"unreadable"
                digest.update(hashlib.sha256(content).digest())
            elif isinstance(item, Tensor):
                digest.update(f"{item.dtype} {tuple(item.shape)}".encode() + item.contiguous().numpy().tobytes())
            else:
                digest.update(f"{item}\n".encode())
    return digest.hexdigest()


def statistics_key(
    dense: LoadedModel, images: Iterable[ImageSet], groups: Iterable[str], precision: str, weighs: bool
) -> Key:
    """What statistics depend on, by name; batch size and device only round differently and are left out."""
    return {
        **({} if precision == "float32" else {"precision": precision}),
        **({"logits": "weighted"} if weighs else {}),
        "weights": dense.sha256,
        "images": images_sha256(*images),
        "transform": json.dumps(dense.spec.data, sort_keys=True),
        "groups": ",".join(sorted(groups)),
        "fields": " ".join(field_names(BlockStatistics)),
    }


def key_sha256(key: Key) -> str:
    """One hash for the whole key."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()


def differing(key: Key, other: Key) -> str:
    """The parts in which two keys differ, in words."""
    return ", ".join(name for name in {**key, **other} if key.get(name) != other.get(name))


def extended(key: Key, **parts: Any) -> Key:
    """The key of what depends on statistics under `key`, and on `parts` besides."""
    return {"statistics": key_sha256(key), **{name: json.dumps(part, sort_keys=True) for name, part in parts.items()}}
