"""Nothing let in or out: files that could run code, wherever they are given, and what the files of a run tell."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.faults.cases import Case
from tests.faults.forks import corp, fork, prune, require_sentence
from tests.faults.undisturbed import HALF, ONCE, RESUME, files, stopped, undisturbed

SHORTEST = 4


class Bait:
    """Makes the folder canary in the current one where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("canary",)


YAML = "!!python/object/apply:os.mkdir [canary]"
NODE = "{_target_: os.mkdir, path: canary}"
VIT = ["model.name=vit_tiny_patch16_224", "+model.args.depth=1", "calibration.path=photos.npy"]


def zipped(path: Path) -> None:
    torch.save({"x": torch.zeros(1), "bait": Bait()}, path)


def old(path: Path) -> None:
    torch.save({"x": torch.zeros(1), "bait": Bait()}, path, _use_new_zipfile_serialization=False)


def plain(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bait()))


def array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Bait()], dtype=object), allow_pickle=True)


def torchscript(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/constants.pkl", pickle.dumps(Bait()))
        file.writestr("archive/data.pkl", pickle.dumps(Bait()))
        file.writestr("archive/version", "3\n")


PICKLES: dict[str, Callable[[Path], None]] = {
    "zip": zipped,
    "old": old,
    "plain": plain,
    "array": array,
    "torchscript": torchscript,
}
# what is typed, with the file that lies there for FILE
FILES = {
    **{
        f"model.checkpoint=evil{ext}": prune(f"model.checkpoint=evil{ext}")
        for ext in (".pth", ".pt", ".bin", ".safetensors")
    },
    **{f"calibration.path=evil{ext}": prune(f"calibration.path=evil{ext}") for ext in (".pt", ".npy", ".safetensors")},
    "evaluation.path=evil.pt": prune("evaluation.path=evil.pt"),
    "evaluation.labels=evil.csv": prune("evaluation.labels=evil.csv"),
    "calibration.cache=evil.safetensors": prune(ONCE, HALF, "calibration.cache=evil.safetensors"),
    "+model.args.checkpoint_path=evil.pth": prune(*VIT, "+model.args.checkpoint_path=evil.pth"),
    "local-dir:timm/model.bin": prune(*VIT, "model.name=local-dir:timm"),
    "transformers:hf/pytorch_model.bin": prune(*VIT, "model.name=transformers:hf"),
    **{
        f"{command} checkpoint=evil.safetensors": [command, "checkpoint=evil.safetensors", "device=cpu"]
        for command in ("evaluate", "bench", "export")
    },
    "info checkpoint=evil.safetensors": ["info", "checkpoint=evil.safetensors"],
    "check evil.json": ["check", "evil.json"],
}
TEXTS: dict[str, tuple[str, str, list[str]]] = {  # name → file, content, what is typed
    "YAML in a plan": ("plan.yaml", f"blocks: {YAML}", prune("sparsity.plan=plan.yaml")),
    "YAML in a config": ("my.yaml", f"seed: {YAML}", ["prune", "--config-dir", ".", "--config-name", "my"]),
    "YAML in a saved config": ("run/.hydra/config.yaml", f"seed: {YAML}", RESUME),
    "node in a saved config": ("run/.hydra/config.yaml", f"model: {NODE}", RESUME),
    "hydra in a saved config": ("run/.hydra/config.yaml", f"hydra: {{callbacks: {{a: {NODE}}}}}", RESUME),
    "launcher in a saved config": ("run/.hydra/config.yaml", f"hydra: {{launcher: {NODE}}}", [*RESUME, "--dry-run"]),
    "defaults in a saved config": ("run/.hydra/config.yaml", "defaults: [evil]", RESUME),
    "hydra in a config that is used again": (
        "old/.hydra/config.yaml",
        f"hydra: {{callbacks: {{a: {NODE}}}}}",
        ["prune", "--config-dir", "old/.hydra", "--config-name", "config"],
    ),
    "model that is a node": ("my.yaml", f"model: {NODE}", ["prune", "--config-dir", ".", "--config-name", "my"]),
}


def cases() -> list[Case]:
    return [
        *(Case(f"door/{name}/{kind}", partial(pickled, name, kind)) for name in FILES for kind in PICKLES),
        *(Case(f"door/{name}", partial(text, name)) for name in TEXTS),
        *(Case(f"door/state/{kind}", partial(state, kind)) for kind in PICKLES),
        Case("door/bait", bait),
        *(Case(f"door/told by {what}", partial(told, what)) for what in ("paths", "a cache")),
    ]


def bait(folder: Path) -> None:
    """The bait works where somebody takes it."""

    def work() -> None:
        zipped(Path("evil.pth"))
        torch.load("evil.pth", weights_only=False)

    assert fork(work, folder).wait().code == 0
    assert (folder / "canary").is_dir()


def require_refused(folder: Path, argv: list[str], *codes: int) -> None:
    outcome = corp(folder, *argv, before=offline)
    assert not (folder / "canary").exists(), "CODE RAN"
    require_sentence(outcome, *codes)


def offline() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    socket.socket.connect = refuse  # type: ignore[method-assign]


def pickled(name: str, kind: str, folder: Path) -> None:
    np.save(folder / "photos.npy", np.zeros((64, 224, 224, 3), np.uint8))
    about = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 10,
        "model_args": {"depth": 1},
        "pretrained_cfg": {},
    }
    for place, config in (("timm", about), ("hf", {"model_type": "vit"})):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(config))
    place = name.rpartition(":")[2] if ":" in name else name.rpartition("=")[2].rpartition(" ")[2]
    PICKLES[kind](folder / place)
    cached = "cache" in name  # a file that is none of corp's is left alone, and the run goes on without
    before = (folder / place).read_bytes()
    require_refused(folder, FILES[name], 0 if cached else 2)
    assert (folder / place).read_bytes() == before, "the user's file changed"


def text(name: str, folder: Path) -> None:
    file, content, argv = TEXTS[name]
    if argv[:2] == RESUME:
        shutil.copytree(stopped("sequential"), folder, dirs_exist_ok=True)
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    if argv[:2] == RESUME:  # with the hash that goes with it
        record = path.with_name("resume.json")
        about = json.loads(record.read_text())
        about["configs"] = [hashlib.sha256(path.read_bytes()).hexdigest()]
        record.write_text(json.dumps(about))
    require_refused(folder, argv, 2)


def state(kind: str, folder: Path) -> None:
    shutil.copytree(stopped("sequential"), folder, dirs_exist_ok=True)
    for path in (folder / "run/.resume").glob("*.safetensors"):
        PICKLES[kind](path)
    require_refused(folder, RESUME, 0)


def told(what: str, folder: Path) -> None:
    """No path, user, host or secret is in what a run gives; the same inputs give the same bytes."""
    secrets = {"USER": "somebodyelse", "LOGNAME": "somebodyelse", "HOSTNAME": "somewhereelse", "TOKEN": "s3cr3tvalue"}
    place = folder / "secretplace"
    place.mkdir()
    whole = undisturbed("uniform").folder
    shutil.copyfile(whole / "run/plan.yaml", place / "plan.yaml")
    images = np.random.default_rng(0).integers(0, 256, (128, 8, 8), np.uint8)
    for name in ("images", "s3cr3tvalue"):
        np.save(place / f"{name}.npy", images)

    def before() -> None:
        os.environ.update(secrets)

    places = {
        "cache a": [f"calibration.cache={place}/a"],
        "cache b": [f"calibration.cache={place}/b/deeper"],
        "none": [],
    }
    runs = {name: [HALF, *settings] for name, settings in places.items()}
    if what == "paths":
        runs = {"full": [f"sparsity.plan={place}/plan.yaml", f"evaluation.path={place}/images.npy"]}
    found = {}
    for name, settings in runs.items():
        image = "images" if what == "a cache" else "${oc.env:TOKEN}"
        argv = prune(ONCE, f"calibration.path={place}/{image}.npy", *settings, into=str(place / name))
        outcome = corp(folder, *argv, before=before)
        require_sentence(outcome, 0)
        found[name] = {path.name: path.read_bytes() for path in files(place / name).values()}
        for file in ("pruned.safetensors", "report.json", "report.html", "plan.yaml"):
            for word in (
                "secretplace",
                str(folder),
                str(Path.home()) + "/",
                "somebodyelse",
                "somewhereelse",
                socket.gethostname(),
            ):
                if len(word) >= SHORTEST:  # shorter ones are among the bits of weights by chance
                    assert word.encode() not in found[name][file], f"{file} tells {word}"
            if image.startswith("$"):
                assert b"s3cr3tvalue" not in found[name]["pruned.safetensors"], "the weights tell a variable"
    first, *others = found.values()
    for other in others:
        assert other["pruned.safetensors"] == first["pruned.safetensors"], "the weights' bytes depend on the cache"
        assert other["plan.yaml"] == first["plan.yaml"], "the plan depends on the cache"
