"""A report.json and an evaluation.json, as far as `corp check` reads them, for its tests to change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from corp_cli.config.gate import GateConfig

DEFAULT = GateConfig(top1_drop=0.5, top5_drop=0.5, agreement_drop=1.0, kl=0.01, macs=0.01, params=0.01)
MACHINE = {"device": "cpu", "device_name": "x86_64", "cpu_count": 4, "cpu_capability": "AVX2", "torch_threads": 1}
DATA = {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 1.0}
REPORT = {
    "schema_version": 1,
    "model": {"name": "vit_digits", "timm_name": "vit_tiny", "data": DATA, "dense_sha256": "a" * 64},
    "environment": MACHINE,
    "size": {"dense": {"parameters": 670000, "macs": 10000000}, "pruned": {"parameters": 402000, "macs": 6000000}},
    "evaluation": {
        "list_sha256": "b" * 64,
        "labelled_images": 400,
        "dense": {"top1": 98.25, "top5": 100.0, "agreement": 100.0, "kl": 0.0},
        "pruned": {"top1": 97.75, "top5": 99.5, "agreement": 99.5, "kl": 0.002},
    },
    "throughput": {"images_per_second": {"dense": 2500.0, "pruned": 3500.0}, "speedup": 1.4},
}
EVALUATION = {
    "schema_version": 1,
    "model": {
        "timm_name": "vit_tiny",
        "data": DATA,
        "dense_sha256": "a" * 64,
        "parameters": 402000,
        "macs": 6000000,
    },
    "reference": {"parameters": 670000, "macs": 10000000},
    "environment": MACHINE,
    "images": {"list_sha256": "b" * 64, "labelled_images": 400},
    "results": {"model": REPORT["evaluation"]["pruned"], "reference": REPORT["evaluation"]["dense"]},  # type: ignore[index]
    "throughput": None,
}


def changed(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy of `content` with other values at some dotted paths, written with __ for the dots."""
    copied = copy.deepcopy(content)
    for path, value in values.items():
        *parents, key = path.split("__")
        part = copied
        for parent in parents:
            part = part[parent]
        part[key] = value
    return copied


def save(name: str, content: Any) -> str:
    """Write `content` to the file `name` here → `name`."""
    Path(name).write_text(json.dumps(content))
    return name
