"""Models that travel inside the package, with the images to calibrate and to judge them on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "bundled"


@dataclass(frozen=True)
class BundledModel:
    """A timm architecture with its arguments, weights, preprocessing and images."""

    timm_name: str
    args: dict[str, Any]
    data: dict[str, Any]
    weights: Path
    calibration: Path
    evaluation: Path


BUNDLED = {
    # Trained by scripts/train_digits.py on scikit-learn's digits.
    "vit_digits": BundledModel(
        timm_name="vit_tiny_patch16_224",
        args={
            "img_size": 8,
            "patch_size": 2,
            "in_chans": 1,
            "num_classes": 10,
            "embed_dim": 96,
            "depth": 6,
            "num_heads": 3,
        },
        data={
            "input_size": [1, 8, 8],
            "mean": [0.5],
            "std": [0.5],
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
        },
        weights=FOLDER / "vit_digits.safetensors",
        calibration=FOLDER / "digits_train.safetensors",
        evaluation=FOLDER / "digits_test.safetensors",
    )
}
