"""`corp summary`: runs below a folder side by side, whoever started them; what cannot be compared is named."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli.main import main
from tests.support.typed import UNTIMED, one_sentence

pytestmark = pytest.mark.usefixtures("empty_folder")


def write(folder: str, macs: int = 5, top1: float | None = 90.0, version: int = 1, **config: Any) -> None:
    """A report as far as it is compared."""
    found = {"top1": top1, "top5": None, "agreement": 99.5, "kl": 0.25}
    content = {
        "schema_version": version,
        "model": {"timm_name": "vit", "dense_sha256": "0", "data": {}},
        "config": config,
        "size": {name: {"parameters": 7, "macs": macs} for name in ("dense", "pruned")},
        "evaluation": {"list_sha256": "1", "labelled_images": 0, "pruned": found, "dense": found},
        "throughput": None,
    }
    Path(folder).mkdir(parents=True)
    Path(folder, "report.json").write_text(json.dumps(content))


def rows(path: str = "summary.csv") -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_settings_that_differ_are_columns_and_sort(capsys: pytest.CaptureFixture[str]) -> None:
    same: dict[str, Any] = {"seed": 0, "model": {"name": "vit", "args": {}}}
    write("runs/10", macs=4, sparsity={"joint": 0.5, "mlp": None}, ranker={"mlp": "obs"}, **same)
    write("runs/9", macs=6, sparsity={"joint": 0.25, "mlp": None}, ranker={"mlp": "obs"}, **same)
    write("runs/deep/in/side", sparsity={"joint": None, "mlp": 0.5}, ranker={"mlp": "random"}, **same, later=True)
    write("runs/11", sparsity={"joint": 0.5, "mlp": None}, ranker={"mlp": "activation"}, **same)
    assert main(["summary", "runs"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.endswith("Wrote summary.csv to runs, of 4 runs.\n")
    found = rows("runs/summary.csv")
    settings = ["sparsity.joint", "sparsity.mlp", "ranker.mlp", "later"]
    figures = ["parameters", "macs", "top1", "agreement", "kl", "images_per_second", "speedup"]
    assert list(found[0]) == [*settings, *figures, "folder"]
    assert [row["folder"] for row in found] == ["9", "11", "10", "deep/in/side"]
    assert [row["sparsity.joint"] for row in found] == ["0.25", "0.5", "0.5", "null"]
    assert [row["later"] for row in found] == ["", "", "", "true"]
    assert (found[0]["macs"], found[0]["top1"], found[0]["kl"], found[0]["speedup"]) == ("6", "90.0", "0.25", "")
    order = [said.out.index(text) for text in ("│ 0.25", "activation", "deep/in/side")]
    assert order == sorted(order)


def test_folders_are_sorted_by_their_numbers() -> None:
    for name in ("run10", "run9", "run[red]"):
        write(name)
    assert main(["summary", "folder=."]) == 0
    assert [row["folder"] for row in rows()] == ["run9", "run10", "run[red]"]


def test_what_cannot_be_compared_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write("good", top1=None)
    write("old", version=0)
    for name, content in (("cut", b'{"schema'), ("other", b"[1]"), ("bytes", b"\xff"), ("deep", b"[" * 99999)):
        Path(name).mkdir()
        Path(name, "report.json").write_bytes(content)
    Path("folder/report.json").mkdir(parents=True)
    assert main(["summary", "."]) == 0
    said = capsys.readouterr()
    assert [row["folder"] for row in rows()] == ["good"]
    lines = said.err.splitlines()
    assert len(lines) == 5
    for name in ("old", "cut", "other", "bytes", "deep"):
        assert sum(line.startswith(f"corp: warning: left out: {name}/report.json") for line in lines) == 1


def test_nothing_found(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["summary", "empty"]) == 2
    one_sentence(capsys, ["no report.json below empty"])
    assert not list(Path("empty").iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["corp summary outputs"]),
        (["nowhere"], ["nowhere is not a folder"]),
        (["a", "b"], ["one folder at a time"]),
        (["foldr=a"], ["did you mean folder?"]),
    ],
)
def test_mistakes(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", *argv]) == 2
    one_sentence(capsys, words)


def test_summary_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    write("run")
    Path("summary.csv").mkdir()
    assert main(["summary", "."]) == 2
    said = capsys.readouterr()
    assert "run" in said.out  # the table is shown all the same
    assert "summary.csv cannot be written" in said.err


@pytest.mark.usefixtures("tiny_digits")
def test_runs_of_a_loop_and_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of the sweep's own summary.csv."""
    assert main(["prune", *UNTIMED, "sparsity.joint=0.75", "hydra.run.dir=runs/one"]) == 0
    assert main(["prune", "-m", *UNTIMED, "sparsity.joint=0.25,0.5", "hydra.sweep.dir=runs/sweep"]) == 0
    assert main(["summary", "runs"]) == 0
    found, before = rows("runs/summary.csv"), rows("runs/sweep/summary.csv")
    assert [(row["sparsity.joint"], row["folder"]) for row in found] == [
        ("0.25", "sweep/0"),
        ("0.5", "sweep/1"),
        ("0.75", "one"),
    ]
    for row, same in zip(found, before, strict=False):
        for column in ("parameters", "macs", "top1", "agreement", "kl"):
            assert row[column] == same[column] != ""
