"""What tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from corp_cli import commands
from corp_cli.config.prune import PruneConfig
from tests.support.typed import put_module

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """DeiT-Tiny, calib and nips1000; the test skips where they are not at hand (they are not ours to hand out)."""
    if not (REAL_DATA / "deit_tiny_patch16_224.safetensors").is_file():
        pytest.skip(f"real data (DeiT-Tiny and ImageNet images) not found at {REAL_DATA}")
    return REAL_DATA


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
