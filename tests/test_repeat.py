"""The same config, seed and machine give the same bits, also from the config that a run saved, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli.main import main
from tests.support.typed import UNTIMED

QUICK = ["seed=5", *UNTIMED]
SETTINGS = ["sparsity.mlp=0.3", "sparsity.vo=0.25", "ranker=random", "compensation.ridge_lambda=0.01"]
TIMED = ("throughput", "stage_seconds", "peak_memory_mib")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def corp(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "corp_cli", *args], check=True, capture_output=True)


def untimed(run: Path) -> dict[str, Any]:
    report = json.loads((run / "report.json").read_text())
    return {key: value for key, value in report.items() if key not in TIMED}


@pytest.mark.slow
def test_a_saved_config_repeats_its_run_bit_for_bit(tmp_path: Path) -> None:
    corp("prune", *QUICK, *SETTINGS, "hydra.run.dir=first")
    corp("prune", "--config-dir", "first/.hydra", "--config-name", "config", "hydra.run.dir=again")
    first, again = tmp_path / "first", tmp_path / "again"
    assert (again / "pruned.safetensors").read_bytes() == (first / "pruned.safetensors").read_bytes()
    assert (again / ".hydra/config.yaml").read_text() == (first / ".hydra/config.yaml").read_text()
    assert untimed(again) == untimed(first)
    assert untimed(first)["seed"] == 5
    assert len(untimed(first)["calibration"]["list_sha256"]) == 64
    zero = [f"gate.{key}=0" for key in ("top1_drop", "top5_drop", "agreement_drop", "kl", "macs", "params")]
    assert main(["check", "again/report.json", "--against", "first/report.json", *zero]) == 0


@pytest.mark.usefixtures("tiny_digits")
def test_two_runs_under_a_budget_report_the_same(tmp_path: Path) -> None:
    for run in ("first", "again"):
        assert main(["prune", *QUICK, "sparsity.macs=0.4", f"hydra.run.dir={run}"]) == 0
    first, again = tmp_path / "first", tmp_path / "again"
    assert untimed(again) == untimed(first)
    assert (again / "pruned.safetensors").read_bytes() == (first / "pruned.safetensors").read_bytes()
    assert (again / "plan.yaml").read_text() == (first / "plan.yaml").read_text()


@pytest.mark.usefixtures("tiny_digits")
def test_another_seed_chooses_other_images(tmp_path: Path) -> None:
    assert main(["prune", *QUICK, "hydra.run.dir=first"]) == 0
    saved = ["--config-dir", "first/.hydra", "--config-name", "config"]
    assert main(["prune", *saved, "seed=6", "hydra.run.dir=b"]) == 0
    first, second = (untimed(tmp_path / name)["calibration"]["list_sha256"] for name in ("first", "b"))
    assert first != second
