"""`corp study`: rows of a config are runs, done ones are not run again, failed ones say why; the paper's numbers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from corp_cli import pipeline
from corp_cli.cli.compose import config_dir
from corp_cli.cli.main import main
from corp_cli.commands import study
from corp_cli.config.study import ExperimentConfig
from tests.support.documents import ROOT
from tests.support.typed import UNTIMED, files, one_sentence

pytestmark = pytest.mark.usefixtures("empty_folder", "tiny_digits")

PNG = b"\x89PNG\r\n\x1a\n"
EXPERIMENTS = sorted((config_dir() / "experiment").glob("*.yaml"))
LONG = ("calibration_size", "figure2", "figure3", "pareto")  # every row is composed
PAPER = ROOT.parent / "shared" / "papers" / "corp.md"
TWO = """\
# Two rows.
name: two
title: Two rows
overrides: [recipe=paper]
rows:
  - {label: MLP, overrides: ["sparsity.mlp={x}"]}
  - {label: "Q, K", overrides: ["sparsity.qk={x}"]}
values: [0.5]
show: [macs, top1, kl]
paper:
  vit_digits: {MLP 0.5: {top1: 12.3}, OPT-IN: {top1: 45.6}}
"""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was pruned, in order."""
    made: list[Any] = []
    prune = pipeline.prune

    def counted(cfg: Any, *args: Any) -> Any:
        made.append(cfg)
        return prune(cfg, *args)

    monkeypatch.setattr(study, "prune", counted)
    return made


def carry_out(text: str, *more: str) -> int:
    Path("conf/experiment").mkdir(parents=True, exist_ok=True)
    Path("conf/experiment/two.yaml").write_text(text)
    return main(["study", "--config-dir", "conf", "experiment=two", *UNTIMED, "hydra.run.dir=out", *more])


def rows() -> list[dict[str, str]]:
    with open("out/results.csv") as file:
        return list(csv.DictReader(file))


def test_rows_are_runs_and_done_ones_are_not_run_again(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out(TWO) == 0
    assert [(cfg.sparsity.mlp, cfg.sparsity.qk, cfg.recipe) for cfg in runs] == [
        (0.5, None, "paper"),
        (None, 0.5, "paper"),
    ]
    out = capsys.readouterr().out
    first, second = rows()
    report = json.loads(Path("out", first["folder"], "report.json").read_text())
    assert float(first["top1"]) == report["evaluation"]["pruned"]["top1"]
    assert float(first["uncompensated_kl"]) == report["evaluation"]["uncompensated"]["kl"]
    assert (first["paper_top1"], second["paper_top1"]) == ("12.3", "")
    assert first["command"].startswith("corp prune recipe=paper ")
    assert first["command"].endswith(" sparsity.mlp=0.5 seed=0")
    assert "corp: 2 of 2, Q, K 0.5, seed 0: MACs " in out
    assert re.search(r"MLP 0\.5 .*\n +without repair .*\n +paper +12\.3", out)
    assert re.search(r"OPT-IN, paper +45\.6", out)
    assert Path("out/two.png").read_bytes().startswith(PNG)
    assert not [name for name in files() if "safetensors" in name or ".shared" in name]
    assert carry_out(TWO) == 0
    assert len(runs) == 2
    assert "was done before" in capsys.readouterr().out
    assert carry_out(TWO, "only=MLP", "compensation.mlp=mean", "experiment.seeds=[0,1]") == 0  # another config
    assert [(cfg.compensation.mlp, cfg.seed) for cfg in runs[2:]] == [("mean", 0), ("mean", 1)]
    assert re.search(r"MLP 0\.5 .* ±", capsys.readouterr().out)


def test_a_row_that_fails_says_why_and_does_not_end_the_study(
    runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = TWO.replace('["sparsity.mlp={x}"]', "[sparsity.plan=nowhere.yaml]")
    assert carry_out(text) == 2
    said = capsys.readouterr()
    assert "1 of 2 rows failed, and results.csv says why; the same command does only those again." in said.err
    assert "MLP 0.5, seed 0: failed: " in said.out
    first, second = rows()
    assert (first["status"], second["status"]) == ("failed", "ok")
    assert "nowhere.yaml" in first["error"]
    assert Path("out/two.png").is_file()
    assert carry_out(TWO) == 0  # mended: what was done is kept, what was measured is read
    assert [cfg.sparsity.qk for cfg in runs] == [None, 0.5, None]
    assert not [name for name in files() if ".shared" in name]


def test_weights_and_latency_where_they_are_asked_for() -> None:
    text = TWO.replace("show: [macs, top1, kl]", "show: [latency_ms]\npanels: [latency_ms]\nx: macs\nlatency: true")
    assert carry_out(text, "only=MLP", "keep_weights=true") == 0
    (row,) = rows()
    assert float(row["latency_ms"]) > 0
    assert f"out/{row['folder']}/pruned.safetensors" in files()


def test_mistakes_are_answered_before_any_work(capsys: pytest.CaptureFixture[str], runs: list[Any]) -> None:
    for text, words in (
        (TWO.replace("label: MLP", 'label: "Q, K"'), ["there twice"]),
        (TWO.replace("values: [0.5]", "values: []"), ["{x}", "experiment.values"]),
        (TWO.replace("sparsity.mlp={x}", "seed=1"), ["'MLP' does not say how much to remove"]),
        (TWO.replace("sparsity.mlp={x}", "sparsity.mpl={x}"), ["sparsity.mpl"]),
        (TWO.replace("show: [macs", "show: [macz"), ["experiment.show=macz"]),
    ):
        assert carry_out(text) == 2
        one_sentence(capsys, words)
    assert carry_out(TWO, "only=nothing") == 2
    one_sentence(capsys, ["only=nothing names no row; there are MLP, Q, K."])
    assert main(["study"]) == 2
    one_sentence(capsys, ["experiment=table1"])
    assert not runs
    assert files() == ["conf/experiment/two.yaml"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.stem, marks=[pytest.mark.slow] if one.stem in LONG else []) for one in EXPERIMENTS],
)
def test_every_experiment_is_understood(name: str, capsys: pytest.CaptureFixture[str], runs: list[Any]) -> None:
    assert main(["study", f"experiment={name}", "--dry-run"]) == 0
    loaded = OmegaConf.load(config_dir() / f"experiment/{name}.yaml")
    cfg: Any = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), loaded)
    assert cfg.name == name
    counts = [len(cfg["values"] if row["values"] is None else row["values"]) or 1 for row in cfg.rows]
    assert len(capsys.readouterr().out.splitlines()) == (sum(counts) * len(cfg.seeds) or 1)
    assert not runs
    assert not files()


# --- the paper's numbers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper() -> str:
    """The text of the paper."""
    if not PAPER.is_file():
        pytest.skip(f"the paper's text is not at {PAPER}")
    return PAPER.read_text("utf-8")


def printed(experiment: str, model: str) -> dict[str, dict[str, float]]:
    """What the config of an experiment has of the paper, for a size of DeiT."""
    found: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"experiment/{experiment}.yaml"))
    names = {"Tiny": "deit_tiny", "Small": "deit_small", "Base": "deit_base", "Large": "deit3_large"}
    names |= {"Huge": "deit3_huge_patch14_224"}
    (numbers,) = [of for name, of in found["paper"].items() if name.startswith(names[model])]
    return numbers


def line(paper: str, start: str) -> list[str]:
    """The cells of the line of a table that begins with `start`."""
    (found,) = [one.split("\t") for one in paper.splitlines() if one.startswith(f"{start}\t")]
    return found


@pytest.mark.parametrize("size", ["Tiny", "Small", "Base", "Large", "Huge"])
def test_table_1_is_the_papers(paper: str, size: str) -> None:
    cells = [float(cell) for cell in line(paper, size)[1:]]
    pairs = zip(("dense", "MLP", "Attn", "Both"), cells[::2], cells[1::2], strict=True)
    expected = {row: {"top1": top1, "top5": top5} for row, top1, top5 in pairs}
    assert printed("table1", size) == expected
    if size in ("Small", "Base", "Large"):
        points = {row if row == "dense" else f"{row} 0.5": {"top1": of["top1"]} for row, of in expected.items()}
        assert printed("figure2", size) == points


@pytest.mark.parametrize("name", ["DeiT-Small", "DeiT-Base", "DeiT3-Large", "DeiT3-Huge"])
def test_table_2_is_the_papers(paper: str, name: str) -> None:
    cells = dict(zip(("dense", "OPT-IN", "SNOW", "CORP"), line(paper, name)[1:], strict=True))
    expected = {row: {"top1": float(cell)} for row, cell in cells.items() if cell != "–"}
    assert printed("table2", name.partition("-")[2]) == expected


@pytest.mark.parametrize(("size", "short"), [("Base", "DeiT-B"), ("Huge", "DeiT-H")])
def test_table_3_is_the_papers(paper: str, size: str, short: str) -> None:
    lines = paper.splitlines()
    (start,) = [i for i, one in enumerate(lines) if one.startswith(f"{short}\t") and len(one.split("\t")) == 11]
    expected: dict[str, dict[str, float]] = {"dense": {"top1": float(lines[start].split("\t")[1])}}
    for text, x in zip(lines[start : start + 5], (0.25, 0.5, 0.625, 0.6875, 0.75), strict=True):
        shown, top1, params, macs, latency, fast, _, _, speedup = text.split("\t")[2:]
        assert abs(float(shown) - x) < 0.006
        row = {"parameters": 1e6 * float(params), "macs": 1e9 * float(macs)}
        row |= {} if top1 == "N.A." else {"top1": float(top1)}
        row |= {"latency_ms": float(latency), "images_per_second": float(fast), "speedup": float(speedup)}
        expected[f"CORP {x:g}"] = row
    found = printed("table3", size)
    assert found.keys() == expected.keys()
    for name, numbers in found.items():
        assert numbers == pytest.approx(expected[name]), name


def test_table_4_is_the_papers(paper: str) -> None:
    keys = ("channels", "effective_rank", "rank_ratio", "k95", "k95_ratio", "sparsity")
    expected = {}
    for i in range(12):
        cells = line(paper, f"blocks.{i}.mlp.act")[1:]
        expected[f"blocks.{i}"] = dict(zip(keys, map(float, cells), strict=True))
    assert printed("table4", "Base") == expected
