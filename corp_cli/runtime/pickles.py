"""Files of torch.save from anybody: read without running code, and never into more memory than the file has bytes."""

from __future__ import annotations

import argparse
import warnings
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

ZIP = b"PK\x03\x04"
SCALAR = np.float64(0).__reduce__()[0]
# What training scripts keep beside the weights: to make one of these touches nothing outside of it. Names of modules
# that have moved are those in the files. Paths become pure ones, which open nothing.
HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(kind)) for kind in "?efdilq"),
    *((SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((PurePosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((PureWindowsPath, f"{module}.WindowsPath") for module in ("pathlib", "pathlib._local")),
]


def load_pickle(path: Path) -> Any:
    """What torch.save wrote to `path`: tensors on the CPU, plain containers and what is HARMLESS.

    Raises UnpicklingError for other objects, ValueError for an archive of more bytes than the file has.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP)) == ZIP:
            with zipfile.ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                    raise ValueError("it unpacks to more bytes than it has")
    with warnings.catch_warnings(), torch.serialization.safe_globals(HARMLESS):
        warnings.simplefilter("ignore")  # PyTorch warns of pickle protocols before it refuses the pickle
        return torch.load(path, map_location="cpu", weights_only=True)


def defect(tensor: Tensor, path: Path) -> str | None:
    """What is wrong with a tensor of the file `path`, if its values are not plain numbers that lie in the file."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "sparse"
    if tensor.is_meta:
        return "without values (on the device meta)"
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored or stored > path.stat().st_size:
        return "larger than what the file holds of it"
    return None
