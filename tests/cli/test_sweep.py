"""What `-m` adds to its jobs: summary.csv and a table, failed jobs marked."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from corp_cli.cli.main import main
from tests.support.typed import QUICK, UNTIMED

pytestmark = pytest.mark.usefixtures("tiny_digits")


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_reports_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ["sparsity.joint=0.25,0.5", "evaluation.throughput_batches=1"]
    assert main(["prune", "-m", *QUICK, *jobs, f"hydra.sweep.dir={tmp_path}"]) == 0
    rows = read(tmp_path / "summary.csv")
    assert [(row["job"], row["status"], row["folder"]) for row in rows] == [("0", "ok", "0"), ("1", "ok", "1")]
    assert ["sparsity.joint=0.25" in row["overrides"] for row in rows] == [True, False]
    assert int(rows[0]["parameters"]) > int(rows[1]["parameters"]) > 0
    assert int(rows[0]["macs"]) > int(rows[1]["macs"]) > 0
    assert float(rows[0]["kl"]) < float(rows[1]["kl"])
    assert all(float(row["images_per_second"]) > 0 and row["error"] == "" for row in rows)
    out = capsys.readouterr().out
    table = out[out.rindex("overrides") :]
    assert f"{int(rows[1]['parameters']):,}" in table
    assert f"Wrote summary.csv to {tmp_path}" in out


def test_the_table_shows_what_jobs_do_not_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As typed, brackets too; summary.csv has all overrides."""
    jobs = [*UNTIMED, "compensation=mean", "objective=[macs,kl],[kl,macs]"]
    assert main(["prune", "-m", *jobs, f"hydra.sweep.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    table = out[out.rindex("overrides") :]
    assert "objective=[macs,kl]" in table
    assert "objective=[kl,macs]" in table
    assert "compensation" not in table
    assert all("compensation=mean" in row["overrides"] for row in read(tmp_path / "summary.csv"))


def test_failed_jobs_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ["calibration.path=null,nowhere", "evaluation.throughput_batches=0"]
    assert main(["prune", "-m", *QUICK, *jobs, f"hydra.sweep.dir={tmp_path}"]) == 2
    good, bad = read(tmp_path / "summary.csv")
    assert (good["status"], bad["status"]) == ("ok", "failed")
    assert "nowhere" in bad["error"]
    assert (good["images_per_second"], bad["parameters"], bad["folder"]) == ("", "", "")
    captured = capsys.readouterr()
    assert "failed" in captured.out
    assert captured.err.splitlines()[-1].startswith("corp: job 1 (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "multirun.yaml", "summary.csv"]


def test_summary_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.csv").mkdir()
    args = [*QUICK, "seed=1", "evaluation.throughput_batches=0"]
    assert main(["prune", "-m", *args, f"hydra.sweep.dir={tmp_path}"]) == 2
    assert "summary.csv cannot be written" in capsys.readouterr().err
    assert (tmp_path / "0/report.json").is_file()


def test_a_family_of_budgets_calibrates_and_measures_curves_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ["sparsity.macs=0.3,0.4,0.5", "evaluation.throughput_batches=0", "sparsity.curve_images=16"]
    assert main(["prune", "-m", *QUICK, *jobs, f"hydra.sweep.dir={tmp_path}"]) == 0
    said = capsys.readouterr().err
    assert said.count("statistics of 64 images read from") == 2
    assert said.count("damage curves read from") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "multirun.yaml", "summary.csv"]
    rows = read(tmp_path / "summary.csv")
    assert int(rows[0]["macs"]) > int(rows[1]["macs"]) > int(rows[2]["macs"])
