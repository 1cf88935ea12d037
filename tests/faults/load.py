"""Load: a hundred runs in one process, and a multirun of two hundred jobs of which twenty fail."""

from __future__ import annotations

import csv
import gc
import json
from pathlib import Path

import numpy as np

from corp_cli.cli.main import main
from corp_cli.models.bundled import BUNDLED
from tests.faults.cases import Case
from tests.faults.forks import corp, fork, narrow, prune, require_sentence
from tests.faults.undisturbed import HALF, ONCE
from tests.support.typed import UNTIMED

RUNS, JOBS, FAILING = 100, 200, 20
SLOPE = 0.1  # MB that a run may leave in memory


def cases() -> list[Case]:
    return [
        Case("load/a hundred runs in one process", memory, RUNS),
        Case("load/two hundred jobs of which twenty fail", jobs, JOBS),
    ]


def memory(folder: Path) -> None:
    """The slope of a line through the memory after every run, the first ones left out."""
    tiny = narrow()

    def work() -> int:
        BUNDLED["vit_digits"] = tiny
        used = []
        for number in range(RUNS):
            code = main(prune(ONCE, HALF, into=f"run-{number}"))
            if code:
                return code
            gc.collect()
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6)
        rest = used[RUNS // 4 :]
        slope = float(np.polyfit(range(len(rest)), rest, 1)[0])
        Path("slope.json").write_text(json.dumps(slope))
        return 0

    outcome = fork(work, folder, seconds=900).wait()
    require_sentence(outcome, 0)
    slope = json.loads((folder / "slope.json").read_text())
    print(f"memory: {slope:+.3f} MB a run")
    assert slope < SLOPE, f"memory grows by {slope:.2f} MB a run"


def jobs(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8), np.uint8)
    names = [f"images-{number}.npy" for number in range(10)]
    for name in names[1:]:
        np.save(folder / name, images)
    (folder / names[0]).write_bytes(b"\x93NUMPY broken")
    seeds, paths = ",".join(map(str, range(JOBS // 10))), ",".join(names)
    argv = [
        "prune",
        "-m",
        *UNTIMED,
        ONCE,
        HALF,
        f"seed={seeds}",
        f"calibration.path={paths}",
        "hydra.sweep.dir=sweep",
    ]
    outcome = corp(folder, *argv, seconds=900)
    require_sentence(outcome, 2)
    with (folder / "sweep/summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == JOBS
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == FAILING
    assert all(names[0] in row["overrides"] and names[0] in row["error"] for row in failed)
    assert sum((folder / f"sweep/{row['job']}/pruned.safetensors").exists() for row in rows) == JOBS - FAILING
