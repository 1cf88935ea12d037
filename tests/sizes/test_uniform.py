"""sparsity.round_to: a number, or what the device is fast with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from corp_cli.cli.main import main
from corp_cli.config.prune import SparsityConfig
from corp_cli.models.adapter import blocks_of
from corp_cli.sizes.uniform import step_of, uniform_sizes
from tests.support import variants
from tests.support.typed import UNTIMED, one_sentence


@pytest.mark.parametrize(
    ("group", "dense", "device", "step"),
    [
        ("mlp", 5120, "cuda", 128),
        ("mlp", 4096, "cuda", 128),
        ("mlp", 3072, "cuda", 64),
        ("mlp", 768, "cuda", 16),
        ("mlp", 128, "cuda", 8),
        ("mlp", 5120, "cpu", 16),
        ("mlp", 256, "mps", 8),
        ("qk", 64, "cuda", 8),
        ("vo", 80, "cpu", 8),
        ("heads", 12, "cuda", 1),
    ],
)
def test_steps_are_what_the_device_is_fast_with(group: str, dense: int, device: str, step: int) -> None:
    assert step_of("auto", group, dense, device) == step
    assert step_of(24, group, dense, device) == (1 if group == "heads" else 24)


def test_uniform_sizes_are_multiples_of_the_step_of_their_layer() -> None:
    block = blocks_of(variants.build("deit"))[0]
    cfg = SparsityConfig(mlp=0.4, qk=0.5, round_to="auto")
    for device in ("cpu", "cuda"):
        sizes = uniform_sizes(block, frozenset({"mlp", "qk"}), cfg, device)
        assert sizes.mlp % step_of("auto", "mlp", block.sizes.mlp, device) == 0
        assert 0 < sizes.mlp < block.sizes.mlp
        assert sizes.vo == block.sizes.vo


@pytest.mark.usefixtures("tiny_digits")
def test_a_budget_keeps_to_the_steps_of_the_device(tmp_path: Path) -> None:
    asked = ["sparsity.params=0.4", "sparsity.curve_images=16", "sparsity.round_to=auto", "device=cpu"]
    assert main(["prune", *UNTIMED, *asked, f"hydra.run.dir={tmp_path}"]) == 0
    blocks = json.loads((tmp_path / "report.json").read_text())["blocks"]
    for block in blocks:
        dense, kept = block["dense"]["mlp"], block["pruned"]["mlp"]
        assert kept == dense or kept % step_of("auto", "mlp", dense, "cpu") == 0
    assert any(block["pruned"]["mlp"] < block["dense"]["mlp"] for block in blocks)
    assert torch.tensor([block["pruned"]["qk"] % 8 for block in blocks]).sum() == 0


@pytest.mark.parametrize("value", ["0", "fast", "8.5", "null", "[8]", "true"])
def test_steps_that_are_none_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "sparsity.joint=0.5", f"sparsity.round_to={value}"]) == 2
    one_sentence(capsys, ["sparsity.round_to"])
