"""tests/support/bad_inputs.py: every bad input in it is answered as it should be; here the quick part of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("group", ["command-line", "checkpoints", "output"])
def test_answered_in_one_sentence_leaving_nothing(group: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.bad_inputs", "--group", group]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not ok" not in done.stdout


def test_there_are_enough_of_them_and_a_bad_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that what the script sets is taken back
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = import_module("tests.support.bad_inputs")
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names)) >= 40
    said = "corp: warning: careful.\ncorp: there is no cat.\n"
    assert script.Outcome(2, said, []).problems(("cat",)) == []
    go_on = f"{said}corp: go on with: corp prune resume=run\n"
    assert script.Outcome(2, go_on, ["run/.resume"]).problems(("cat",)) == []
    assert script.Outcome(2, go_on, []).problems(("cat",)) == ["left "]
    assert script.Outcome(1, said, ["debris"]).problems(("dog",)) == ["exit code 1", "left debris", "lacks 'dog'"]
    assert script.Outcome(2, "Traceback\ncorp: no.\n", []).problems(()) == ["2 lines", "not from corp", "traceback"]
