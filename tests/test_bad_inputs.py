"""scripts/bad_inputs.py: every bad input in it is answered as it should be; here the quick part of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bad_inputs.py"


@pytest.mark.parametrize("group", ["command-line", "checkpoints", "output"])
def test_answered_in_one_sentence_leaving_nothing(group: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--group", group]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not ok" not in done.stdout


def test_there_are_enough_of_them_and_a_bad_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that what the script sets is taken back
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = importlib.util.spec_from_file_location("bad_inputs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bad_inputs", script)
    spec.loader.exec_module(script)
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names)) >= 40
    said = "corp: warning: careful.\ncorp: there is no cat.\n"
    assert script.Outcome(2, said, []).problems(("cat",)) == []
    assert script.Outcome(1, said, ["debris"]).problems(("dog",)) == ["exit code 1", "left debris", "lacks 'dog'"]
    assert script.Outcome(2, "Traceback\ncorp: no.\n", []).problems(()) == ["2 lines", "not from corp", "traceback"]
