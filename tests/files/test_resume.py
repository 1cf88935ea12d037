"""Interrupted runs go on from where they were, and end as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from corp_cli import pipeline
from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from corp_cli.files.cache import cache
from corp_cli.files.output import clear_results
from corp_cli.method import sequential
from corp_cli.models.bundled import BUNDLED, BundledModel
from tests.support.typed import UNTIMED, one_sentence
from tests.support.variants import require_same

BUDGET = [*UNTIMED, "sparsity.macs=0.4", "sparsity.curve_images=16"]


pytestmark = pytest.mark.usefixtures("tiny_digits")


def interrupt_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> list[int]:
    """Raise KeyboardInterrupt at the `call`-th call of a function; the list counts the calls."""
    whole, calls = getattr(module, name), [0]

    def stopped(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(module, name, stopped)
    return calls


def test_a_run_goes_on_from_the_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/whole"]) == 0
    blocks = interrupt_at(monkeypatch, sequential, "sampled", 2)
    folder = tmp_path / "stopped = here"
    assert main(["prune", *BUDGET, f"hydra.run.dir='{folder}'"]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"corp: interrupted; go on with: corp prune resume='{folder}'"
    assert len(list((folder / ".resume").glob("block-*.safetensors"))) == 1
    calibrated = interrupt_at(monkeypatch, pipeline, "measure_statistics", 0)
    assert main(["prune", f"resume={folder}"]) == 0
    assert calibrated == [0]
    said = capsys.readouterr().err
    assert "statistics of 64 images read from" in said
    assert "damage curves read from" in said
    assert blocks[0] == 2 + 1  # the second block was begun twice
    whole, again = (load_file(path / "pruned.safetensors") for path in (tmp_path / "whole", folder))
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        require_same(again[name], tensor)
    assert not (folder / ".resume").exists()
    assert (folder / "plan.yaml").read_text() == (tmp_path / "whole/plan.yaml").read_text()
    reports = (json.loads((path / "report.json").read_text())["evaluation"] for path in (tmp_path / "whole", folder))
    first, second = (found["uncompensated"]["kl"] for found in reports)  # of the same units
    assert first == pytest.approx(second, rel=1e-4)
    assert main(["prune", f"resume={folder}"]) == 2
    assert "holds a run that is done" in capsys.readouterr().err


def test_what_is_asked_anew_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        blocks = interrupt_at(patch, sequential, "sampled", 2)
        assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    blocks = interrupt_at(monkeypatch, sequential, "sampled", 0)
    assert main(["prune", f"resume={tmp_path}/run", "compensation.alpha=0"]) == 0
    assert blocks[0] == 2


def test_an_interruption_before_anything_is_done_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, pipeline, "measure_statistics", 1)
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "corp: interrupted."
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_are_not_whole_are_repaired_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, sequential, "sampled", 2)
        assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    for path in (tmp_path / "run/.resume").glob("block-*"):
        path.write_bytes(path.read_bytes()[:100])
    blocks = interrupt_at(monkeypatch, sequential, "sampled", 0)
    assert main(["prune", f"resume={tmp_path}/run"]) == 0
    assert blocks[0] == 2


def test_there_must_be_something_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", f"resume={tmp_path}/nowhere"]) == 2
    assert "nowhere holds no run to go on with; give the folder" in capsys.readouterr().err
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").touch()
    assert main(["prune", "-m", f"resume={tmp_path}"]) == 2
    assert "resume goes on with one run" in capsys.readouterr().err


def test_statistics_that_are_sooner_measured_than_written_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WRITTEN", 1e-3)
    interrupt_at(monkeypatch, sequential, "sampled", 2)
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    kept = {path.name.rpartition("-")[0] for path in (tmp_path / "run/.resume").glob("*.safetensors")}
    assert kept == {"block-000", "curves"}


def test_without_room_for_it_a_run_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "has_room", lambda folder, blocks: False)
    interrupt_at(monkeypatch, sequential, "sampled", 2)
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    assert list(tmp_path.iterdir()) == []


# --- what stays, and what is gone on with ----------------------------------------------------------------------


def photos(folder: Path, count: int = 64) -> None:
    """Images that the bundled model can take."""
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("L", (8, 8), 3 * i).save(folder / f"{i:03}.png")


@pytest.fixture(scope="module")
def home(tiny_model: BundledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was stopped, with paths that begin there, and with the same that was not stopped."""
    home = tmp_path_factory.mktemp("stopped") / "home"
    photos(home / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "vit_digits", tiny_model)
        patch.chdir(home)
        assert main(["prune", *RELATIVE, "hydra.run.dir=whole"]) == 0
        interrupt_at(patch, sequential, "sampled", 2)
        assert main(["prune", *RELATIVE, "hydra.run.dir=run"]) == 130
    shutil.copytree(home, home.with_name("untouched"))
    return home


@pytest.fixture
def stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """home/run, the run that was stopped, seen from elsewhere; home/whole is the same, not stopped."""
    shutil.rmtree(home)
    shutil.copytree(home.with_name("untouched"), home)
    monkeypatch.chdir(tmp_path)
    return home / "run"


RELATIVE = [*UNTIMED, "calibration.path=photos", "evaluation.path=photos"]


def kept(folder: Path) -> dict[str, bytes]:
    """What there is to go on from, and with which settings."""
    files = [*(folder / ".resume").iterdir(), folder / ".hydra/config.yaml"]
    return {path.name: path.read_bytes() for path in files}


def require_whole(folder: Path) -> None:
    """The run in `folder` ended as that beside it did."""
    whole, again = (load_file(path / "pruned.safetensors") for path in (folder.with_name("whole"), folder))
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        require_same(again[name], tensor)
    assert not (folder / ".resume").exists()


def test_a_mistake_costs_nothing_and_relative_paths_begin_where_the_run_did(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "report.json").write_text("of an earlier run in this folder")
    before = kept(stopped)
    assert len(before) > 3
    for mistake, word in (
        ("evaluation.labels=nowhere.csv", "nowhere.csv"),
        ("calibration.path=phtos", "phtos does not exist"),
        ("device=cuda:7", "cuda:7"),
        ("sede=1", "did you mean seed?"),
        ("seed=-1", "seed=-1"),
    ):
        assert main(["prune", f"resume={stopped}", mistake]) == 2
        said = capsys.readouterr().err.splitlines()
        first, *further = [line for line in said if "images are seen" not in line and "taking sparsity" not in line]
        assert word in first
        assert further in ([], [f"corp: go on with: corp prune resume={stopped}"])
        assert kept(stopped) == before
    assert further == []  # it never came to that run
    cwd = Path.cwd()
    assert main(["prune", f"resume={stopped}"]) == 0
    assert "statistics of 64 images read from" in capsys.readouterr().err
    assert Path.cwd() == cwd
    assert not list(cwd.iterdir())
    require_whole(stopped)


def test_paths_typed_with_resume_begin_where_they_are_typed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(Path("photos"))
    labels = "".join(f"{i:03}.png,{i % 10}\n" for i in range(64))
    Path("labels.csv").write_text(labels)
    assert main(["prune", f"resume={stopped}", "evaluation.path=photos", "evaluation.labels=labels.csv"]) == 0
    report = json.loads((stopped / "report.json").read_text())
    assert report["evaluation"]["dense"]["top1"] is not None  # so the labels were read
    saved = (stopped / ".hydra/config.yaml").read_text()
    assert f"path: {Path('photos').absolute()}" in saved
    assert "path: photos" in saved  # of the calibration


def test_the_state_stays_where_a_later_stage_fails(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is found of the evaluation images only after the repair, and a disk that is full at the end."""
    home = stopped.parent
    images = sorted((home / "photos").iterdir())
    photos(home / "others")
    whole = {path: path.read_bytes() for path in (home / "others").iterdir()}
    for path in whole:
        path.write_bytes(whole[path][:40])
    assert main(["prune", f"resume={stopped}", f"evaluation.path={home}/others"]) == 2
    *_, first, second = capsys.readouterr().err.splitlines()
    assert "can be read" in first or "cannot be read" in first
    assert second == f"corp: go on with: corp prune resume={stopped}"
    state = kept(stopped)
    assert len([name for name in state if name.startswith("block-")]) == 2

    def full(*_: Any) -> None:
        raise CorpError("report.json cannot be written (No space left on device); check space.")

    for name in ("export", "write_report"):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, name, full)
            assert main(["prune", f"resume={stopped}"]) == 2
        *_, first, second = capsys.readouterr().err.splitlines()
        assert "No space left" in first
        assert second == f"corp: go on with: corp prune resume={stopped}"
        assert kept(stopped) == state
    assert images
    assert main(["prune", f"resume={stopped}"]) == 0
    require_whole(stopped)


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_config_that_is_not_whole_is_refused(stopped: Path, cut: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = stopped / ".hydra/config.yaml"
    whole = config.read_bytes()
    config.write_bytes(whole[:cut])
    before = kept(stopped)
    assert main(["prune", f"resume={stopped}"]) == 2
    one_sentence(capsys, ["config.yaml is not what that run wrote", "begin anew"])
    assert kept(stopped) == before
    config.write_bytes(whole)
    (stopped / ".hydra/resume.json").unlink()
    assert main(["prune", f"resume={stopped}"]) == 2
    one_sentence(capsys, ["config.yaml is not what that run wrote"])


def test_settings_typed_with_resume_stay_when_it_is_stopped_again(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, sequential, "sampled", 2)
        assert main(["prune", f"resume={stopped}", "compensation.alpha=0"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"corp: interrupted; go on with: corp prune resume={stopped}"
    assert "alpha: 0.0" in (stopped / ".hydra/config.yaml").read_text()
    blocks = interrupt_at(monkeypatch, sequential, "sampled", 0)
    assert main(["prune", f"resume={stopped}"]) == 0
    assert blocks[0] == 1  # of two


@pytest.mark.usefixtures("empty_folder")
def test_somebody_elses_resume_folder_is_left_alone() -> None:
    Path("run/.resume").mkdir(parents=True)
    Path("run/.resume/statistics-mine.safetensors").write_text("mine")
    assert main(["prune", *UNTIMED, "hydra.run.dir=run"]) == 0
    assert [path.read_text() for path in Path("run/.resume").iterdir()] == ["mine"]


def rewrite(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        metadata, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({name: change(tensor).contiguous() for name, tensor in state.items()}, path, metadata=metadata)


@pytest.mark.parametrize("change", [lambda t: t.half().float(), lambda t: t * 0, lambda t: t + 1e-6])
def test_a_block_that_was_changed_is_repaired_anew_and_said(
    stopped: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (stopped / ".resume").glob("block-*"):
        rewrite(path, change)
    assert main(["prune", f"resume={stopped}"]) == 0
    assert "was changed after it was written; blocks.0 is repaired anew" in " ".join(capsys.readouterr().err.split())
    require_whole(stopped)


def test_results_of_an_earlier_run_go_when_another_begins(stopped: Path) -> None:
    """One that is killed leaves no checkpoint of its own beside a report of another."""
    assert main(["prune", f"resume={stopped}"]) == 0
    report = json.loads((stopped / "report.json").read_text())
    (stopped / "model.onnx").write_text("exported by that run")
    (stopped / "notes.txt").write_text("mine")
    (stopped / "report.json").write_text(json.dumps({**report, "export": [{"file": "model.onnx"}]}))
    clear_results(stopped)
    left = {path.name for path in stopped.iterdir()}
    assert "notes.txt" in left
    assert not left & {"model.onnx", "report.json", "plan.yaml", "pruned.safetensors"}
