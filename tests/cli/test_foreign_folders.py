"""Folders of somebody else: what is in them is not removed, and says nothing about the code that is run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from corp_cli import commands
from corp_cli.cli import run
from corp_cli.cli.main import main
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.owned import MARKER
from tests.support.typed import fail_with, files, one_sentence, put_module

pytestmark = pytest.mark.usefixtures("empty_folder")


# Removed is only what corp made


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The cache that each job of corp prune was handed; each leaves a file in it."""
    handed: list[Path | None] = []

    def run(cfg: PruneConfig, output_dir: Path, shared: Path | None = None) -> None:
        handed.append(shared)
        (output_dir / "pruned.safetensors").touch()
        if shared is not None:
            (shared / "statistics-0123.safetensors").touch()
            (shared / ".curves-0123.json.77.partial").touch()

    put_module(monkeypatch, "prune", commands, run=run)
    return handed


def test_a_sweep_shares_a_folder_that_is_gone_when_it_is_done(shared: list[Path | None]) -> None:
    assert main(["prune", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert shared == [Path("sweep/.shared").absolute()] * 2
    assert sorted(path.name for path in Path("sweep").iterdir()) == ["0", "1", "multirun.yaml", "summary.csv"]


@pytest.mark.parametrize("where", [".", "sweep"])
def test_a_folder_of_that_name_is_neither_used_nor_removed(where: str, shared: list[Path | None]) -> None:
    for folder in {".", where}:
        Path(folder, ".shared").mkdir(parents=True)
        Path(folder, ".shared/statistics-mine.safetensors").write_text("mine")
    assert main(["prune", "-m", "seed=1,2", f"hydra.sweep.dir={where}"]) == 0
    assert shared == [None, None]
    for folder in {".", where}:
        assert [path.read_text() for path in Path(folder, ".shared").iterdir()] == ["mine"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("subdir", ["${nope}", "${hydra.nope}"])
def test_a_sweep_without_jobs_removes_nothing(subdir: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(".shared").mkdir()
    Path(".shared/keep.txt").write_text("x")
    assert main(["prune", "-m", "seed=1,2", f"hydra.sweep.subdir={subdir}"]) == 2
    one_sentence(capsys, ["nope"])
    assert files() == [".shared/keep.txt"]
    assert [path.name for path in Path().iterdir()] == [".shared"]


def test_jobs_in_other_processes_share_and_remove_no_more(
    shared: list[Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a launcher plugin: nothing that a job knows reaches the process that cleans up."""
    Path(".shared").mkdir()
    Path(".shared/keep.txt").write_text("x")
    whole = run.run_jobs

    def elsewhere(command: str, ground: Any, resumed: bool, jobs: list[Any]) -> None:
        whole(command, ground, resumed, [])

    monkeypatch.setattr(run, "run_jobs", elsewhere)
    assert main(["prune", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert shared == [Path("sweep/.shared").absolute()] * 2
    assert Path(".shared/keep.txt").is_file()
    assert not Path("sweep/.shared").exists()
    assert Path("sweep/1/pruned.safetensors").is_file()


def test_what_a_killed_sweep_left_is_used_and_cleared_by_the_next(shared: list[Path | None]) -> None:
    Path("sweep/.shared").mkdir(parents=True)
    for name in (MARKER, "statistics-old.safetensors", ".statistics-old.safetensors.1.partial"):
        Path("sweep/.shared", name).touch()
    assert main(["prune", "-m", "seed=1", "hydra.sweep.dir=sweep"]) == 0
    assert shared == [Path("sweep/.shared").absolute()]
    assert not Path("sweep/.shared").exists()


def test_a_file_that_corp_does_not_name_stays(shared: list[Path | None]) -> None:
    Path("sweep/.shared").mkdir(parents=True)
    Path("sweep/.shared", MARKER).touch()
    Path("sweep/.shared/notes.txt").write_text("mine")
    assert main(["prune", "-m", "seed=1", "hydra.sweep.dir=sweep"]) == 0
    assert shared == [Path("sweep/.shared").absolute()]
    assert [path.name for path in Path("sweep/.shared").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("error", [CorpError("no."), KeyboardInterrupt()])
def test_logs_and_folders_from_before_stay_when_a_job_fails(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, error)
    for folder in ("sweep/0", "sweep/deep/0", "run"):
        Path(folder).mkdir(parents=True)
        Path(folder, "train.log").write_text("mine")
    Path("sweep/1").mkdir()
    for argv in (
        ["-m", "seed=1,2", "hydra.sweep.dir=sweep"],
        ["-m", "seed=1,2", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=deep/${hydra.job.num}"],
        ["hydra.run.dir=run"],
        ["hydra.run.dir=run/../run"],
    ):
        assert main(["prune", *argv]) in (2, 130)
    assert [path for path in files() if path.endswith("train.log")] == [
        "run/train.log",
        "sweep/0/train.log",
        "sweep/deep/0/train.log",
    ]
    assert Path("sweep/1").is_dir()


def test_a_log_of_another_program_keeps_a_new_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."), leaving="other.log")
    assert main(["prune", "hydra.run.dir=run"]) == 2
    assert Path("run/other.log").is_file()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("subdir", ["same", "a/../${model.name}"])
def test_jobs_that_would_write_over_each_other_are_refused(subdir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "-m", "seed=1,2", f"hydra.sweep.subdir={subdir}"]) == 2
    one_sentence(capsys, ["hydra.sweep.subdir", "job 0 and of job 1", "${hydra.job.num}"])
    assert not list(Path().iterdir())


# No code comes from a folder of saved configs


CANARY = "{_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [%s]}}"


@pytest.fixture
def planted(runs: list[tuple[PruneConfig, Path]], tmp_path: Path) -> Path:
    """The folder of a run, with configs that would make the file tmp_path/canary wherever Hydra took them up."""
    assert main(["prune", "seed=3", "hydra.run.dir=run"]) == 0
    runs.clear()
    Path("run/pruned.safetensors").unlink()
    canary = CANARY % (tmp_path / "canary")
    for path in ("prune.yaml", "hydra/launcher/basic.yaml", "hydra/sweeper/basic.yaml", "hydra/callbacks/x.yaml"):
        file = Path("run/.hydra", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(canary)
    return Path("run")


AGAIN = [["resume=run"], ["--config-dir", "run/.hydra", "--config-name", "config"]]


@pytest.mark.parametrize("argv", AGAIN)
def test_a_folder_of_saved_configs_is_not_searched(
    argv: list[str], planted: Path, runs: list[tuple[PruneConfig, Path]]
) -> None:
    assert main(["prune", *argv]) == 0
    assert main(["prune", "--config-dir", "run/.hydra"]) == 0
    assert [cfg.seed for cfg, _ in runs] == [3, 0]
    assert not Path("canary").exists()


@pytest.mark.parametrize("node", ["hydra: {callbacks: {x: %s}}", "hydra: {launcher: %s}", "defaults: [prune, _self_]"])
def test_a_saved_config_says_nothing_about_hydra(
    node: str,
    planted: Path,
    tmp_path: Path,
    runs: list[tuple[PruneConfig, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Path("run/.hydra/config.yaml")
    config.write_text(f"{config.read_text()}{node.replace('%s', CANARY % (tmp_path / 'canary'))}\n")
    vouch_for(config)
    for argv in AGAIN:
        for flag in ([], ["--dry-run"], ["--help"]):
            assert main(["prune", *argv, *flag]) == 2
            one_sentence(capsys, ["config.yaml sets", node.partition(":")[0], "which no run saves"])
    assert runs == []
    assert not Path("canary").exists()


def test_nor_does_a_config_without_a_defaults_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("seed: 1\nhydra: {callbacks: {x: %s}}\n" % (CANARY % (tmp_path / "canary")))
    assert main(["prune", "--config-dir", ".", "--config-name", "my"]) == 2
    one_sentence(capsys, ["my.yaml sets hydra", "defaults: [prune, _self_]"])
    assert files() == ["my.yaml"]


def vouch_for(config: Path) -> None:
    """As somebody would who hands out such a folder."""
    record = json.loads(config.with_name("resume.json").read_text())
    record["configs"] = [hashlib.sha256(config.read_bytes()).hexdigest()]
    config.with_name("resume.json").write_text(json.dumps(record))
