"""Damage curves kept beside the statistics that they came with, so that a family of budgets measures them once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from corp_cli.files.output import write_whole
from corp_cli.runtime import console
from corp_cli.sizes.curves import Curve


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
