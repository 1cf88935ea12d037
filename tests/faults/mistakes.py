"""A mistake never destroys state: what was typed wrong with resume is answered, and then the right resume goes on."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from tests.faults.cases import Case
from tests.faults.forks import corp, require_sentence
from tests.faults.undisturbed import RESUME, files, require_same, stopped

MISTAKES = (
    "sede=1",
    "seed=-1",
    "seed=one",
    "seed=2,3",
    "-m",
    "--bogus",
    "photos",
    "device=gpu",
    "device=cuda:7",
    "model=deit_tny",
    "model.name=nothing",
    "model.checkpoint=nowhere.pth",
    "model.checkpoint=broken.safetensors",
    "+model.args.depth=three",
    "compensation=bets",
    "compensation.ridge_lambda=-1",
    "sparsity.joint=1.5",
    "sparsity.plan=nowhere.yaml",
    "sparsity.plan=broken.yaml",
    "calibration.path=nowhere",
    "calibration.path=[a",
    "calibration.path=empty",
    "calibration.batch_size=0",
    "calibration.cache=broken.safetensors/inside",
    "evaluation.path=nowhere",
    "evaluation.path=broken",
    "evaluation.labels=nowhere.csv",
    "evaluation.labels=broken.csv",
    "data.input_size=16",
    "data.mean=[0.5,0.5,0.5]",
    "export.formats=[onxn]",
    "export.dtypes=[int4]",
    "gate.max_top1_drop=x",
    "hydra.run.dir=broken.yaml",
)


def cases() -> list[Case]:
    return [
        Case(f"mistake/{kind}/{mistake}", partial(check, kind, mistake))
        for kind, mistakes in (("sequential", MISTAKES), ("budget", MISTAKES[::3]))
        for mistake in mistakes
    ]


def check(kind: str, mistake: str, folder: Path) -> None:
    shutil.copytree(stopped(kind), folder, dirs_exist_ok=True)
    mess = {
        "broken.safetensors": b"\0" * 20,
        "broken.yaml": b"blocks: [",
        "broken.csv": b"\xff\xfe\0",
        "broken/a.png": b"x",
    }
    (folder / "broken").mkdir()
    (folder / "empty").mkdir()
    for name, content in mess.items():
        (folder / name).write_bytes(content)
    before = kept(folder)
    require_sentence(corp(folder, *RESUME, mistake), 2)
    after = kept(folder)
    gone = sorted(name for name, content in before.items() if after.get(name) != content)
    assert not gone, f"{gone} gone or changed"
    for name, content in mess.items():
        assert (folder / name).read_bytes() == content, f"the user's {name} changed"
        (folder / name).unlink()
    (folder / "broken").rmdir()
    (folder / "empty").rmdir()
    require_sentence(corp(folder, *RESUME), 0)
    require_same(folder, f"resume {kind}")


def kept(folder: Path) -> dict[str, bytes]:
    """What there is to go on from, and with which settings."""
    return {
        name: path.read_bytes()
        for name, path in files(folder).items()
        if name.startswith("run/.resume/block") or name == "run/.hydra/config.yaml" or "statistics-" in name
    }
