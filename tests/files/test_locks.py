"""Two commands never write to one folder at once, and what killed ones left is removed by the next."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from corp_cli.files.locks import LOCK, in_turn, sole_writer
from tests.support.typed import one_sentence


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        with pytest.raises(CorpError, match=r"Another corp is writing to .*run; wait"), sole_writer(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK).exists()
    assert not list((tmp_path / "run").iterdir())
    with sole_writer(tmp_path / "run"):
        pass


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    dead = tmp_path / f".pruned.safetensors.{'0a' * 16}.partial"
    dead.mkdir()
    (dead / "pruned.safetensors").write_text("half")
    (tmp_path / ".mine.partial").write_text("mine")
    (tmp_path / LOCK).touch()
    with sole_writer(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".mine.partial"]


def test_others_wait_for_their_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = threading.Event()

    def hold() -> None:
        with FileLock(tmp_path / ".made.lock"):
            taken.set()
            time.sleep(1.3)

    other = threading.Thread(target=hold)
    other.start()
    taken.wait()
    partial = tmp_path / f".made.{'0' * 32}.partial"
    partial.mkdir()
    with in_turn(tmp_path / "made", "measuring the same statistics"):
        assert not partial.exists()
    other.join()
    assert "waiting for another run that is measuring the same statistics" in capsys.readouterr().err


@pytest.mark.usefixtures("empty_folder", "runs")
def test_a_command_leaves_a_run_alone_that_is_still_going_on(capsys: pytest.CaptureFixture[str]) -> None:
    with sole_writer(Path("run").absolute()):
        (Path("run") / "mine").write_text("x")
        assert main(["prune", "hydra.run.dir=run"]) == 2
        one_sentence(capsys, ["Another corp is writing to", "hydra.run.dir=FOLDER"])
        assert sorted(path.name for path in Path("run").iterdir()) == [LOCK, "mine"]
    assert main(["prune", "hydra.run.dir=run"]) == 0
    assert not (Path("run") / LOCK).exists()
