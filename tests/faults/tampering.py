"""Files that somebody changed: state, caches, configs, plans, reports, checkpoints.

What is kept to save work is used whole or measured anew, which is said; what a user gives is answered in a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.faults.cases import Case
from tests.faults.forks import corp, prune, require_sentence, shared
from tests.faults.undisturbed import KINDS, ONCE, RESUME, files, require_same, stopped, undisturbed

Fellow = Callable[[], Path]
Tamper = Callable[[Path, Fellow], object]  # (the file, its fellow of another run, made when it is asked for)


def cut(part: float) -> Tamper:
    return lambda path, _: path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])


def flip(part: float) -> Tamper:
    def tamper(path: Path, _: Fellow) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(part * len(data)), len(data) - 1)] ^= 0x10
        path.write_bytes(data)

    return tamper


def holding(content: bytes) -> Tamper:
    return lambda path, _: path.write_bytes(content)


def folder_instead(path: Path, _: Fellow) -> None:
    path.unlink()
    path.mkdir()


def other(path: Path, fellow: Fellow) -> None:
    shutil.copyfile(fellow(), path)


def resaved(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Tamper:
    """The tensors changed, below a header that is as it was."""

    def tamper(path: Path, _: Fellow) -> None:
        with safe_open(path, framework="np") as file:
            about = file.metadata()
        save_file(change(load_file(path)), path, metadata=about)

    return tamper


def swapped(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two tensors of one shape and of other values have changed places."""
    for a in state:
        for b in state:
            if a < b and state[a].shape == state[b].shape and not np.array_equal(state[a], state[b]):
                return {**state, a: state[b], b: state[a]}
    return {}


def floats(change: Callable[[np.ndarray], np.ndarray]) -> Tamper:
    return resaved(lambda state: {k: change(v) if v.dtype.kind == "f" else v for k, v in state.items()})


ANY: dict[str, Tamper] = {
    **{f"cut at {part}": cut(part) for part in (0, 0.01, 0.5, 0.99)},
    **{f"flipped at {part}": flip(part) for part in (0, 0.02, 0.2, 0.6, 1)},
    "of another run": other,
    "a folder": folder_instead,
    "zeros": holding(bytes(1000)),
}
TENSORS: dict[str, Tamper] = {
    **ANY,
    "swapped": resaved(swapped),
    "zeroed": floats(np.zeros_like),
    "NaN": floats(lambda tensor: tensor * np.nan),
    "infinite": floats(lambda tensor: tensor + np.inf),
    "fp16": floats(lambda tensor: tensor.astype(np.float16)),
    "one lacking": resaved(lambda state: dict(list(state.items())[1:])),
    "scaled": floats(lambda tensor: 2 * tensor),
}
TEXT: dict[str, Tamper] = {
    **ANY,
    **{f"{text} instead": holding(text.encode()) for text in ("{}", "[]", "null", "1", "x")},
    "nested deeply": holding(b"[" * 5000),
    "an escape code": holding(b"\x1b[31m"),
    "NaN": lambda path, _: path.write_text(path.read_text().replace("0.", "NaN", 3)),
}
STATE = {"sequential": ("statistics-*", "block-*"), "budget": ("block-*", "curves-*")}
CACHED = {"uniform": "statistics-*", "budget": "curves-*"}
ABOUT = (".hydra/config.yaml", ".hydra/resume.json")


def cases() -> list[Case]:
    found = [
        Case(f"tamper/state of {kind}/{pattern}/{name}", partial(state, kind, pattern, name))
        for kind, patterns in STATE.items()
        for pattern in patterns
        for name in tampers(pattern)
        if name != "a folder"  # is somebody's, and stays
    ]
    found += [
        Case(f"tamper/cache/{pattern}/{name}", partial(cached, kind, pattern, name))
        for kind, pattern in CACHED.items()
        for name in tampers(pattern)
    ]
    found += [Case(f"tamper/{file}/{name}", partial(about, file, name)) for file in ABOUT for name in TEXT]
    given: dict[str, list[str]] = {
        "plan.yaml": prune(ONCE, "sparsity.plan=plan.yaml"),
        "report.json": ["check", "report.json", "--against", "base.json"],
        "pruned.safetensors": ["evaluate", *prune()[1:-1], "checkpoint=pruned.safetensors", "hydra.run.dir=run"],
    }
    for file, argv in given.items():
        found += [Case(f"tamper/{file}/{name}", partial(answered, file, argv, name)) for name in tampers(file)]
    return found


def tampers(name: str) -> dict[str, Tamper]:
    return TEXT if name.endswith((".json", ".yaml")) else TENSORS


@cache
def another(kind: str) -> Path:
    """The folder of the same run with another seed, stopped at the same place, and its cache."""
    from tests.faults import injected

    folder = shared("another")
    at = undisturbed(kind).calls["save_file"] - 1
    argv = [*KINDS[kind], "seed=7"]
    corp(folder, *argv, before=lambda: injected.install(folder, "save_file", at, "interrupt"))
    outcome = corp(folder, *argv, "calibration.cache=cache", "hydra.run.dir=whole")
    assert outcome.code == 0, outcome.err
    return folder


def one(folder: Path, pattern: str) -> Path:
    """The last file of that name."""
    return sorted(folder.glob(pattern))[-1]


def words(text: str) -> set[str]:
    """What is said, without what is said of every run."""
    return {line.strip() for line in text.splitlines() if "read from" not in line and line.startswith("corp:")}


def state(kind: str, pattern: str, name: str, folder: Path) -> None:
    shutil.copytree(stopped(kind), folder, dirs_exist_ok=True)
    tampers(pattern)[name](one(folder, f"run/.resume/{pattern}"), lambda: one(another(kind), f"run/.resume/{pattern}"))
    outcome = corp(folder, *RESUME)
    require_sentence(outcome, 0)
    require_same(folder, f"resume {kind}")
    assert words(outcome.err) - words(undisturbed(f"resume {kind}").said), "measured anew without a word"


@cache
def filled(kind: str) -> Path:
    """A folder with a cache that a run of that kind has filled."""
    folder = shared("filled")
    assert corp(folder, *KINDS[kind], "calibration.cache=cache").code == 0
    shutil.rmtree(folder / "run")
    return folder


def cached(kind: str, pattern: str, name: str, folder: Path) -> None:
    shutil.copytree(filled(kind), folder, dirs_exist_ok=True)
    tampers(pattern)[name](one(folder, f"cache/{pattern}"), lambda: one(another(kind), f"cache/{pattern}"))
    outcome = corp(folder, *KINDS[kind], "calibration.cache=cache")
    if name == "a folder" and outcome.code == 2:  # somebody made it: it is not removed
        return require_sentence(outcome, 2)
    require_sentence(outcome, 0)
    shutil.rmtree(folder / "cache")
    require_same(folder, kind)
    assert words(outcome.err) - words(undisturbed(kind).said), "measured anew without a word"


def about(file: str, name: str, folder: Path) -> None:
    """What is kept of a run's settings: another is refused, and the state stays for the right one."""
    shutil.copytree(stopped("sequential"), folder, dirs_exist_ok=True)
    path, right = folder / "run" / file, (folder / "run" / file).read_bytes()
    TEXT[name](path, lambda: another("sequential") / "run" / file)
    outcome = corp(folder, *RESUME)
    require_sentence(outcome, 0, 2)
    if outcome.code == 2:
        before = files(stopped("sequential") / "run/.resume").keys()
        assert before == files(folder / "run/.resume").keys(), "state lost with the error"
        if path.is_dir():
            path.rmdir()
        path.write_bytes(right)
        require_sentence(corp(folder, *RESUME), 0)
    require_same(folder, "resume sequential")


def answered(file: str, argv: list[str], name: str, folder: Path) -> None:
    """A file that a user gives: it is taken as it stands, or refused in a sentence."""
    whole = undisturbed("uniform").folder / "run"
    shutil.copyfile(whole / file, folder / file)
    shutil.copyfile(whole / "report.json", folder / "base.json")
    tampers(file)[name](folder / file, lambda: another("sequential") / "whole" / file)
    outcome = corp(folder, *argv)
    require_sentence(outcome, 0, 2, 3)
    assert "\x1b" not in outcome.out + outcome.err, "an escape code of the file reaches the terminal"
