"""What several of the reports of schema.py hold: models, images and a quick timing. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Data:
    """How images are prepared."""

    input_size: list[int]  # channels, height, width
    mean: list[float]
    std: list[float]
    interpolation: str
    crop_pct: float
    crop_mode: str


@dataclass(frozen=True)
class NamedModel:
    """Origin of a model."""

    source: str
    timm_name: str
    args: dict[str, Any]
    data: Data


@dataclass(frozen=True)
class Model(NamedModel):
    """Origin and size of a model."""

    sha256: str
    dense_sha256: str | None
    parameters: int
    macs: int
    flops: int


@dataclass(frozen=True)
class Bad:
    """Images that could not be read."""

    count: int
    first: list[str]


@dataclass(frozen=True)
class Images:
    """Images that were used."""

    source: str
    images: int
    bad: Bad
    list_sha256: str


@dataclass(frozen=True)
class CalibrationImages(Images):
    """Those of calibration, and in which precision float32 matrices were multiplied."""

    precision: str = "float32"  # or tf32


@dataclass(frozen=True)
class JudgedImages(Images):
    """Images that models were judged on."""

    labelled_images: int


@dataclass(frozen=True)
class Throughput:
    """A quick timing in turns."""

    batch_size: int
    images_per_second: dict[str, float]  # by name of the model
