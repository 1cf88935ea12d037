"""The schema of `corp analyze`. Imports neither torch nor timm."""

from __future__ import annotations

from dataclasses import dataclass, field

from corp_cli.config.images import CalibrationConfig, DataConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.config.ranges import require_at_least


@dataclass
class AnalyzeConfig:
    """Everything `corp analyze` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    threshold: float = 0.01  # activations whose absolute value is below it count as zero
    seed: int = 0  # of the choice of images
    device: str = "auto"

    def __post_init__(self) -> None:
        require_at_least("", self, seed=0, threshold=0)
