"""Interrupted runs go on from where they were, and end as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from corp_cli import pipeline
from corp_cli.cli.hydra_app import resumed
from corp_cli.cli.main import main
from corp_cli.files.cache import cache
from corp_cli.method import sequential
from tests.support.typed import UNTIMED
from tests.support.variants import require_same

BUDGET = [*UNTIMED, "sparsity.macs=0.4", "sparsity.curve_images=32"]


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
    blocks = interrupt_at(monkeypatch, sequential, "observe_mlp", 3)
    folder = tmp_path / "stopped = here"
    assert main(["prune", *BUDGET, f"hydra.run.dir='{folder}'"]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"corp: interrupted; go on with: corp prune resume='{folder}'"
    assert len(list((folder / ".resume").glob("block-*.safetensors"))) == 2
    calibrated = interrupt_at(monkeypatch, pipeline, "measure_statistics", 0)
    assert main(["prune", f"resume={folder}"]) == 0
    assert calibrated == [0]
    said = capsys.readouterr().err
    assert "statistics of 64 images read from" in said
    assert "damage curves read from" in said
    assert blocks[0] == 6 + 1  # the third block was begun twice
    whole, again = (load_file(path / "pruned.safetensors") for path in (tmp_path / "whole", folder))
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        require_same(again[name], tensor)
    assert not (folder / ".resume").exists()
    assert (folder / "plan.yaml").read_text() == (tmp_path / "whole/plan.yaml").read_text()
    assert main(["prune", f"resume={folder}"]) == 2
    assert "holds a run that is done" in capsys.readouterr().err


def test_what_is_asked_anew_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        blocks = interrupt_at(patch, sequential, "observe_mlp", 3)
        assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    blocks = interrupt_at(monkeypatch, sequential, "observe_mlp", 0)
    assert main(["prune", f"resume={tmp_path}/run", "compensation.alpha=0"]) == 0
    assert blocks[0] == 6


def test_an_interruption_before_anything_is_done_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, pipeline, "measure_statistics", 1)
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "corp: interrupted."
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_are_not_whole_are_repaired_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, sequential, "observe_mlp", 3)
        assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    for path in (tmp_path / "run/.resume").glob("block-*"):
        path.write_bytes(path.read_bytes()[:100])
    blocks = interrupt_at(monkeypatch, sequential, "observe_mlp", 0)
    assert main(["prune", f"resume={tmp_path}/run"]) == 0
    assert blocks[0] == 6


def test_there_must_be_something_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", f"resume={tmp_path}/nowhere"]) == 2
    assert "nowhere holds no run to go on with; give the folder" in capsys.readouterr().err
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").touch()
    assert main(["prune", "-m", f"resume={tmp_path}"]) == 2
    assert "resume goes on with one run" in capsys.readouterr().err
    assert resumed(["seed=1"]) == ["seed=1"]


def test_without_room_for_it_a_run_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "has_room", lambda folder, blocks: False)
    interrupt_at(monkeypatch, sequential, "observe_mlp", 3)
    assert main(["prune", *BUDGET, f"hydra.run.dir={tmp_path}/run"]) == 130
    assert list(tmp_path.iterdir()) == []
