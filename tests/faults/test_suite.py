"""One case of every way in which something goes wrong, and a sample of every kind; `make faults` runs all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from tests.faults import crashes, doors, fuzz, mistakes, races, tampering
from tests.faults.cases import Case

KINDS: dict[str, tuple[Callable[[], list[Case]], int]] = {
    "crash": (partial(crashes.cases, ("uniform", "resume sequential")), 10),
    "mistake": (mistakes.cases, 4),
    "tamper": (tampering.cases, 8),
    "door": (doors.cases, 12),
    "race": (races.cases, 2),
}
ONE_OF_EACH = (
    *(f"crash/uniform/{fault}" for fault in ("open 3/kill half", "save_file 2/no space", "mkdir 4/broken")),
    *(f"crash/resume sequential/{fault}" for fault in ("replace 2/kill", "unlink 2/broken")),
    *(f"mistake/sequential/{mistake}" for mistake in ("sede=1", "calibration.path=empty")),
    *(f"tamper/state of sequential/{how}" for how in ("statistics-*/swapped", "block-*/flipped at 0.6")),
    "tamper/cache/statistics-*/scaled",
    "tamper/.hydra/config.yaml/flipped at 0.2",
    "tamper/.hydra/resume.json/x instead",
    "tamper/plan.yaml/nested deeply",
    "tamper/report.json/an escape code",
    "tamper/pruned.safetensors/cut at 0.5",
    "door/bait",
    "door/model.checkpoint=evil.pth/zip",
    "door/calibration.path=evil.pt/old",
    "door/calibration.cache=evil.safetensors/plain",
    "door/local-dir:timm/model.bin/torchscript",
    "door/info checkpoint=evil.safetensors/array",
    "door/YAML in a plan",
    "door/node in a saved config",
    "door/state/zip",
    "door/told by paths",
    "race/two on one cache",
    "race/two into one folder/0",
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_of_each(name: str) -> None:
    cases, _ = KINDS[name.partition("/")[0]]
    (case,) = (case for case in cases() if case.name == name)
    lost = case.failures()
    assert not lost, "\n".join(lost)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample(kind: str) -> None:
    cases, count = KINDS[kind]
    lost = [line for case in random.Random(0).sample(cases(), count) for line in case.failures()]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("name", fuzz.BATCHES)
def test_fuzz(name: str) -> None:
    count = 10 if name in fuzz.SLOW else 100
    case = Case(f"fuzz/{name}/0", partial(fuzz.batch, name, 0, count=count), count)
    lost = case.failures()
    assert not lost, "\n".join(lost)
