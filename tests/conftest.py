"""What tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "CORP_TEST_CUDA" not in os.environ:  # figures are compared with those of a CPU, and device=auto would take a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Threads that spin while they wait take the cores of those that they wait for, here those of the other workers: a test
# of a second takes half a minute. It must be set before torch is imported, and holds for processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from corp_cli import commands
from corp_cli.cli.main import main
from corp_cli.config.prune import PruneConfig
from corp_cli.models.bundled import BUNDLED, BundledModel
from corp_cli.runtime import hub
from tests.support import quicker
from tests.support.tiny import write_tiny
from tests.support.typed import UNTIMED, put_module

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_configure() -> None:
    """Nothing of what is imported and collected from here on is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Now there may be some; the rest is not looked through."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _quicker() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quicker.draw_no_weights_on_meta(patch)
        quicker.remember_counts(patch)
        quicker.find_the_mode_once(patch)
        quicker.copy_no_schemas(patch)
        quicker.remember_compositions(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _streams_stay_open() -> None:
    """absl closes what was stderr when it was imported, where logging is configured anew and stderr is another."""
    with contextlib.suppress(ImportError):
        from absl import logging

        logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the hub; tests/support/hub.py has one that stands in for it."""
    monkeypatch.setattr(hub, "unreachable", lambda url: "no test asks it")
    monkeypatch.setattr(hub, "_answers", {})


@pytest.fixture(scope="session")
def real_data() -> Path:
    """DeiT-Tiny, calib and nips1000; the test skips where they are not at hand (they are not ours to hand out)."""
    if not (REAL_DATA / "deit_tiny_patch16_224.safetensors").is_file():
        pytest.skip(f"real data (DeiT-Tiny and ImageNet images) not found at {REAL_DATA}")
    return REAL_DATA


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> BundledModel:
    """What `tiny_digits` puts in place of the bundled model."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.safetensors")


@pytest.fixture
def tiny_digits(tiny_model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """A model of two narrow blocks stands for the bundled one: for tests that want a run, and not its accuracy."""
    monkeypatch.setitem(BUNDLED, "vit_digits", tiny_model)
    return tiny_model


@pytest.fixture(scope="session")
def tiny_run(tiny_model: BundledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on `tiny_digits`, for tests that read what is in it and write elsewhere."""
    folder = tmp_path_factory.mktemp("tiny_run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "vit_digits", tiny_model)
        assert main(["prune", *UNTIMED, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in a folder of its own, without the variables that make errors longer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORP_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PruneConfig, Path]]:
    """What the pipeline was asked to run, in order; each run writes one file."""
    asked: list[tuple[PruneConfig, Path]] = []

    def run(cfg: PruneConfig, output_dir: Path, shared: Path | None = None) -> None:
        asked.append((cfg, output_dir))
        (output_dir / "pruned.safetensors").touch()

    put_module(monkeypatch, "prune", commands, run=run)
    return asked
