"""Stage 4, export: the checkpoint, read back and compared before it counts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.checkpoint import Manifest, load_pruned, weights_sha256, write_checkpoint
from corp_cli.config import PruneConfig
from corp_cli.environment import versions
from corp_cli.models.loading import ModelSpec
from corp_cli.models.resize import pruned_sizes

CHECKPOINT = "pruned.safetensors"


def make_manifest(dense: nn.Module, pruned: nn.Module, spec: ModelSpec, cfg: PruneConfig) -> Manifest:
    """What the checkpoint will say of itself."""
    recipe = {key: value for key, value in asdict(cfg).items() if key not in ("model", "evaluation", "device")}
    recipe["sparsity"].update(cfg.sparsity.fractions())  # what was done where nothing was asked for
    return Manifest(spec, pruned_sizes(pruned, dense), recipe, weights_sha256(dense), versions())


@torch.inference_mode()
def export(pruned: nn.Module, manifest: Manifest, output_dir: Path, probe: Tensor) -> Path:
    """Write pruned.safetensors and read it back: bitwise the same logits on the images `probe`, or no file at all."""
    path = output_dir / CHECKPOINT
    write_checkpoint(pruned, manifest, path)
    reloaded = load_pruned(path).to(probe.device)
    if not torch.equal(reloaded(probe), pruned(probe)):
        path.unlink()
        raise RuntimeError(f"{path} gave other logits when read back, and was removed")
    return path
