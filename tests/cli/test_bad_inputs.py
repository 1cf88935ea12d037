"""Bad inputs to corp, each of which must end in one plain sentence, exit code 2, and nothing left behind.

Where a long run had begun, what it has done stays, and a second line says how to go on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from corp_cli.cli.main import main
from tests.support.bad_input_cases import CASES, Case

# What may be said besides the sentence.
NOTE = re.compile(r"corp: (warning: |images are seen at |nothing says how much |statistics of |go on with: )")


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    code: int
    stderr: str
    left: list[str]  # files and folders that were not there before

    def problems(self, words: tuple[str, ...]) -> list[str]:
        """What is not as it should be; empty where the answer is good."""
        said = [line for line in self.stderr.splitlines() if not NOTE.match(line)]
        checks = {
            f"exit code {self.code}": self.code == 2,
            f"{len(said)} lines": len(said) == 1,
            "not from corp": all(line.startswith("corp: ") for line in said),
            "traceback": "Traceback" not in self.stderr,
            f"left {', '.join(self.left)}": bool(self.left) == ("corp: go on with: " in self.stderr),
            **{f"lacks '{word}'": word in " ".join(said) for word in words},
        }
        return [problem for problem, good in checks.items() if not good]


@contextlib.contextmanager
def file_limit(kib: int | None) -> Iterator[None]:
    """Writes beyond it fail, as on a full disk."""
    if kib is None:
        yield
        return
    resource = pytest.importorskip("resource", reason="needs POSIX limits")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kib, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def everything() -> set[str]:
    """All files and folders below the current one."""
    return {str(path) for path in Path().rglob("*")}


@pytest.mark.usefixtures("empty_folder", "tiny_digits")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answered_in_one_sentence_leaving_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    case.prepare()
    before = everything()
    with file_limit(case.file_limit_kib):
        code = main(case.argv)
    outcome = Outcome(code, capsys.readouterr().err, sorted(everything() - before))
    assert outcome.problems(case.words) == [], outcome.stderr


def test_there_are_enough_of_them_and_a_bad_answer_is_noticed() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 40
    said = "corp: warning: careful.\ncorp: there is no cat.\n"
    assert Outcome(2, said, []).problems(("cat",)) == []
    go_on = f"{said}corp: go on with: corp prune resume=run\n"
    assert Outcome(2, go_on, ["run/.resume"]).problems(("cat",)) == []
    assert Outcome(2, go_on, []).problems(("cat",)) == ["left "]
    assert Outcome(1, said, ["debris"]).problems(("dog",)) == ["exit code 1", "left debris", "lacks 'dog'"]
    assert Outcome(2, "Traceback\ncorp: no.\n", []).problems(()) == ["2 lines", "not from corp", "traceback"]
