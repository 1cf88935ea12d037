"""Bait for those who unpickle, and manifests that somebody edited."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from corp_cli.files.manifest import FORMAT

DATA: dict[str, Any] = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
VIT = "vit_tiny_patch16_224"


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.mkdir, (self.canary,)  # type: ignore[return-value]


def evil(canary: Path, name: str = "evil.pth", kind: str = "zip") -> Path:
    """A file of weights that runs code where it is unpickled, as torch.save writes it, as it once did, or as text."""
    path, state = canary.parent / name, {"head.weight": torch.zeros(1), "x": Evil(canary)}
    path.parent.mkdir(exist_ok=True)
    if kind == "text":
        path.write_bytes(pickle.dumps(Evil(canary), protocol=0))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def content(path: Path) -> dict[str, Any]:
    """The manifest as it stands in the file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    manifest: dict[str, Any] = json.loads(header["__metadata__"][FORMAT])
    return manifest


def edited(sound: Path, path: Path, manifest: Any) -> Path:
    """The checkpoint with another manifest, which is text or is made so."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    save_file(load_file(sound), path, metadata={FORMAT: text})
    return path


def with_args(sound: Path, path: Path, **args: Any) -> Path:
    manifest = content(sound)
    manifest["model"]["args"].update(args)
    return edited(sound, path, manifest)
