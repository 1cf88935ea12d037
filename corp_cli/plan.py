"""The sizes of a run: as asked for every block alike, under a budget, or from a file that was saved and edited."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from corp_cli.budget import Budget, make_budget, matching_fraction, spend, uniform
from corp_cli.config import PruneConfig, SparsityConfig
from corp_cli.curves import ANCHORS, Curve, damage_curves
from corp_cli.curves_io import curves_file, curves_key, read_curves, write_curves
from corp_cli.errors import CorpError
from corp_cli.inputs import Inputs, curve_batches
from corp_cli.latency import latency_budget
from corp_cli.measure import statistics_key
from corp_cli.models.blocks import GROUPS, Block, Sizes
from corp_cli.models.read_block import needed_tokens
from corp_cli.output import write_cache
from corp_cli.rank import Scores, uniform_sizes
from corp_cli.sources import expand
from corp_cli.statistics import Statistics

PLAN = "plan.yaml"


@dataclass(frozen=True)
class SizePlan:
    """Sizes of every block, and how many tokens the last one updates (None: all).

    `predicted_kl` is the damage that a budget expects of the sizes, in nats per image; `predicted_speedup` what a
    latency budget expects to gain.
    """

    sizes: tuple[Sizes, ...]
    tokens: int | None = None
    predicted_kl: float | None = None
    predicted_speedup: float | None = None


def make_target(inputs: Inputs, cfg: PruneConfig) -> SizePlan | Budget:
    """What is asked for: sizes, or a budget for them.

    Raises CorpError, before any long work, for a plan that does not fit the model or a budget that cannot be met.
    """
    sparsity, blocks = cfg.sparsity, inputs.blocks
    tokens = updated_tokens(inputs.dense, sparsity)
    if sparsity.plan is not None:
        plan = read_plan(expand(sparsity.plan), blocks, needed_tokens(inputs.dense))
        return plan if sparsity.skip_unread is None else replace(plan, tokens=tokens)
    base = tuple(uniform_sizes(block, inputs.groups, sparsity) for block in blocks)
    if sparsity.latency is not None:
        return latency_budget(inputs, sparsity, base, tokens)
    if sparsity.budget() is not None:
        return make_budget(inputs.spec, blocks, sparsity, base, tokens)
    return SizePlan(base, tokens)


def updated_tokens(dense: nn.Module, sparsity: SparsityConfig) -> int | None:
    """How many tokens the last block is to update; None: all, because the head reads them or nobody asked.

    Raises CorpError where `sparsity.skip_unread` is asked of a model that reads all of its tokens.
    """
    needed, asked = needed_tokens(dense), sparsity.skip_unread
    if asked is None:
        asked = sparsity.budget() in ("macs", "latency") and getattr(dense, "num_classes", 0) > 0 and needed > 0
    if asked and not needed:
        raise CorpError(
            f"sparsity.skip_unread=true does not suit {type(dense).__name__}: its head reads every token, or its last "
            "block is not a plain one; leave it out."
        )
    return needed if asked else None


@torch.inference_mode()
def choose_sizes(
    target: SizePlan | Budget,
    inputs: Inputs,
    cfg: PruneConfig,
    statistics: Statistics,
    scores: tuple[Scores, ...],
    cache: Path | None,
) -> SizePlan:
    """The sizes of `target`: as they are, or those that do the least damage within the budget.

    Damage is measured in a context: every other group cut by the fraction in ANCHORS that is nearest to what the budget
    asks of all alike, so that budgets near each other share their curves; in further rounds, cut to the sizes found.
    """
    if isinstance(target, SizePlan):
        return target
    matching = matching_fraction(target)
    nearest = min(ANCHORS, key=lambda fraction: abs(fraction - matching))
    context, plan = uniform(target, nearest), SizePlan(target.base)
    for _ in range(cfg.sparsity.rounds):
        curves = _measured_curves(inputs, cfg, statistics, scores, context, nearest, target.wanted(), cache)
        sizes, predicted = spend(target, {(c.block, c.group): c.damage for c in curves})
        plan = SizePlan(sizes, target.tokens, predicted, target.speedup(sizes))
        context = sizes
    return plan


def _measured_curves(
    inputs: Inputs,
    cfg: PruneConfig,
    statistics: Statistics,
    scores: tuple[Scores, ...],
    context: tuple[Sizes, ...],
    fraction: float,
    wanted: list[tuple[int, str]],
    cache: Path | None,
) -> list[Curve]:
    """The curves of `wanted`: from the cache, or measured and kept there."""
    anchors, path = ANCHORS[fraction], None
    if cache is not None:
        key = curves_key(statistics_key(inputs), cfg, context, anchors, wanted)
        path = curves_file(cache, key)
        if (found := read_curves(path, key)) is not None:
            return found
    batches = list(curve_batches(inputs, cfg))
    curves = damage_curves(inputs.dense, inputs.blocks, statistics, scores, context, anchors, wanted, batches, cfg)
    if cache is not None and path is not None:
        write_cache(partial(write_curves, curves, key, path), cache)
    return curves


# --- files ----------------------------------------------------------------------------------------------------


def write_plan(plan: SizePlan, blocks: tuple[Block, ...], folder: Path) -> None:
    """Write plan.yaml: sizes by block, to be read, edited and given back as sparsity.plan."""
    sizes = {block.name: asdict(size) for block, size in zip(blocks, plan.sizes, strict=True)}
    content = {"predicted_kl": plan.predicted_kl, "last_block_tokens": plan.tokens, "blocks": sizes}
    text = yaml.safe_dump(content, sort_keys=False)
    try:
        (folder / PLAN).write_text(text)
    except OSError as error:
        raise CorpError(f"{folder / PLAN} cannot be written ({error}); check space and permissions.") from error


def read_plan(path: Path, blocks: tuple[Block, ...], needed: int) -> SizePlan:
    """The sizes in a plan.yaml; blocks and groups that it leaves out stay dense.

    `needed`: what the last block must update at least, 0 for all tokens. Raises CorpError naming the block and group
    for what the model does not have or allow.
    """
    if not path.is_file():
        raise CorpError(f"sparsity.plan={path} does not exist; give a plan.yaml that corp prune wrote.")
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CorpError(f"sparsity.plan={path} cannot be read ({str(error).splitlines()[0]}).") from error
    asked = content.get("blocks") if isinstance(content, dict) else None
    if not isinstance(asked, dict):
        raise CorpError(f"sparsity.plan={path} holds no `blocks`; give a plan.yaml that corp prune wrote.")
    if unknown := sorted(asked.keys() - {block.name for block in blocks}):
        raise CorpError(f"sparsity.plan={path} names {unknown[0]}, which the model does not have.")
    tokens = content.get("last_block_tokens")
    if tokens is not None and (type(tokens) is not int or not 0 < needed <= tokens):
        allowed = f"{needed} or more, or null" if needed else "null"
        raise CorpError(
            f"sparsity.plan={path} asks last_block_tokens={tokens}; this model needs {allowed} (all tokens)."
        )
    return SizePlan(tuple(_read_sizes(block, asked.get(block.name) or {}, path) for block in blocks), tokens)


def _read_sizes(block: Block, asked: Any, path: Path) -> Sizes:
    sizes = asdict(block.sizes)
    for group, size in asked.items():
        if group not in GROUPS:
            raise CorpError(f"sparsity.plan={path} names {block.name}.{group}; the groups are {', '.join(GROUPS)}.")
        dense = sizes[group]
        if type(size) is not int or not min(1, dense) <= size <= dense:
            raise CorpError(f"sparsity.plan={path} asks {block.name}.{group}={size}; give a number from 1 to {dense}.")
        if size < dense and group in block.refusals:
            raise CorpError(f"sparsity.plan={path} cuts {block.name}.{group}: {block.refusals[group]}.")
        sizes[group] = size
    return Sizes(**sizes)
