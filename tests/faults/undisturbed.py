"""What a run gives when nothing disturbs it, and whether another gave the same."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults import injected
from tests.faults.forks import corp, prune, shared
from tests.support.typed import UNTIMED

HALF = "sparsity.joint=0.5"
ONCE = "compensation.propagate=none"
BUDGET = ["sparsity.macs=0.4", "sparsity.curve_images=16"]
KINDS: dict[str, list[str]] = {
    "uniform": prune(ONCE, HALF),
    "sequential": prune(),
    "budget": prune(*BUDGET),
    "cache": prune(ONCE, HALF, "calibration.cache=cache"),
    "cached budget": prune(*BUDGET, "calibration.cache=cache"),
    "export": prune(ONCE, HALF, "export.formats=[timm,torchscript]"),
    "sweep": ["prune", *UNTIMED, ONCE, HALF, "hydra.sweep.dir=run", "-m", "seed=1,2"],
}
RESUME = ["prune", "resume=run"]


@dataclass(frozen=True)
class Run:
    """A run in `folder`, what it said, and how often it came to each place where faults are injected."""

    folder: Path
    said: str
    calls: dict[str, int]


@cache
def undisturbed(kind: str) -> Run:
    """The run of that kind; "resume sequential" and "resume budget" go on from what `stopped` left."""
    folder = shared("undisturbed")
    how, _, of = kind.rpartition(" ")
    if how == "resume":
        shutil.copytree(stopped(of), folder, dirs_exist_ok=True)
    argv = RESUME if how == "resume" else KINDS[kind]
    outcome, calls = injected.counted(folder, argv)
    assert outcome.code == 0, outcome.err
    return Run(folder, outcome.err, calls)


@cache
def stopped(kind: str) -> Path:
    """The folder of a run that was interrupted before its last block was kept."""
    folder = shared("stopped")
    last = undisturbed(kind).calls["save_file"] - 1  # behind it comes the checkpoint
    outcome = corp(folder, *KINDS[kind], before=lambda: injected.install(folder, "save_file", last, "interrupt"))
    assert outcome.code == 130, outcome.err
    assert "resume=" in outcome.err
    return folder


def files(folder: Path) -> dict[str, Path]:
    """All files below `folder`, by their names there."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """(names and places, bytes) of the tensors of a file."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    return header, data[end:]


def figures(path: Path) -> Any:
    """What a report says of the result."""
    content = json.loads(path.read_text())
    return {key: content[key] for key in ("size", "evaluation", "blocks") if key in content}


SAME: dict[str, Callable[[Path], Any]] = {
    "pruned.safetensors": tensors,
    "plan.yaml": Path.read_text,
    "report.json": figures,
}


def require_same(folder: Path, kind: str) -> None:
    """`folder` holds what the undisturbed run holds: the same files, and the same result in them."""
    found, wanted = files(folder), files(undisturbed(kind).folder)
    missing, left = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    missing = {name for name in missing if not name.endswith(".lock")}  # which a run can do without
    assert not missing, f"{sorted(missing)} missing"
    assert not left, f"{sorted(left)} left behind"
    for name, path in wanted.items():
        if read := SAME.get(path.name):
            assert read(found[name]) == read(path), f"{name} is another"
