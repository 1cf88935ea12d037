"""Reports as corp prune writes them, made up: for tests of what reads them, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS = ("budget", "merging", "uniform", "unlabelled", "features", "bare")


def report(kind: str = "budget", macs: int = 6_000_000, top1: float = 90.0, blocks: int = 3, **config: Any) -> Any:
    """The content of a report.json; bare: as little as any corp has written."""
    sizes = {"mlp": 64, "qk": 16, "vo": 16, "heads": 2}
    judged: dict[str, Any] = dict.fromkeys(
        ("agreement", "kl", "top1", "top1_interval", "top5", "top5_interval", "loss", "cosine", "cka", "knn_top1")
    )
    if kind == "features":
        judged |= {"cosine": top1 / 100, "cka": 0.9}
    else:
        judged |= {"agreement": top1, "kl": (101 - top1) / 100}
        if kind != "unlabelled":
            judged |= {"top1": top1, "top1_interval": [top1 - 2, top1 + 2], "top5": 99.0, "top5_interval": [98, 99.5]}
    perfect = {"agreement": 100.0, "kl": 0.0, "top1": 90.0, "cosine": 1.0, "cka": 1.0}
    dense = {**judged, **{key: best for key, best in perfect.items() if judged[key] is not None}}
    found: Any = {
        "schema_version": 1,
        "model": {
            "name": "vit",
            "timm_name": "vit_tiny_patch16_224",
            "args": {},
            "data": {
                "input_size": [3, 32, 32],
                "mean": [0.5],
                "std": [0.5],
                "interpolation": "bicubic",
                "crop_pct": 1.0,
                "crop_mode": "center",
            },
            "dense_sha256": "0" * 64,
        },
        "config": {"recipe": "best", "sparsity": {"macs": 0.4}, **config},
        "seed": 0,
        "size": {
            "dense": {"parameters": 700_000, "macs": 12_000_000, "flops": 24_000_000},
            "pruned": {"parameters": 500_000, "macs": macs, "flops": 2 * macs},
        },
        "calibration": {"source": "photos", "images": 64, "bad": {"count": 1, "first": ["a.jpg"]}, "list_sha256": "1"},
        "evaluation": {
            "source": "val",
            "images": 100,
            "bad": {"count": 0, "first": []},
            "list_sha256": "2",
            "labelled_images": 100 if judged["top1"] else 0,
            "held_out": True,
            "precision": "float32",
            "dense": dense,
            "uncompensated": judged,
            "pruned": judged,
        },
        "throughput": None,
        "stage_seconds": {"load": 1.5, "calibrate": 70.0},
        "warnings": [],
    }
    if kind == "bare":
        return found
    damage = [
        {"block": f"blocks.{i}", "group": group, "sizes": [0, size // 2, size], "damage": [0.1 * i + 0.1, 0.01, 0.0]}
        for i in range(blocks)
        for group, size in (("mlp", 64), ("qk", 16), ("tokens", 17))
    ]
    merges = kind == "merging"
    found["sparsity"] = {
        "asked": {},
        "achieved": {},
        "skipped": [],
        "last_block_tokens": None,
        "merged_tokens": [0, 2, *[0] * (blocks - 2)] if merges else None,
        "predicted_kl": None,
        "predicted_speedup": None,
        "curves": damage if kind in ("budget", "merging") else [],
    }
    error = {"mlp": {"before": 0.2, "after": 0.01}, "qk": {"before": 0.1, "after": 0.0}}
    found["blocks"] = [
        {
            "name": f"blocks.{i}",
            "dense": sizes,
            "pruned": {**sizes, "mlp": 32, "qk": 8},
            "reconstruction_error": error if i else {},
            "mlp_fit": None,
            "vo_fits": [],
        }
        for i in range(blocks)
    ]
    found["throughput"] = {"batch_size": 8, "images_per_second": {"dense": 100.0, "pruned": 150.0}, "speedup": 1.5}
    found["warnings"] = ["1 image could not be read"]
    return found


def lay(folder: Path, content: Any) -> None:
    """Write `content` as the report of a run in `folder`."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(content))
