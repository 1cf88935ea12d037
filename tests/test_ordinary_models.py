"""What corp returns and loads are ordinary models: they train on, and are read back within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from corp_cli import load_pruned
from corp_cli.cli.main import main
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import ModelConfig, PruneConfig, SparsityConfig
from corp_cli.export import write as export_stage
from corp_cli.export.write import UNVERIFIED, read_back_difference
from corp_cli.files.output import CHECKPOINT
from corp_cli.models.loading import load_dense
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
    assert read_back_difference(dense, same, X) is None
    scale = same.blocks[0].attn.scale  # type: ignore[union-attr, index]
    same.blocks[0].attn.scale = scale * (1 + 1e-6)  # type: ignore[union-attr, index]
    same.blocks[0].attn.fused_attn = False  # type: ignore[union-attr, index]
    assert read_back_difference(dense, same, X) is None
    same.blocks[0].attn.scale = scale * 1.5  # type: ignore[union-attr, index]
    assert "logits of up to" in str(read_back_difference(dense, same, X))
    with torch.no_grad():
        same.get_parameter("blocks.1.mlp.fc2.bias")[3] += 1e-9
    assert read_back_difference(dense, same, X) == "the tensor blocks.1.mlp.fc2.bias"


@pytest.mark.usefixtures("tiny_digits")
def test_a_checkpoint_that_reads_back_otherwise_is_kept_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(path: Path) -> nn.Module:
        model = load_pruned(path)
        with torch.no_grad():
            model.get_parameter("head.bias")[0] += 1
        return model

    monkeypatch.setattr(export_stage, "load_pruned", other)
    assert main(["prune", *UNTIMED, "compensation.propagate=none", f"hydra.run.dir={tmp_path}/run"]) == 1
    assert "differs from the model when read back (the tensor head.bias)" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert UNVERIFIED in names
    assert CHECKPOINT not in names
    assert load_pruned(tmp_path / "run" / UNVERIFIED) is not None
