"""Several runs at once, let go by a barrier: with one cache, and into one folder."""

from __future__ import annotations

import multiprocessing
import shutil
from functools import cache, partial
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.forks import Outcome, begin, corp, prune, require_sentence, shared
from tests.faults.undisturbed import HALF, ONCE, RESUME, files, require_same, stopped, tensors, undisturbed

ROUNDS = 15


def cases() -> list[Case]:
    return [
        *(Case(f"race/eight on one cache/{turn}", one_cache, 8) for turn in range(ROUNDS)),
        Case("race/two on one cache", partial(one_cache, runs=2), 2),
        *(Case(f"race/two into one folder/{turn}", one_folder, 2) for turn in range(4)),
        *(Case(f"race/two resume/{turn}", two_resume, 2) for turn in range(4)),
    ]


def together(folder: Path, *argvs: list[str]) -> list[Outcome]:
    """What came of these, begun at one moment."""
    barrier = multiprocessing.get_context("fork").Barrier(len(argvs))
    children = [begin(folder, *argv, before=lambda: barrier.wait(60)) for argv in argvs]
    return [child.wait() for child in children]


def one_cache(folder: Path, runs: int = 8) -> None:
    argvs = [prune(ONCE, HALF, "calibration.cache=cache", into=str(number)) for number in range(runs)]
    for outcome in together(folder, *argvs):
        require_sentence(outcome, 0)
    wanted = undisturbed("cache").folder
    assert files(folder / "cache").keys() == files(wanted / "cache").keys(), sorted(files(folder / "cache"))
    for number in range(runs):
        found = folder / f"{number}/pruned.safetensors"
        assert tensors(found) == tensors(wanted / "run/pruned.safetensors"), f"run {number} gave another result"


@cache
def of_seed(seed: int) -> Path:
    folder = shared("seed")
    assert corp(folder, *prune(ONCE, HALF, f"seed={seed}")).code == 0
    return folder / "run"


def one_folder(folder: Path) -> None:
    """One of them may be refused; what is there in the end is all of one run."""
    outcomes = together(folder, *(prune(ONCE, HALF, f"seed={seed}") for seed in (3, 4)))
    for outcome in outcomes:
        require_sentence(outcome, 0, 2)
    assert any(outcome.code == 0 for outcome in outcomes), "both are refused"
    for seed in (3, 4):
        whole = of_seed(seed)
        if (folder / "run/pruned.safetensors").read_bytes() == (whole / "pruned.safetensors").read_bytes():
            assert files(folder / "run").keys() == files(whole).keys(), sorted(files(folder / "run"))
            for name in ("plan.yaml", ".hydra/config.yaml"):
                assert (folder / "run" / name).read_text() == (whole / name).read_text(), f"{name} is of the other run"
            assert f'"seed": {seed}' in (folder / "run/report.json").read_text(), "report.json is of the other run"
            return
    raise AssertionError("the result is that of neither")


def two_resume(folder: Path) -> None:
    shutil.copytree(stopped("sequential"), folder, dirs_exist_ok=True)
    outcomes = together(folder, RESUME, RESUME)
    for outcome in outcomes:
        require_sentence(outcome, 0, 2)
    assert any(outcome.code == 0 for outcome in outcomes), "both are refused"
    require_same(folder, "resume sequential")
