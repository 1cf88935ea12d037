"""`python -m tests.faults [NAME …]`: every case, or those whose names begin so; a table of what was survived.

Exit code 1 where something was not, with a line for each that does it again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import defaultdict

from rich.console import Console
from rich.table import Table

from tests.faults.cases import Case, kinds
from tests.faults.forks import warm_up

WORKERS = 2
FIRST = ("load", "race")  # the longest, so that no worker waits for them in the end
CASES: list[Case] = []


def failures(number: int) -> tuple[int, list[str], float]:
    began = time.monotonic()
    return number, CASES[number].failures(), time.monotonic() - began


def main(names: list[str]) -> int:
    """Run the cases that begin with one of `names`, all of them without → the exit code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("CORP_DEBUG", None)
    began = time.monotonic()
    warm_up()
    wanted = [kind for kind in kinds() if not names or any(name.partition("/")[0] == kind for name in names)]
    for kind in sorted(wanted, key=lambda kind: kind not in FIRST):
        CASES.extend(case for case in kinds()[kind]() if not names or case.name.startswith(tuple(names)))
    tried: dict[str, int] = defaultdict(int)
    lost: dict[str, list[str]] = defaultdict(list)
    took: dict[str, float] = defaultdict(float)
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        for number, found, seconds in pool.imap_unordered(failures, range(len(CASES))):
            case = CASES[number]
            group = case.kind if case.kind != "fuzz" else "/".join(case.name.split("/")[:2])
            tried[group] += case.count
            lost[group] += found
            took[group] += seconds
            for line in found:
                print(line, flush=True)
    table = Table("kind", *("tried", "survived", "seconds"), title="What was tried")
    for group in tried:
        table.add_row(group, f"{tried[group]:,}", f"{tried[group] - len(lost[group]):,}", f"{took[group]:.0f}")
    for what, fuzzed in (("faults injected", False), ("inputs fuzzed", True)):
        groups = [group for group in tried if group.startswith("fuzz") == fuzzed]
        total, failed = sum(tried[group] for group in groups), sum(len(lost[group]) for group in groups)
        table.add_row(what, f"{total:,}", f"{total - failed:,}", f"{sum(took[group] for group in groups):.0f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"In {time.monotonic() - began:.0f} seconds with {WORKERS} processes.")
    if any(lost.values()):
        console.print(
            "Again, one of them: python -m tests.faults 'NAME', where NAME is what stands before the last colon."
        )
    return int(any(lost.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
