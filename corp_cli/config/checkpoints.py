"""The schema of the commands that open a pruned.safetensors or a dense model: info, evaluate, bench and export.

Imports neither torch nor timm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional

from corp_cli.config.export import DEFAULT_OPSET, FORMATS, WEIGHTS, ExportOptions, RangesConfig, require_export
from corp_cli.config.images import DTYPES, DataConfig, EvaluationConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.config.ranges import require_at_least, require_choice, words
from corp_cli.errors import CorpError


@dataclass
class InfoConfig:
    """Everything `corp info` can be told."""

    checkpoint: Optional[str] = None  # a pruned.safetensors

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            raise CorpError("Say which checkpoint to describe: corp info checkpoint=path/to/pruned.safetensors")


@dataclass
class OptionalModelConfig(ModelConfig):
    """A model that need not be given: `name` is empty then."""

    name: str = ""


@dataclass
class EvaluateConfig:
    """Everything `corp evaluate` can be told. With both `checkpoint` and `model`, the latter is the reference."""

    checkpoint: Optional[str] = None  # a pruned.safetensors
    model: OptionalModelConfig = field(default_factory=OptionalModelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0  # of the choice of images, with evaluation.num_images
    device: str = "auto"

    def __post_init__(self) -> None:
        require_at_least("", self, seed=0)
        if self.checkpoint is None and not self.model.name:
            raise CorpError(
                "Say what to evaluate: corp evaluate checkpoint=path/to/pruned.safetensors, model=deit_tiny for a "
                "dense model, or both to compare them."
            )


@dataclass
class BenchConfig:
    """Everything `corp bench` can be told."""

    checkpoint: Optional[str] = None  # a pruned.safetensors, timed in turn with the dense model that it came from
    model: OptionalModelConfig = field(default_factory=OptionalModelConfig)  # a dense model, timed alone
    batch_sizes: List[int] = field(default_factory=lambda: [1, 8, 32])
    dtypes: Any = field(default_factory=lambda: list(DTYPES))  # several, or one without brackets
    runs: int = 50  # timed forward passes of each model at each dtype and batch size
    max_seconds: float = 10.0  # then a setting ends early, after three runs at the least
    device: str = "auto"

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (not self.model.name):
            raise CorpError(
                "Say what to time: corp bench checkpoint=path/to/pruned.safetensors, which brings its dense model "
                "along, or model=deit_tiny for a dense model alone."
            )
        self.dtypes = words("dtypes", self.dtypes, DTYPES)
        for key in ("batch_sizes", "dtypes"):
            if not getattr(self, key):
                raise CorpError(f"{key}=[] is empty; give at least one.")
        require_at_least("", self, batch_sizes=1, runs=1, max_seconds=0)
        require_choice("", self, dtypes=DTYPES)


@dataclass
class ExportConfig:
    """Everything `corp export` can be told."""

    checkpoint: Optional[str] = None  # a pruned.safetensors
    model: OptionalModelConfig = field(default_factory=OptionalModelConfig)  # or a dense model
    format: str = "onnx"
    dtype: str = "float32"  # of the weights
    int8: Any = "none"  # onnx: more files, quantised by ONNX Runtime; true is dynamic
    opset: int = DEFAULT_OPSET  # onnx
    calibration: RangesConfig = field(default_factory=RangesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0  # of the choice of images, and of random ones

    def __post_init__(self) -> None:
        require_at_least("", self, seed=0)
        if (self.checkpoint is None) == (not self.model.name):
            raise CorpError(
                "Say what to export: corp export checkpoint=path/to/pruned.safetensors, or model=deit_tiny for a "
                "dense model."
            )
        require_choice("", self, format=FORMATS, dtype=WEIGHTS)
        self.int8 = require_export("", [self.format], self.dtype, self.int8, self.opset)
        if self.evaluation.precision != "float32":
            raise CorpError(
                "corp export compares files with the PyTorch model in float32; leave out "
                f"evaluation.precision={self.evaluation.precision}, and see dtype."
            )

    def options(self) -> ExportOptions:
        """The same as of `corp prune`."""
        return ExportOptions([self.format], self.dtype, self.int8, self.calibration.num_images, self.opset)
