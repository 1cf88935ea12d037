"""Damage curves kept beside the statistics that they came with, so that a family of budgets measures them once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from corp_cli.config.prune import PruneConfig
from corp_cli.files.cache.statistics import key_sha256
from corp_cli.files.output import write_whole
from corp_cli.models.blocks import Sizes
from corp_cli.runtime import console
from corp_cli.sizes.curves import Curve

FORMAT = "corp-curves 1"


def curves_key(
    statistics: dict[str, str],
    cfg: PruneConfig,
    context: tuple[Sizes, ...],
    anchors: tuple[float, ...],
    wanted: list[tuple[int, str]],
) -> dict[str, str]:
    """All that curves depend on, by name; `statistics` is the key of those."""
    repair = {key: getattr(cfg.compensation, key) for key in ("mlp", "qk", "vo", "ridge_lambda")}
    parts = {
        "ranker": asdict(cfg.ranker),
        "compensation": repair,
        "images": [cfg.sparsity.curve_images, cfg.seed],
        "context": [asdict(sizes) for sizes in context],
        "anchors": anchors,
        "wanted": wanted,
    }
    return {"format": FORMAT, "statistics": key_sha256(statistics), **{k: json.dumps(v) for k, v in parts.items()}}


def curves_file(cache: Path, key: dict[str, str]) -> Path:
    """A file named after `key`: in the folder `cache`, or beside it where it names the file of the statistics."""
    folder = cache.parent if cache.suffix == ".safetensors" else cache
    return folder / f"curves-{key_sha256(key)[:16]}.json"


def write_curves(curves: list[Curve], key: dict[str, str], path: Path) -> None:
    """Write `path`, which appears only when whole. Raises CorpError if it cannot be written."""
    rows = [{"block": c.block, "group": c.group, "damage": c.damage.tolist()} for c in curves]
    text = json.dumps({"key": key, "curves": rows})  # floats in full: the same plan as from fresh curves
    write_whole(path, lambda file: file.write(text))


def read_curves(path: Path, key: dict[str, str]) -> list[Curve] | None:
    """The curves in `path`; None where there are none, or not these."""
    try:
        content: Any = json.loads(path.read_text("utf-8"))
        if content["key"] != key:
            return None
        rows = content["curves"]
        curves = [Curve(r["block"], r["group"], torch.tensor(r["damage"], dtype=torch.float64)) for r in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    console.err().print(f"corp: damage curves read from {path}", style="dim", markup=False)
    return curves
