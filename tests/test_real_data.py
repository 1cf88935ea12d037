"""DeiT-Tiny on real images: calibrated on calib (1000 images), accuracy on nips1000."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corp_cli.commands.evaluate import evaluate_command
from corp_cli.config.checkpoints import EvaluateConfig, OptionalModelConfig
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import CompensationConfig, ModelConfig, PruneConfig, SparsityConfig
from corp_cli.pipeline import prune
from corp_cli.report.schema import Report
from tests.support.figures import known
from tests.support.recipes import PAPER

pytestmark = pytest.mark.real_data


def run(real_data: Path, calibration_images: int, evaluation_images: int | None, **parts: Any) -> Report:
    cfg = PruneConfig(
        model=ModelConfig("deit_tiny_patch16_224", checkpoint=str(real_data / "deit_tiny_patch16_224.safetensors")),
        sparsity=SparsityConfig(joint=0.5),
        calibration=CalibrationConfig(path=str(real_data / "calib"), num_images=calibration_images),
        evaluation=EvaluationConfig(
            path=str(real_data / "nips1000"), num_images=evaluation_images, throughput_batches=0
        ),
        device="cpu",
        **parts,
    )
    return prune(cfg).report


@pytest.mark.slow
def test_paper_recipe_at_joint_half(real_data: Path) -> None:
    report = run(real_data, 1000, None, **PAPER)
    assert report.evaluation.dense.top1 == pytest.approx(83.0, abs=0.3)
    assert report.evaluation.pruned.top1 == pytest.approx(41, abs=2)
    assert report.evaluation.pruned.kl == pytest.approx(1.36, abs=0.1)
    assert report.size.pruned.parameters == 3_498_664


@pytest.mark.slow
def test_best_recipe_at_joint_half_on_few_images(real_data: Path) -> None:
    """128 calibration images, 300 of nips1000: still far beyond the paper's method with all of them."""
    report = run(real_data, 128, 300, compensation=CompensationConfig(fit_tokens=8192))
    assert known(report.evaluation.pruned.top1) >= 60
    assert known(report.evaluation.pruned.kl) <= 0.65
    assert report.size.pruned.parameters == 3_498_664


def test_a_folder_of_ten_classes_is_scored_among_a_thousand(real_data: Path, tmp_path: Path) -> None:
    """WordNet-named folders keep their places in the head, however few they are."""
    for name in sorted(folder.name for folder in (real_data / "nips1000").iterdir() if folder.is_dir())[:10]:
        (tmp_path / name).symlink_to(real_data / "nips1000" / name, target_is_directory=True)
    weights = str(real_data / "deit_tiny_patch16_224.safetensors")
    cfg = EvaluateConfig(
        model=OptionalModelConfig("deit_tiny_patch16_224", checkpoint=weights),
        evaluation=EvaluationConfig(path=str(tmp_path), throughput_batches=0),
        device="cpu",
    )
    (tmp_path / "out").mkdir()
    found = evaluate_command(cfg, tmp_path / "out")
    assert found.images.labelled_images == found.images.images >= 10
    assert known(found.results.model.top1) >= 60
    assert found.warnings == []
