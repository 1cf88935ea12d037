"""Baselines as a user asks for them: every ranker with every repair, resumed, and in the table of scripts/."""

from __future__ import annotations

import csv
import runpy
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from corp_cli import load_config, pipeline, prune
from corp_cli.cli.main import main
from corp_cli.config.prune import CompensationConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.cache import Cache
from corp_cli.files.cache.scores import LossFiles
from corp_cli.models.blocks import Sizes
from tests.files.test_resume import interrupt_at
from tests.support.budgets import run
from tests.support.documents import ROOT
from tests.support.typed import UNTIMED

CONFIGS = Path(__file__).parents[1] / "configs"
FEW = [*UNTIMED, "ranker.optin_images=2"]

pytestmark = pytest.mark.usefixtures("tiny_digits")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@cache
def repair_of(name: str) -> CompensationConfig:
    return load_config(f"compensation={name}").compensation


@pytest.mark.parametrize("ranker", choices("ranker"))
def test_every_repair_goes_with_every_ranker(ranker: str, tmp_path: Path) -> None:
    cfg = run(SparsityConfig(mlp=0.5, qk=0.5, vo=0.5, heads=0.5))
    cfg = replace(cfg, ranker=load_config(f"ranker={ranker}", "ranker.optin_images=2").ranker)
    for repair in choices("compensation"):
        report = prune(replace(cfg, compensation=repair_of(repair)), cache=Cache(own=tmp_path)).report
        assert report.blocks[-1].pruned == Sizes(mlp=32, qk=8, vo=8, heads=1)
        assert (report.evaluation.pruned.kl == report.evaluation.uncompensated.kl) == (repair == "none")


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


def test_a_model_that_cannot_be_walked_through_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp_cli.prepare.work.cannot_walk", lambda model: "it is odd")
    with pytest.raises(CorpError, match="ranker optin goes on from block to block, and it is odd; choose another"):
        prune(load_config("ranker=optin", "sparsity.mlp=0.5", *FEW))


def test_the_table_goes_on_after_a_row_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "vit_digits", "--kinds", "macs", "--removed", "0.3", "--num-images", "48", "--num-workers", "0"]
    rows = ["--rows", "kcm, none", "best, no", "--cache", str(tmp_path), "--csv", str(tmp_path / "table.csv")]
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = runpy.run_path(str(ROOT / "scripts/baselines.py"))["main"]

    def fails(cfg: PruneConfig) -> pipeline.PruneResult:
        if cfg.recipe == "best" and cfg.sparsity.macs:
            raise ValueError("no such luck")
        return prune(cfg)

    monkeypatch.setitem(script.__globals__, "prune", fails)
    monkeypatch.setattr(sys, "argv", ["baselines.py", *given, *rows])
    script()
    with (tmp_path / "table.csv").open() as file:
        head, kcm, best = csv.reader(file)
    assert tuple(head) == script.__globals__["COLUMNS"]
    assert kcm[:3] == ["macs -30%", "kcm", "none"]
    assert 0.6 < float(kcm[4]) <= 0.7
    assert best[1] == "best, no merging"
    assert best[-1] == "failed: ValueError: no such luck"
    assert "no such luck" in capsys.readouterr().out
