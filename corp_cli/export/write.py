"""Stage 4, export: the checkpoint, read back and compared before it counts, and files for other runtimes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.config.prune import PruneConfig
from corp_cli.config.shareable import shareable
from corp_cli.errors import CorpError
from corp_cli.export.formats import place, runs_of, scratch, write_files
from corp_cli.export.parity import compare
from corp_cli.files.checkpoint import counts_of, difference_of, load_pruned, write_checkpoint
from corp_cli.files.output import CHECKPOINT
from corp_cli.files.shards import checkpoint_files
from corp_cli.images.batches import choose
from corp_cli.measure.results import File
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.offload import bring_together, on_host
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest
from corp_cli.prepare.batches import range_batches, tracked_batches
from corp_cli.prepare.images import Images, intake_of
from corp_cli.runtime import console
from corp_cli.runtime.environment import versions
from corp_cli.runtime.memory import halving_batches

UNVERIFIED = "pruned.unverified.safetensors"  # a file that was read back as another model
NOT_RECIPE = ("model", "evaluation", "gate", "export", "device")  # what the weights do not depend on


def copied(pruned: nn.Module, dense: LoadedModel) -> LoadedModel:
    """`pruned`, its blocks together again, as it is on the host, and hashed while other work goes on."""
    bring_together(pruned)
    found = LoadedModel(CHECKPOINT, on_host(pruned), dense.spec)
    found.hash_ahead()
    return found


def make_manifest(dense: LoadedModel, pruned: LoadedModel, cfg: PruneConfig) -> Manifest:
    """What the checkpoint of `pruned` will say of itself."""
    recipe = {key: value for key, value in asdict(cfg).items() if key not in NOT_RECIPE}
    recipe["sparsity"].update(cfg.sparsity.fractions())  # joint by what it stands for
    for key in ("cache", "offload", "scratch"):  # the same weights with and without
        del recipe["calibration"][key]
    sizes = pruned_sizes(pruned.model, dense.model)
    manifest = Manifest(dense.spec, sizes, shareable(recipe, cfg), dense.sha256, versions())
    return replace(manifest, counts=counts_of(manifest), pruned_sha256=pruned.sha256)


def export(pruned: nn.Module, written: nn.Module, manifest: Manifest, output_dir: Path, probe: Tensor) -> Path:
    """Write pruned.safetensors and read it back: the same tensors, and within rounding the same logits on `probe`.

    written: the same model on the host, so that its tensors come there once.
    Of a checkpoint in shards only the tensors are compared, since there may be no room for the model twice. Raises
    RuntimeError, which is a bug of corp's, where that fails; the file then stays under the name UNVERIFIED, but for
    shards, which keep theirs without an index.
    """
    path = output_dir / CHECKPOINT
    write_checkpoint(written, manifest, path)
    difference = difference_of(path, written)
    whole = checkpoint_files(path)[-1]
    if not difference and whole == path:
        like = next(pruned.parameters())
        difference = logits_apart(pruned, load_pruned(path).to(like.device), probe.to(like))
    if difference:
        os.replace(whole, output_dir / UNVERIFIED)
        raise RuntimeError(f"the checkpoint differs from the model when read back ({difference}); see {UNVERIFIED}")
    return path


@torch.inference_mode()
def logits_apart(written: nn.Module, read: nn.Module, probe: Tensor) -> str | None:
    """In words, how the logits of `read` differ from those of `written` by more than rounding.

    Two modules with the same bits may run other kernels, so logits may differ by √eps of the largest. That must hold
    for half of the images `probe` [B, C, H, W]: a near tie in the merging of tokens may fall otherwise in single ones.
    """
    logits, again = written(probe), read(probe)
    largest = float(logits.abs().max())
    furthest = (logits - again).abs().flatten(1).amax(1)
    if furthest.median() <= torch.finfo(logits.dtype).eps ** 0.5 * largest:
        return None
    return f"logits of up to {largest:.3g} by up to {float(furthest.max()):.3g}"


def export_formats(
    pruned: nn.Module, manifest: Manifest, images: Images, cfg: PruneConfig, output_dir: Path
) -> list[File] | None:
    """The files that `export.formats` names → what the report says of them, None where none are asked for.

    Where a model cannot be exported, the run says so and goes on: its checkpoint is whole.
    """
    if not cfg.export.formats:
        return None
    model, spec, cpu = copy.deepcopy(pruned).cpu().float(), manifest.model, torch.device("cpu")

    def ranges() -> Iterator[Tensor]:
        few, _ = choose(images.calibration, cfg.export.int8_images, cfg.seed)
        yield from range_batches(few, cfg.calibration, spec, intake_of(few, cfg.calibration, "calibration"))

    try:
        with scratch(output_dir) as folder:
            files = write_files(LoadedModel(CHECKPOINT, model, spec, manifest), cfg.export, folder, ranges)
            runs, (judged, intake) = runs_of(files), (images.evaluation, images.evaluated)
            _, parity = halving_batches(
                lambda c: compare(model, runs, tracked_batches(judged, c, spec, cpu, intake)),
                cfg.evaluation,
                "evaluation",
            )
            return place(files, parity, output_dir)
    except CorpError as error:
        console.warn(f"nothing was exported: {error}")
        return []
