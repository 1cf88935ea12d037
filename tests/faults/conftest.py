"""Fixtures of the tests of files from strangers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from corp_cli.files.checkpoint import write_checkpoint
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from tests.faults.untrusted import DATA
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What an unpickled Evil would leave behind; no test may, and none may open a connection."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pruned checkpoint."""
    path = tmp_path_factory.mktemp("sound") / "pruned.safetensors"
    dense, (name, args) = variants.build("vit"), variants.arguments("vit")
    pruned = prune_half(dense, variants.images("vit"), allowed("vit"))
    recipe = {"recipe": "best", "sparsity": {"mlp": 0.5}}
    spec = ModelSpec(name, args, DATA)
    write_checkpoint(pruned, Manifest(spec, pruned_sizes(pruned, dense), recipe, "0" * 64, {"timm": "1"}), path)
    return path
