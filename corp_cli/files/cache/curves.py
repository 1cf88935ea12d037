"""Damage curves kept beside the statistics that they came with, so that a family of budgets measures them once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corp_cli.files.kept import Kept, Key, read_kept, write_kept
from corp_cli.sizes.curves import Curve

KIND = "curves"


@dataclass(frozen=True)
class KeptCurves:
    """The content of a file of curves."""

    key: Key
    curves: list[Curve]


def write_curves(measured: KeptCurves, path: Path) -> None:
    """Write `path`, which appears only when whole. Raises CorpError if it cannot be written."""
    rows = [[curve.block, curve.group] for curve in measured.curves]
    tensors = {str(i): curve.damage for i, curve in enumerate(measured.curves)}
    write_kept(path, KIND, Kept(measured.key, {"curves": rows}, tensors))


def read_curves(path: Path) -> KeptCurves:
    """What is kept in `path`. Raises ForeignError or DamagedError for anything else."""
    kept = read_kept(path, KIND)
    rows = kept.content["curves"]
    return KeptCurves(kept.key, [Curve(block, group, kept.tensors[str(i)]) for i, (block, group) in enumerate(rows)])
