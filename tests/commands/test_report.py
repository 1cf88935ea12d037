"""`corp report`: which runs it shows, what it writes and where."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from corp_cli.cli.main import main
from corp_cli.report import plots
from tests.support.reports import lay, report
from tests.support.typed import files, one_sentence

pytestmark = pytest.mark.usefixtures("empty_folder")
PNG = b"\x89PNG\r\n"


@pytest.fixture
def two(empty_folder: None) -> None:
    lay(Path("runs/a"), report(macs=6_000_000, sparsity={"macs": 0.5}))
    lay(Path("runs/deep/b"), report(macs=8_000_000, sparsity={"macs": 0.3}))


@pytest.mark.usefixtures("two")
def test_all_runs_below_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == (
        "2 runs of vit with 33% to 50% fewer MACs; 50% fewer cost at most 1 point of top-1.\n"
        "Wrote report.html, report.csv and report.png to runs.\n"
    )
    assert {path for path in files() if "report.json" not in path} == {
        f"runs/report.{kind}" for kind in ("csv", "html", "png")
    }
    assert main(["summary", "runs"]) == 0
    assert Path("runs/report.csv").read_text() == Path("runs/summary.csv").read_text()
    assert Path("runs/report.png").read_bytes().startswith(PNG)
    html = Path("runs/report.html").read_text()
    assert html.index("deep/b") < html.index(">a<")  # by the setting that differs
    assert "sparsity.macs" in html


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("argv", "names", "into"),
    [
        (["runs/a"], ["."], "runs/a"),
        (["runs/a/report.json"], ["."], "runs/a"),
        (["runs/deep", "runs/a"], ["deep/b", "a"], "."),
        (["runs", "runs/a"], ["deep/b", "a"], "."),  # each once
        (["runs/a", "runs/deep", "output=out/side"], ["deep/b", "a"], "out/side"),
        (["runs=[runs/a,runs/deep]", "output=out"], ["deep/b", "a"], "out"),
        (["runs=runs/a", "output=out"], ["."], "out"),
    ],
)
def test_which_runs_and_where_to(argv: list[str], names: list[str], into: str) -> None:
    assert main(["report", *argv]) == 0
    assert Path(into, "report.html").is_file()
    with Path(into, "report.csv").open() as file:
        assert [row["folder"] for row in csv.DictReader(file)] == names


def test_what_cannot_be_shown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lay(Path("runs/good"), report())
    content = report()
    del content["size"]["dense"]["macs"]
    lay(Path("runs/odd"), content)
    lay(Path("runs/old"), {**report(), "schema_version": 0})
    assert main(["report", "runs"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("vit with 50.0% fewer MACs is right on 90.0% of the images; before, on 90.0%.\n")
    assert "left out: odd/report.json lacks size.dense.macs" in said.err
    assert said.err.count("left out") == 2


@pytest.mark.usefixtures("two")
def test_without_what_draws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert main(["report", "runs"]) == 0
    assert not Path("runs/report.png").exists()
    assert "Wrote report.html and report.csv to runs." in (out := capsys.readouterr().out)
    assert "pip install matplotlib" in out


def test_features_and_a_run_without_measures_have_what_they_can(capsys: pytest.CaptureFixture[str]) -> None:
    lay(Path("features"), report("features"))
    assert main(["report", "features"]) == 0
    content = report()
    for model in ("dense", "uncompensated", "pruned"):
        content["evaluation"][model] = {}
    lay(Path("nothing"), content)
    assert main(["report", "nothing"]) == 0
    assert "Wrote report.html and report.csv to nothing" in capsys.readouterr().out
    assert "against MACs" not in Path("nothing/report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["corp report outputs"]),
        (["runs=[1]"], ["corp report outputs"]),
        (["nowhere"], ["nowhere is neither a folder nor a report.json"]),
        (["empty"], ["no report.json in or below empty"]),
        (["runs=a,b"], ["runs=[a,b]"]),
        (["runs", "outptu=x"], ["did you mean output?"]),
    ],
)
def test_mistakes(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["report", *argv]) == 2
    one_sentence(capsys, words)
    assert files() == []


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["report.html", "report.csv", "report.png"])
def test_what_cannot_be_written_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out", name).mkdir(parents=True)
    assert main(["report", "runs", "output=out"]) == 2
    one_sentence(capsys, [f"out/{name} cannot be written", "set output to another folder"])


@pytest.mark.usefixtures("two")
def test_an_output_that_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").touch()
    assert main(["report", "runs", "output=taken"]) == 2
    one_sentence(capsys, ["taken", "output"])
