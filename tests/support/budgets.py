"""A tiny DeiT that is only counted, and runs on a few digits, for tests of sizes."""

from __future__ import annotations

from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import PruneConfig, SparsityConfig
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import skeleton
from corp_cli.models.spec import ModelSpec
from tests.support.variants import SMALL

SPEC = ModelSpec("deit_tiny_patch16_224", SMALL, {"input_size": [3, 32, 32]})
BLOCKS = blocks_of(skeleton(SPEC))
DENSE = tuple(block.sizes for block in BLOCKS)


def run(sparsity: SparsityConfig) -> PruneConfig:
    """Prune the bundled model, on a few of its images."""
    return PruneConfig(
        sparsity=sparsity,
        calibration=CalibrationConfig(num_images=48, num_workers=0),
        evaluation=EvaluationConfig(num_images=32, num_workers=0, throughput_batches=0),
        device="cpu",
    )
