"""What corp returns and loads are ordinary models: they train on, and are read back within rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from corp_cli import load_pruned
from corp_cli.cli.main import main
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import ModelConfig, PruneConfig, SparsityConfig
from corp_cli.export import write as export_stage
from corp_cli.export.write import UNVERIFIED, logits_apart
from corp_cli.files.checkpoint import write_checkpoint
from corp_cli.files.output import CHECKPOINT
from corp_cli.models.loading import load_dense
from corp_cli.models.spec import Manifest
from corp_cli.pipeline import prune
from tests.support.typed import UNTIMED

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def require_trainable(model: nn.Module) -> None:
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(X).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize(
    "sparsity", [SparsityConfig(), SparsityConfig(macs=0.4, curve_images=16)], ids=["uniform", "macs"]
)
@pytest.mark.parametrize("inside", [False, True], ids=["", "inference"])
def test_the_model_of_a_run_and_of_its_file_can_be_trained(
    sparsity: SparsityConfig, inside: bool, tmp_path: Path
) -> None:
    cfg = PruneConfig(
        sparsity=sparsity,
        calibration=CalibrationConfig(num_images=32, num_workers=0),
        evaluation=EvaluationConfig(num_images=16, num_workers=0, throughput_batches=0),
        device="cpu",
    )
    with torch.inference_mode(inside):
        pruned = prune(cfg, tmp_path).model
        loaded = load_pruned(tmp_path / CHECKPOINT)
        dense, _ = load_dense(ModelConfig())
    for model in (pruned, loaded, dense):
        require_trainable(model)


def test_logits_may_differ_by_rounding_and_no_more() -> None:
    dense, _ = load_dense(ModelConfig())
    same, _ = load_dense(ModelConfig())
    assert logits_apart(dense, same, X) is None
    scale = same.blocks[0].attn.scale  # type: ignore[union-attr, index]
    same.blocks[0].attn.scale = scale * (1 + 1e-6)  # type: ignore[union-attr, index]
    same.blocks[0].attn.fused_attn = False  # type: ignore[union-attr, index]
    assert logits_apart(dense, same, X) is None
    same.blocks[0].attn.scale = scale * 1.5  # type: ignore[union-attr, index]
    assert "logits of up to" in str(logits_apart(dense, same, X))


@pytest.mark.usefixtures("tiny_digits")
def test_a_checkpoint_that_reads_back_otherwise_is_kept_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(model: nn.Module, manifest: Manifest, path: Path) -> None:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter("head.bias")[0] += 1
        write_checkpoint(changed, manifest, path)

    monkeypatch.setattr(export_stage, "write_checkpoint", other)
    assert main(["prune", *UNTIMED, "compensation.propagate=none", f"hydra.run.dir={tmp_path}/run"]) == 1
    assert "differs from the model when read back (the tensor head.bias)" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert UNVERIFIED in names
    assert CHECKPOINT not in names
    assert load_pruned(tmp_path / "run" / UNVERIFIED) is not None
