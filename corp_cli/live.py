"""prune_model(model, images): what `corp prune` does, to a module and images that a program holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp_cli.cli.compose import load_config
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import carried_manifest, carry_manifest
from corp_cli.images.held import held_images
from corp_cli.images.sources import ImageSet
from corp_cli.models.live import is_transformers, live_model, unwrapped
from corp_cli.models.loaded import LoadedModel
from corp_cli.pipeline import PruneResult, prune
from corp_cli.prepare.images import HELD_OUT_IMAGES
from corp_cli.prepare.work import Given
from corp_cli.runtime.memory import plain_memory_errors


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def prune_model(
    model: nn.Module,
    images: Any,
    *,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    joint: float | None = None,
    mlp: float | None = None,
    qk: float | None = None,
    vo: float | None = None,
    heads: float | None = None,
    recipe: str = "best",
    seed: int = 0,
    evaluation: Any = None,
    overrides: Sequence[str] = (),
    output_dir: str | os.PathLike[str] | None = None,
) -> PruneResult:
    """A pruned copy of a timm model with the weights it has, and the report; `model` itself is left as it is.

    images: a tensor [N, C, H, W], or a DataLoader or other iterable of batches [B, C, H, W] or (images, labels),
    prepared for the model; or the path of a folder, whose images are prepared as the model's pretrained_cfg says. Of
    batches the first calibration.num_images + 1024 images are read and kept, in float32 on the CPU. evaluation: what to
    judge on, in the same forms; None: what calibration leaves over, or else what it was calibrated on.

    macs ... heads: the fraction to remove, as sparsity.macs and its like; macs=0.4 where none is named and the model
    allows it. overrides: any other setting of `corp prune`, such as "compensation.alpha=0.3". output_dir: where the
    files of `corp prune` are written, if anywhere.

    The pruned module is on the device, and in the dtype and the mode (train or eval) of `model`. Its parameters are
    ordinary ones, and those frozen in `model` are frozen. With "calibration.offload=blocks" among the overrides a model
    of timm is not copied to float32: one block at a time is, on the device that "device=…" names, and the result is on
    the CPU. Figures in the report are of float32. A model of transformers comes back as the same model of timm. Raises
    CorpError for anything that the user can put right.
    """
    with plain_memory_errors():
        inner = _prunable(model)
        budgets = {"macs": macs, "params": params, "latency": latency}
        fractions = {"joint": joint, "mlp": mlp, "qk": qk, "vo": vo, "heads": heads}
        cfg = _config({**budgets, **fractions}, recipe, seed, overrides)
        by_block = cfg.calibration.offload == "blocks"
        dense = live_model(inner, cfg.model.name or None, cfg.model.args, cfg.data, shared=by_block)
        device = cfg.device if by_block else str(next(inner.parameters()).device)
        cfg = replace(cfg, model=replace(cfg.model, name=dense.source), device=device)
        if is_transformers(inner) and any(_is_path(one) for one in (images, evaluation)) and cfg.data.mean is None:
            raise CorpError(
                f"corp does not know how images are prepared for a {type(inner).__name__} in memory; give tensors, or "
                "say it with overrides=('data.mean=[...]', 'data.std=[...]')."
            )
        known = cfg.calibration.num_images + HELD_OUT_IMAGES
        calibration = _images(images, "images", cfg.calibration, dense, known)
        judged = None
        if evaluation is not None:
            key = "images" if evaluation is images else "evaluation"  # by which corp knows that they are the same
            judged = _images(evaluation, key, cfg.evaluation, dense, cfg.evaluation.num_images)
        result = prune(cfg, output_dir, given=Given(dense, calibration, judged))
    _like(result.model, inner)
    return result


def _prunable(model: Any) -> nn.Module:
    """The module to prune, out of its wrappers."""
    if not isinstance(model, nn.Module):
        raise CorpError(f"model is a {type(model).__name__}, not a torch.nn.Module; corp prune takes names of models.")
    inner = unwrapped(model)
    if carried_manifest(inner):
        raise CorpError("corp has pruned this model already; prune the dense one, and ask for more.")
    return inner


def _config(sparsity: dict[str, Any], recipe: str, seed: int, overrides: Sequence[str]) -> PruneConfig:
    """The config of `corp prune` with these settings; model.name is empty unless `overrides` name it."""
    others = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    named = [f"sparsity.{key}={value}" for key, value in sparsity.items() if value is not None]
    cfg = load_config(f"recipe={recipe}", f"seed={seed}", *named, *others)
    for key, why in (
        ("calibration.path", "images says what to calibrate on"),
        ("model.checkpoint", "the model has its weights"),
        ("device", "the model is pruned where it is"),
    ):
        if key == "device" and cfg.calibration.offload == "blocks":
            continue  # it stays where it is, and its blocks go there
        if any(override.lstrip("+").partition("=")[0] == key for override in others):
            raise CorpError(f"{why}; leave {key} out of overrides.")
    if not any(override.partition("=")[0] in ("model", "model.name") for override in others):
        cfg.model.name = ""
    return cfg


def _is_path(images: Any) -> bool:
    return isinstance(images, str | os.PathLike)


def _images(
    images: Any, key: str, section: CalibrationConfig | EvaluationConfig, dense: LoadedModel, limit: int | None
) -> ImageSet | None:
    """The images that are held; None for a path, which is put into `section`."""
    if _is_path(images):
        section.path = str(Path(images))
        return None
    data, args = dense.spec.data, dense.spec.args
    return held_images(images, key, data["input_size"], args["num_classes"], limit)


def _like(pruned: nn.Module, given: nn.Module) -> None:
    """Give `pruned` the dtype and the mode of `given`, and freeze what is frozen there."""
    learns = {name: parameter.requires_grad for name, parameter in given.named_parameters()}
    pruned.to(next(given.parameters()).dtype).train(given.training)
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(_learns(name, learns))
    manifest = carried_manifest(pruned)
    assert manifest is not None
    carry_manifest(pruned, replace(manifest, pruned_sha256=None))  # a cast is no training


def _learns(name: str, learns: dict[str, bool]) -> bool:
    """Whether the namesake of a parameter learns; where there is none, as of joined projections, any beside it."""
    if name in learns:
        return learns[name]
    while name:
        name = name.rpartition(".")[0]
        if near := [learn for other, learn in learns.items() if other.startswith(f"{name}.")]:
            return any(near)
    return any(learns.values())
