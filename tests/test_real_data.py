"""Reproduction of the paper's method on DeiT-Tiny: calibrated on calib (1000 images), accuracy on nips1000."""

from __future__ import annotations

from pathlib import Path

import pytest

from corp_cli.config import CalibrationConfig, EvaluationConfig, ModelConfig, PruneConfig, SparsityConfig
from corp_cli.pipeline import prune

pytestmark = pytest.mark.real_data


def test_paper_recipe_at_joint_half(real_data: Path) -> None:
    report = prune(
        PruneConfig(
            model=ModelConfig("deit_tiny_patch16_224", checkpoint=str(real_data / "deit_tiny_patch16_224.safetensors")),
            sparsity=SparsityConfig(joint=0.5),
            calibration=CalibrationConfig(path=str(real_data / "calib"), num_images=1000),
            evaluation=EvaluationConfig(path=str(real_data / "nips1000"), throughput_batches=0),
            device="cpu",
        )
    ).report
    assert report.evaluation["dense"]["top1"] == pytest.approx(83.0, abs=0.3)
    assert report.evaluation["pruned"]["top1"] == pytest.approx(41, abs=2)
    assert report.evaluation["pruned"]["kl"] == pytest.approx(1.36, abs=0.1)
    assert report.size["pruned"]["parameters"] == 3_498_664
