"""Crash points: at every write of several kinds of runs the process ends, or the disk is full, broken or over quota.

The run ends in a sentence, keeps what it had done, and when it is done again or gone on with, gives the same result to
the bit and leaves no half-written file."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.forks import KILLED, corp, require_sentence
from tests.faults.injected import WHERE, faults, install, kept_at
from tests.faults.undisturbed import KINDS, RESUME, require_same, stopped, undisturbed

RUNS = ("uniform", "sequential", "budget", "cache", "export", "sweep", "resume sequential", "resume budget")


WHOLE = ("uniform", "cache", "resume sequential")
FEW = ("kill half", "no space half", "quota")  # of the others, where files are filled


def cases(runs: tuple[str, ...] = RUNS) -> list[Case]:
    return [
        Case(f"crash/{run}/{site} {at}/{fault}", partial(check, run, site, at, fault))
        for run in runs
        for site in WHERE
        for at in range(1, undisturbed(run).calls.get(site, 0) + 1)
        for fault in faults(site, at)
        if run in WHOLE or (site in ("open", "save_file") and fault in FEW[: 1 if run == "sweep" else None])
    ]


def check(run: str, site: str, at: int, fault: str, folder: Path) -> None:
    how, _, kind = run.rpartition(" ")
    argv = RESUME if how else KINDS[kind]
    if how:
        shutil.copytree(stopped(kind), folder, dirs_exist_ok=True)
    first = corp(folder, *argv, before=lambda: install(folder, site, at, fault))
    require_sentence(first, *((KILLED,) if fault.startswith("kill") else (0, 2)))
    state = folder / "run/.resume"
    if first.code:
        lost = [name for name in kept_at(folder) if first.code == 2 and not (state / name).exists()]
        assert not lost, f"{lost} lost with the error"
        resumes = bool(how) or (at % 2 == 0 and state.is_dir())
        again = corp(folder, *(RESUME if resumes else argv))
        if resumes and again.code == 2 and ("holds no run" in again.err or "is not what that run" in again.err):
            again = corp(folder, *KINDS[kind])
        if resumes and again.code == 2 and "run that is done" in again.err:  # all was written before the fault
            again = corp(folder, *KINDS[kind])
        require_sentence(again, 0)
    elif site == "unlink" or "nothing was exported" in first.err:  # what is left to do is done by the next run
        require_sentence(corp(folder, *(KINDS[kind] if how else argv)), 0)
    require_same(folder, run)
