"""`corp analyze` as it is typed: a table that fits a terminal, its files, and what it shares with other runs."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from corp_cli.cli.main import main
from tests.support.typed import UNTIMED, files

pytestmark = pytest.mark.usefixtures("empty_folder", "tiny_digits")

FEW = ["device=cpu", "calibration.num_images=48", "calibration.num_workers=0", "hydra.run.dir=out"]
PNG = b"\x89PNG\r\n\x1a\n"


def test_tables_fit_and_files_agree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["analyze", *FEW]) == 0
    *tables, definitions, wrote = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in tables)
    assert "participation ratio" in definitions
    assert "below 0.01 counts as zero" in definitions
    assert wrote.startswith("Wrote analysis.json, analysis.csv, analysis.png to ")
    assert Path("out/analysis.png").read_bytes().startswith(PNG)
    blocks = json.loads(Path("out/analysis.json").read_text())["blocks"]
    with open("out/analysis.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [block["name"] for block in blocks] == ["blocks.0", "blocks.1"]
    for row, block in zip(rows, blocks, strict=True):
        assert float(row["k.rank_ratio"]) == pytest.approx(block["k"]["rank_ratio"], rel=1e-5)
        shown = next(line for line in tables if block["name"] in line).split()
        assert shown[2] == f"{block['mlp']['effective_rank']:.1f}"


def test_what_a_run_under_a_budget_measured_is_not_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    cache = "calibration.cache=cache"
    assert main(["prune", *UNTIMED, *FEW, "hydra.run.dir=run", "recipe=paper", "sparsity.macs=0.3", cache]) == 0
    capsys.readouterr()
    assert main(["analyze", *FEW, cache]) == 0
    assert "statistics of 48 images read from" in " ".join(capsys.readouterr().err.split())
    assert len([name for name in files() if name.startswith("cache/statistics")]) == 1


def test_without_matplotlib_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("corp_cli.report.plots.find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["analyze", *FEW]) == 0
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if "matplotlib" in line]
    assert lines == ["corp: no analysis.png, which matplotlib draws; run: pip install 'matplotlib>=3.8,<4'"]
    assert "Wrote analysis.json, analysis.csv to " in said.out
    assert "out/analysis.png" not in files()
