"""The schema of `corp study`: a run of `corp prune` for every row, value and seed. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from corp_cli.config.prune import PruneConfig
from corp_cli.config.ranges import require_at_least, require_choice
from corp_cli.errors import CorpError

X = "{x}"  # in the overrides of a row: the value
AXES = ("value", "macs", "parameters", "images_per_second", "latency_ms")
FIGURES = (  # what a run is asked for: columns of results.csv
    *("parameters", "macs", "top1", "top5", "agreement", "kl"),
    *("images_per_second", "speedup", "latency_ms", "latency_speedup"),
)
ANALYSES = ("mlp", "attention", "ranking")


@dataclass
class StudyRow:
    """One method, or one setting of it."""

    label: str = ""
    overrides: List[str] = field(default_factory=list)  # of corp prune; {x} stands for the value
    values: Optional[List[float]] = None  # in place of those of the experiment


@dataclass
class ExperimentConfig:
    """What one table or figure compares."""

    name: str = ""
    title: str = ""
    analysis: List[str] = field(default_factory=list)  # tables of corp analyze, in place of rows
    overrides: List[str] = field(default_factory=list)  # of every row; those of the command line win
    rows: List[StudyRow] = field(default_factory=list)
    values: List[float] = field(default_factory=list)  # of x, for every row; none: a row is one run
    seeds: List[int] = field(default_factory=lambda: [0])  # each draws other calibration images
    x: str = "value"  # the axis of the figure
    panels: List[str] = field(default_factory=lambda: ["top1"])  # of the figure: its columns of results.csv
    show: List[str] = field(default_factory=lambda: ["macs", "top1", "kl"])  # columns of the table
    latency: bool = False  # time every pruned model by corp bench, at batch 1
    paper: Dict[str, Any] = field(default_factory=dict)  # model → row → figure → the paper's number

    def __post_init__(self) -> None:
        require_choice("experiment.", self, x=AXES, panels=FIGURES, show=FIGURES, analysis=ANALYSES)
        require_at_least("experiment.", self, seeds=0)
        taken: set[str] = set()
        for row in self.rows:
            values = self.values if row.values is None else row.values
            if not row.label or slug(row.label) in taken:
                raise CorpError(f"experiment.rows: the label '{row.label}' is empty or there twice; give each its own.")
            if not values and any(X in one for one in row.overrides):
                raise CorpError(f"experiment.rows: '{row.label}' has {X} and no values; give experiment.values.")
            taken.add(slug(row.label))


def slug(name: str) -> str:
    """`name` as it names a folder."""
    return re.sub(r"[^\w.-]+", "_", name)


@dataclass
class StudyConfig(PruneConfig):
    """Everything `corp study` can be told: the experiment, and what `corp prune` takes, for every row."""

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    only: Any = None  # rows whose label holds this text, or one of several
    keep_weights: bool = False  # pruned.safetensors of every row

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.experiment.rows and not self.experiment.analysis:
            raise CorpError("Say which study to run: corp study experiment=table1; corp study --help lists them.")
