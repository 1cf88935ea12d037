"""Files are whole or not there; a folder that cannot take the result is refused before the work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import TextIO

import pytest

from corp_cli import pipeline
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import require_room, write_json, write_whole

Usage = namedtuple("Usage", "total used free")


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    def broken(file: TextIO) -> None:
        file.write("half")
        raise KeyboardInterrupt

    (tmp_path / "a.json").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.json", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda *_, **__: open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(CorpError, match=r"a\.json cannot be written \(No space left on device\).*hydra\.run\.dir"):
        write_json({"a": 1}, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_number_that_json_does_not_know_is_a_bug_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_room_for_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_room(tmp_path / "new/folder", 1000)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 3 * 2**20))
    require_room(tmp_path, 2**20)
    with pytest.raises(CorpError, match=r"has 3 MiB left and the result takes up to 5 MiB"):
        require_room(tmp_path, 4 * 2**20)


def test_prune_refuses_a_full_folder_before_it_calibrates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    monkeypatch.setattr(pipeline, "measure_statistics", None)
    with pytest.raises(CorpError, match="has 0 MiB left"):
        pipeline.prune(PruneConfig(device="cpu"), tmp_path)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CorpError, match=r"cannot be written \(Permission denied\)"):
        require_room(tmp_path, 0)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_in_the_midst_of_the_work_leaves_nothing(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the process and its workers alike."""
    command = [sys.executable, "-c", INTERRUPTED, "prune", "device=cpu", "calibration.num_workers=2"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "calibrating\n"
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.splitlines()[-1] == "corp: interrupted."
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
from corp_cli.cli import main as cli
from corp_cli.method import calibrate
def add(self, images):
    print("calibrating", flush=True)
    time.sleep(60)
calibrate.Calibration.add = add
sys.exit(cli.main(sys.argv[1:]))
"""
