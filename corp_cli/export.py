"""Stage 4, export: the checkpoint, read back and compared before it counts, and files for other runtimes."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp_cli import console
from corp_cli.checkpoint import Manifest, load_pruned, weights_sha256, write_checkpoint
from corp_cli.config import PruneConfig
from corp_cli.environment import versions
from corp_cli.errors import CorpError
from corp_cli.formats import Source, place, runs_of, scratch, write_files
from corp_cli.inputs import Inputs, tracked_batches
from corp_cli.memory import halving_batches
from corp_cli.models.loading import ModelSpec
from corp_cli.models.resize import pruned_sizes
from corp_cli.parity import compare

CHECKPOINT = "pruned.safetensors"
NOT_RECIPE = ("model", "evaluation", "gate", "export", "device")  # what the weights do not depend on


def make_manifest(dense: nn.Module, pruned: nn.Module, spec: ModelSpec, cfg: PruneConfig) -> Manifest:
    """What the checkpoint will say of itself."""
    recipe = {key: value for key, value in asdict(cfg).items() if key not in NOT_RECIPE}
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


def export_formats(
    pruned: nn.Module, manifest: Manifest, inputs: Inputs, cfg: PruneConfig, output_dir: Path
) -> list[dict[str, Any]] | None:
    """The files that `export.formats` names → what the report says of them, None where none are asked for.

    Where a model cannot be exported, the run says so and goes on: its checkpoint is whole.
    """
    if not cfg.export.formats:
        return None
    source, cpu = Source(copy.deepcopy(pruned).cpu().float(), inputs.spec, manifest), torch.device("cpu")
    try:
        with scratch(output_dir) as folder:
            files = write_files(source, cfg.export, folder)
            runs, (images, intake) = runs_of(files), (inputs.evaluation, inputs.evaluated)
            _, parity = halving_batches(
                lambda c: compare(source.model, runs, tracked_batches(images, c.evaluation, inputs.spec, cpu, intake)),
                cfg,
                "evaluation",
            )
            return place(files, parity, output_dir)
    except CorpError as error:
        console.warn(f"nothing was exported: {error}")
        return []
