"""Figures of a run for experiment trackers: after the run, out of its report.

Where they go, and under which name, every tracker is told by variables of its own, such as MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.report.schema import Report
from corp_cli.runtime import console

PROJECT = "corp"
LONGEST = 500  # characters of a setting: what the oldest mlflow takes


@dataclass(frozen=True)
class Figures:
    """What a tracker is told."""

    name: str  # of the run
    settings: dict[str, str | int | float | bool]  # by dotted key
    totals: dict[str, float]  # of the run, by name
    blocks: list[dict[str, float]]  # of every block, first to last


def figures_of(report: Report, folder: Path) -> Figures:
    """The figures of the `report` of a run in `folder`."""
    totals: dict[str, float] = {}
    for kind in ("dense", "uncompensated", "pruned"):
        totals |= numbers(asdict(getattr(report.evaluation, kind)), kind)
    for kind in ("dense", "pruned"):
        totals |= numbers(asdict(getattr(report.size, kind)), kind)
    totals |= numbers(asdict(report.size.removed_percent), "removed_percent")
    if report.throughput:
        totals |= numbers(report.throughput.images_per_second, "images_per_second")
        totals["speedup"] = report.throughput.speedup
    totals |= numbers(report.stage_seconds, "seconds")
    blocks = []
    for block in report.blocks:
        found: dict[str, float] = {}
        for group, error in block.reconstruction_error.items():
            found |= {f"error_{group}/before": error.before, f"error_{group}/after": error.after}
        blocks.append(found)
    return Figures("/".join(folder.absolute().parts[-2:]), dict(settings(report.config)), totals, blocks)


def numbers(content: dict[str, Any], parent: str) -> dict[str, float]:
    """parent/key → value of all numbers in `content`."""
    return {f"{parent}/{key}": float(value) for key, value in content.items() if isinstance(value, int | float)}


def settings(config: dict[str, Any], parent: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """(dotted key, value) of a config; what is neither a text nor a number as JSON."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from settings(value, f"{parent}{key}.")
        else:
            plain = value if isinstance(value, str | int | float | bool) else json.dumps(value)
            yield f"{parent}{key}", plain[:LONGEST] if isinstance(plain, str) else plain


def to_tensorboard(figures: Figures, folder: Path) -> None:
    """Event files in the folder `tensorboard` of the run."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_hparams(figures.settings, figures.totals, run_name=".")
        for number, block in enumerate(figures.blocks):
            for name, value in block.items():
                writer.add_scalar(name, value, number)


def to_mlflow(figures: Figures, folder: Path) -> None:
    """A run where MLFLOW_TRACKING_URI says, in the experiment of MLFLOW_EXPERIMENT_NAME or `corp`."""
    import mlflow

    if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & set(os.environ):
        mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=figures.name, nested=True):  # if a caller has one open
        mlflow.log_params(figures.settings)
        mlflow.log_metrics(figures.totals)
        for number, block in enumerate(figures.blocks):
            mlflow.log_metrics(block, step=number)


def to_wandb(figures: Figures, folder: Path) -> None:
    """A run of the project of WANDB_PROJECT or `corp`; with WANDB_MODE=offline in the folder `wandb` of the run."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    with wandb.init(project=project, name=figures.name, dir=str(folder), config=figures.settings) as run:
        run.define_metric("block")
        run.define_metric("error_*", step_metric="block")
        for number, block in enumerate(figures.blocks):
            run.log({"block": number, **block})
        run.summary.update(figures.totals)


TRACKS: dict[str, Callable[[Figures, Path], None]] = {
    "tensorboard": to_tensorboard,
    "wandb": to_wandb,
    "mlflow": to_mlflow,
}


def require_trackers(names: list[str]) -> None:
    """Raise CorpError where the package of a tracker is not installed: every one is called as its package."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of results in the current one, such as ./wandb
            raise CorpError(f"track={name} needs a package that is not installed; run: pip install {name}")


def track(report: Report, names: list[str], folder: Path) -> None:
    """Tell the trackers `names` what the run in `folder` found; one that fails is warned of."""
    for name in names:
        try:
            TRACKS[name](figures_of(report, folder), folder)
        except Exception as error:
            why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            console.warn(f"track={name} failed, and has none or not all of the figures: {why.rstrip('.')}.")
