"""Runs of several processes: a run of two gives what a run of one gives, or one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned
from corp_cli.method import sequential
from corp_cli.models.bundled import BUNDLED
from tests.faults.forks import Outcome, corp, warm_up
from tests.support.several import corp_of
from tests.support.typed import UNTIMED


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What a run imports on first use is there for all children."""
    warm_up()


SHAPES = ["calibration.num_images=61", "evaluation.num_images=45", "calibration.batch_size=8"]  # parts of 30 and 31


# --- a run ----------------------------------------------------------------------------------------------------


def photos(folder: Path, count: int, bad: tuple[int, ...]) -> None:
    """Digits as files, some of which are cut off."""
    folder.mkdir()
    for i, image in enumerate(load_file(BUNDLED["vit_digits"].calibration)["images"][:count]):
        path = folder / f"{i:03}.png"
        Image.fromarray(image.squeeze().numpy()).save(path)
        if i in bad:
            path.write_bytes(path.read_bytes()[:40])


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    for part in ("settings", "stage_seconds", "peak_memory_mib"):
        content.pop(part, None)
    return content


def numbers(content: Any, at: str = "") -> dict[str, Any]:
    """Every value of a report under where it stands."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    if not parts:
        return {at: content}
    return {key: value for name, part in parts for key, value in numbers(part, f"{at}.{name}").items()}


def require_same_run(one: Path, other: Path) -> None:
    """The same sizes and kept units, and all figures within rounding."""
    plans = [(folder / "plan.yaml").read_text().partition("blocks:") for folder in (one, other)]
    assert plans[0][1:] == plans[1][1:]
    expected, found = numbers(report(one)), numbers(report(other))
    hashes = {key for key in expected if "sha256" in key and "pruned" in key}
    assert expected.keys() == found.keys()
    for key in expected.keys() - hashes:
        if isinstance(expected[key], float):
            rel = 1e-2 if ".curves." in key else 1e-3  # between the anchors they go by error curves, which part more
            assert found[key] == pytest.approx(expected[key], rel=rel, abs=1e-6), key
        else:
            assert found[key] == expected[key], key
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    models = [load_pruned(folder / "pruned.safetensors") for folder in (one, other)]
    outputs = [model(x) for model in models]
    assert (outputs[0] - outputs[1]).norm() < 1e-3 * outputs[0].norm()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def said(outcomes: list[Outcome]) -> list[str]:
    """All lines of corp, but that it is at work."""
    lines = [line for outcome in outcomes for line in outcome.err.splitlines() if line.startswith("corp: ")]
    return [line for line in lines if not re.search("images are seen at|processes share the images", line)]


FEW = ["calibration.num_images=2", "compensation.ridge_lambda=0.1"]
BUDGET = ["sparsity.macs=0.4", "sparsity.curve_images=16"]


RUNS = {
    "paper": (2, ["recipe=paper", "sparsity.joint=0.5", "sparsity.vo=0.25", "sparsity.heads=0.5"]),
    "sequential": (2, ["sparsity.joint=0.5", "sparsity.vo=0.5", "compensation.fit_tokens=900"]),
    "budget": (2, [*BUDGET, "sparsity.rounds=2"]),
}
SLOW = {
    "random": (2, ["recipe=paper", "sparsity.joint=0.5", "ranker=random"]),
    "few": (3, ["recipe=paper", "sparsity.joint=0.5", *FEW, "evaluation.num_images=2"]),
    "few-sequential": (3, ["sparsity.joint=0.5", *FEW]),
    "few-twice": (3, ["sparsity.joint=0.5", "compensation.propagate=none", *FEW]),
    "one-shot": (2, [*RUNS["sequential"][1], "compensation.propagate=none"]),
    "paper-budget": (2, ["recipe=paper", *BUDGET, "sparsity.merge_tokens=false"]),
}


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    """What was printed, apart from the width of its columns."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-\d+)?)", text)
    return [" ".join(part.split()) for part in parts[::2]], [float(part) for part in parts[1::2]]


@pytest.mark.parametrize(
    ("count", "settings"),
    [*RUNS.values(), *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW.values())],
    ids=[*RUNS, *SLOW],
)
def test_it_gives_what_one_process_gives(count: int, settings: list[str], tmp_path: Path) -> None:
    """Parts of unequal length, and a last batch that is not full; where there are fewer images, parts without any."""
    argv = ["prune", *UNTIMED, *SHAPES, *settings]
    single = corp(tmp_path, *argv, "hydra.run.dir=one")
    outcomes = corp_of(count, tmp_path, *argv, "hydra.run.dir=several")
    assert [outcome.code for outcome in (single, *outcomes)] == [0] * (count + 1), said([single, *outcomes])
    assert said(outcomes) == said([single])
    shown = [re.sub(r"(one|several) in .* s\.", "", outcome.out) for outcome in (single, outcomes[0])]
    (words, numbers), (others, found) = map(words_and_numbers, shown)
    assert words == others
    assert numbers == pytest.approx(found, rel=0.02)  # a KL of nearly nothing is rounding
    assert [(outcome.out, outcome.err) for outcome in outcomes[1:]] == [("", "")] * (count - 1)
    assert files(tmp_path / "several") == files(tmp_path / "one")
    require_same_run(tmp_path / "one", tmp_path / "several")


@pytest.mark.slow
def test_a_budget_of_latency_goes_by_the_timings_of_one(tmp_path: Path) -> None:
    """Or the processes would come to other sizes; whether so small a model can be made faster is another matter."""
    argv = ["prune", *UNTIMED, "sparsity.latency=0.1", "sparsity.curve_images=16", "sparsity.latency_batch_size=4"]
    outcomes = corp_of(2, tmp_path, *argv, "hydra.run.dir=run")
    assert outcomes[0].code == outcomes[1].code, said(outcomes)
    assert outcomes[0].code == 0 or ["cannot be met" in line for line in said(outcomes)] == [True]


@pytest.mark.slow
def test_images_that_cannot_be_read_are_replaced_in_the_same_order(tmp_path: Path) -> None:
    """By spares, of which one cannot be read either; what is drawn of the others stays."""
    photos(tmp_path / "photos", 60, bad=(1, 2, 30, 31, 32, 50, 58))
    images = ["calibration.path=photos", "calibration.num_images=40", "calibration.max_bad=0.3"]
    argv = ["prune", *UNTIMED, *images, "evaluation.max_bad=0.5", "sparsity.joint=0.5"]
    single = corp(tmp_path, *argv, "hydra.run.dir=one")
    outcomes = corp_of(2, tmp_path, *argv, "hydra.run.dir=several")
    assert [outcome.code for outcome in outcomes] == [0, 0], said(outcomes)
    assert "cannot be read" in single.err
    assert said(outcomes) == said([single])
    require_same_run(tmp_path / "one", tmp_path / "several")


@pytest.mark.slow
def test_what_is_kept_is_found_again_by_all(tmp_path: Path) -> None:
    argv = ["prune", *UNTIMED, *BUDGET, "calibration.cache=cache"]
    for folder in ("first", "second"):
        outcomes = corp_of(2, tmp_path, *argv, f"hydra.run.dir={folder}")
        assert [outcome.code for outcome in outcomes] == [0, 0], said(outcomes)
    assert [bool(re.search("corp: .* read from", line)) for line in said(outcomes)].count(True) == 2
    require_same_run(tmp_path / "first", tmp_path / "second")
    (tmp_path / "notes").write_text("mine")
    outcomes = corp_of(2, tmp_path, *argv[:-1], "calibration.cache=notes", "hydra.run.dir=third")
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert len([line for line in said(outcomes) if "notes" in line]) == 1


# --- one that dies --------------------------------------------------------------------------------------------


def in_block(number: int, act: Callable[[], None]) -> None:
    """Let this process do something when sequential repair enters this block."""
    enter, entered = vars(sequential)["enter_block"], list[Any]()

    def counting(*args: Any) -> None:
        entered.append(args)
        if len(entered) == number:
            act()
        enter(*args)

    vars(sequential)["enter_block"] = counting


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def confused() -> None:
    raise CorpError("This one does not like it; try another.")


def without_memory() -> None:
    raise MemoryError


DEATHS: list[tuple[int, Callable[[], None], int, str]] = [
    (1, killed, -signal.SIGKILL, "Another of the 2 processes of this run has ended, "),
    (1, confused, 2, "This one does not like it; try another."),
    (0, killed, -signal.SIGKILL, "Another of the 2 processes of this run has ended, "),
    (0, confused, 2, "This one does not like it; try another."),
    (1, without_memory, 2, "set calibration.batch_size=16."),
]


@pytest.mark.parametrize(
    ("rank", "death", "code", "sentence"),
    [DEATHS[0], DEATHS[1], *(pytest.param(*death, marks=pytest.mark.slow) for death in DEATHS[2:])],
    ids=[f"{death.__name__}-{rank}" for rank, death, *_ in DEATHS],
)
def test_one_that_dies_ends_the_run_in_one_sentence(
    rank: int, death: Callable[[], None], code: int, sentence: str, tmp_path: Path
) -> None:
    argv = ["prune", *UNTIMED, "sparsity.joint=0.5", "hydra.run.dir=run"]
    outcomes = corp_of(2, tmp_path, *argv, before=lambda own: in_block(2, death) if own == rank else None)
    assert [outcome.code for outcome in outcomes] == [code if own == rank else 2 for own in (0, 1)]
    ends = sorted(said(outcomes), key=lambda line: line.startswith("corp: go on with: corp prune resume="))
    assert sentence in ends[0]
    assert ["go on with: corp prune resume=" in line for line in ends[1:]] == [True] * (outcomes[0].code > 0)
    assert {"report.json", "pruned.safetensors", "plan.yaml"}.isdisjoint(files(tmp_path / "run"))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_that_died_goes_on(tmp_path: Path) -> None:
    """With the statistics, the curves and the block that it had, and in the folder that it began in."""
    argv = ["prune", *UNTIMED, "sparsity.macs=0.4", "sparsity.curve_images=8"]
    corp_of(2, tmp_path, *argv, "hydra.run.dir=run", before=lambda own: in_block(2, killed) if own == 1 else None)
    kept = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "run/.resume").glob("*.safetensors"))
    assert kept == ["block-000", "curves", "statistics"]
    resumed = corp_of(2, tmp_path, "prune", "resume=run")
    whole = corp(tmp_path, *argv, "hydra.run.dir=whole")
    assert [outcome.code for outcome in (*resumed, whole)] == [0, 0, 0], said(resumed)
    assert "statistics of 64 images read from" in resumed[0].err
    require_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "checkpoint=none"], "not for corp bench; start it without torchrun."),
        (["doctor"], "not for corp doctor; start it without torchrun."),
        (["prune", "-m", "sparsity.joint=0.25,0.5"], "not for a sweep; start it without torchrun."),
        (["prune", "--dry-run"], "start it without torchrun."),
        (["prune", "sparsity.joint=2"], "sparsity.joint=2 is out of range"),
        (["prune", "calibration.path=nowhere"], "calibration.path=nowhere does not exist"),
        (["prune", "device=cuda:0"], "device=cuda:0 is one GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_for_several_is_said_once(argv: list[str], words: str, tmp_path: Path) -> None:
    outcomes = corp_of(2, tmp_path, *argv)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = said(outcomes)
    assert words in line
    assert files(tmp_path) == []


def test_processes_that_do_not_come_together_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "none")):
        monkeypatch.setenv(name, value)
    assert main(["prune"]) == 2
    assert "The 2 processes of this run do not find each other (" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_ends_all_when_one_dies_and_repeats_why(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os\n"
        "from corp_cli.cli.main import program\n"
        "from tests.runtime.test_several_processes import confused, in_block\n"
        "if os.environ['RANK'] == os.environ.get('CONFUSED'):\n"
        "    in_block(2, confused)\n"
        "program()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    argv = [*torchrun, "prune", *UNTIMED, "sparsity.joint=0.5", "hydra.run.dir=run"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for confused_one, code in (("1", 1), ("none", 0)):
        done = subprocess.run(
            argv, cwd=tmp_path, env={**env, "CONFUSED": confused_one}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stderr
        assert (tmp_path / "run" / "report.json").is_file() == (code == 0)
        if code:
            assert done.stderr.count("corp: This one does not like it; try another.") == 1
            assert "traceback : This one does not like it; try another." in done.stderr
