"""Baselines as a user asks for them: every ranker with every repair, resumed, and in the table of scripts/."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from corp_cli import load_config, pipeline, prune
from corp_cli.cli.main import main
from corp_cli.files.cache.cache import Cache
from corp_cli.files.cache.scores import LossFiles
from scripts import baselines
from tests.files.test_resume import interrupt_at
from tests.support.typed import UNTIMED

CONFIGS = Path(__file__).parents[1] / "configs"
FEW = [*UNTIMED, "ranker.optin_images=2", "calibration.num_images=48", "compensation.fit_tokens=256"]

pytestmark = pytest.mark.usefixtures("tiny_digits")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("ranker", choices("ranker"))
def test_every_repair_goes_with_every_ranker(ranker: str, tmp_path: Path) -> None:
    sizes = ["sparsity.joint=0.5", "sparsity.heads=0.5", "sparsity.vo=0.5"]
    for repair in choices("compensation"):
        cfg = load_config(f"ranker={ranker}", f"compensation={repair}", *sizes, *FEW)
        report = prune(cfg, cache=Cache(own=tmp_path)).report
        block, evaluation = report.blocks[-1], report.evaluation
        assert (block.pruned.mlp, block.pruned.qk, block.pruned.vo, block.pruned.heads) == (32, 8, 8, 1)
        assert (evaluation.pruned.kl == evaluation.uncompensated.kl) == (repair == "none")


def test_a_search_that_was_interrupted_masks_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["prune", "recipe=optin", "sparsity.macs=0.3", *FEW]
    assert main([*asked, f"hydra.run.dir={tmp_path}/whole"]) == 0
    interrupt_at(monkeypatch, pipeline, "choose_sizes", 0)
    with monkeypatch.context() as patch:
        interrupt_at(patch, LossFiles, "write", 2)
        assert main([*asked, f"hydra.run.dir={tmp_path}/stopped"]) == 130
    written = interrupt_at(monkeypatch, LossFiles, "write", 0)
    assert main(["prune", f"resume={tmp_path}/stopped"]) == 0
    assert written == [1]
    plans = [(tmp_path / run / "plan.yaml").read_text() for run in ("whole", "stopped")]
    assert plans[0] == plans[1]


def test_lambda_is_weighed_without_masking_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = interrupt_at(monkeypatch, LossFiles, "write", 0)
    asked = ["recipe=optin", "sparsity.macs=0.3", f"calibration.cache={tmp_path}", *FEW]
    plans = [prune(load_config(*asked, f"ranker.optin_lambda={weight}")).report.blocks for weight in (0, 1e6)]
    assert written == [2]
    assert plans[0] != plans[1]
    next(tmp_path.glob("trajectory-000-*")).write_text("{")
    prune(load_config(*asked))
    assert written == [3]


def test_a_model_that_cannot_be_walked_through_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["prune", "model.name=xcit_nano_12_p16_224", "model.pretrained=false", "ranker.mlp=optin"]
    assert main([*asked, "sparsity.mlp=0.5", f"calibration.path={CONFIGS}", "hydra.run.dir=unused"]) == 2


def test_the_table_goes_on_after_a_row_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "vit_digits", "--kinds", "macs", "--removed", "0.3", "--num-images", "48", "--num-workers", "0"]
    rows = ["--rows", "kcm, none", "best, no", "--cache", str(tmp_path), "--csv", str(tmp_path / "table.csv")]
    whole = baselines.prune

    def fails(cfg: pipeline.PruneConfig) -> pipeline.PruneResult:
        if cfg.recipe == "best" and cfg.sparsity.macs:
            raise ValueError("no such luck")
        return whole(cfg)

    monkeypatch.setattr(baselines, "prune", fails)
    monkeypatch.setattr(sys, "argv", ["baselines.py", *given, *rows])
    baselines.main()
    with (tmp_path / "table.csv").open() as file:
        head, kcm, best = csv.reader(file)
    assert tuple(head) == baselines.COLUMNS
    assert kcm[:3] == ["macs -30%", "kcm", "none"]
    assert 0.6 < float(kcm[4]) <= 0.7
    assert best[1] == "best, no merging"
    assert best[-1] == "failed: ValueError: no such luck"
    assert "no such luck" in capsys.readouterr().out
