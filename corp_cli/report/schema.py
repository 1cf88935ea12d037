"""What report.json, evaluation.json, bench.json, export.json and analysis.json hold; docs/report.md explains it.

The JSON schemas are made from these classes by scripts/make_schemas.py. What several of them hold is in parts.py.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from corp_cli.files.output import REPORT
from corp_cli.measure.redundancy import BlockAnalysis
from corp_cli.measure.results import Count, Evaluation, File
from corp_cli.models.blocks import Sizes
from corp_cli.report.parts import CalibrationImages, Data, Images, JudgedImages, Model, NamedModel, Throughput
from corp_cli.runtime.environment import Environment, Memory

SCHEMA_VERSION: Literal[1] = 1  # of all five files
EVALUATION = "evaluation.json"
BENCH = "bench.json"
EXPORT = "export.json"
ANALYSIS = "analysis.json"


@dataclass(frozen=True)
class PrunedModel:
    """The dense model that was pruned."""

    name: str
    timm_name: str
    args: dict[str, Any]
    data: Data
    dense_sha256: str


@dataclass(frozen=True)
class Removed:
    """What is gone, in percent."""

    parameters: float
    macs: float


@dataclass(frozen=True)
class Size:
    """Size before and after."""

    dense: Count
    pruned: Count
    removed_percent: Removed


@dataclass(frozen=True)
class DamageCurve:
    """What a budget expected of cutting one group of one block to each of `sizes`; of "tokens", those that are left."""

    block: str
    group: str
    sizes: list[int]
    damage: list[float]  # nats per image, or 1 - cos of the features


@dataclass(frozen=True)
class Sparsity:
    """What was to be removed, and what was."""

    asked: dict[str, float]  # by group
    achieved: dict[str, float]  # by group, of those that the model has
    skipped: list[str]
    last_block_tokens: int | None
    merged_tokens: list[int] | None
    predicted_kl: float | None
    predicted_speedup: float | None
    curves: list[DamageCurve]


@dataclass(frozen=True)
class PruneEvaluation(JudgedImages):
    """The models of a run, and the images that they were judged on."""

    held_out: bool
    precision: str
    dense: Evaluation
    uncompensated: Evaluation
    pruned: Evaluation


@dataclass(frozen=True)
class PruneThroughput(Throughput):
    """Of the dense and the pruned model."""

    speedup: float


@dataclass(frozen=True)
class Error:
    """Energy of the error of a group over that of what is reconstructed."""

    before: float
    after: float


@dataclass(frozen=True)
class Refit:
    """What gauss_newton did to an MLP, or reduced_rank to some heads; errors are relative to what they should give."""

    rounds: int  # taken
    ridges: list[float]  # of each round
    fitted: Error  # on the images fitted
    held_out: Error  # on those kept aside, which decide


@dataclass(frozen=True)
class PrunedBlock:
    """One block."""

    name: str
    dense: Sizes
    pruned: Sizes
    reconstruction_error: dict[str, Error]  # by group, of those that were cut
    mlp_fit: Refit | None
    vo_fits: list[Refit]  # of every group of heads


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """Everything a run of `corp prune` found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: PrunedModel
    config: dict[str, Any]
    seed: int
    environment: Environment
    size: Size
    sparsity: Sparsity
    calibration: CalibrationImages
    evaluation: PruneEvaluation
    throughput: PruneThroughput | None
    blocks: list[PrunedBlock]
    export: list[File] | None
    stage_seconds: dict[str, float]
    peak_memory_mib: Memory
    warnings: list[str]

    def __repr__(self) -> str:
        """In short; asdict() has it all."""
        removed = self.size.removed_percent
        return f"<Report of {self.model.name}: -{removed.parameters:.1f}% parameters, -{removed.macs:.1f}% MACs>"


@dataclass(frozen=True)
class Results:
    """The model evaluated, and the one that its fidelity is to."""

    model: Evaluation
    reference: Evaluation | None


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Everything that `corp evaluate` found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: Model
    reference: Model | None
    config: dict[str, Any]
    seed: int
    environment: Environment
    precision: str
    images: JudgedImages
    results: Results
    throughput: Throughput | None
    stage_seconds: dict[str, float]
    peak_memory_mib: Memory
    warnings: list[str]


@dataclass(frozen=True)
class TimedSize:
    """Size of the models."""

    dense: Count
    pruned: Count | None


@dataclass(frozen=True)
class Timing:
    """One model at one dtype and batch size: forward passes timed, milliseconds per pass, and what follows of them."""

    runs: int
    p50_ms: float
    p95_ms: float
    images_per_second: float  # at the median
    gmacs_per_second: float  # at the median
    peak_memory_mib: float | None  # weights and activations; None where the device does not count them


@dataclass(frozen=True)
class Timings:
    """Both models in turns; None where one was not timed."""

    dense: Timing | None = None
    pruned: Timing | None = None


@dataclass(frozen=True)
class Setting:
    """All models at one dtype and batch size; `failure` says why there are no timings."""

    dtype: str
    batch_size: int
    timings: Timings
    speedup: float | None  # dense over pruned, of the median passes
    failure: str | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything that `corp bench` found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: NamedModel
    size: TimedSize
    config: dict[str, Any]
    environment: Environment
    settings: list[Setting]
    peak_memory_mib: Memory
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Everything that `corp export` found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: Model
    config: dict[str, Any]
    seed: int
    environment: Environment
    images: JudgedImages
    calibration: Images | None
    pytorch: Evaluation
    files: list[File]
    throughput: Throughput | None
    stage_seconds: dict[str, float]
    peak_memory_mib: Memory
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class AnalysisReport:
    """Everything that `corp analyze` found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: Model
    config: dict[str, Any]
    seed: int
    environment: Environment
    calibration: Images
    effective_rank: Literal["participation ratio"] = "participation ratio"
    threshold: float  # below which an activation counts as zero
    blocks: list[BlockAnalysis]
    stage_seconds: dict[str, float]
    peak_memory_mib: Memory
    warnings: list[str]


FILES = {
    REPORT: Report,
    EVALUATION: EvaluationReport,
    BENCH: BenchReport,
    EXPORT: ExportReport,
    ANALYSIS: AnalysisReport,
}
