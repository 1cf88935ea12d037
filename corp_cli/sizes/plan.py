"""The sizes of a run: as asked for every block alike, under a budget, or from a file that was saved and edited."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from corp_cli.config.prune import PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.curves import curves_file, curves_key, read_curves, write_curves
from corp_cli.files.cache.measured import statistics_key
from corp_cli.files.output import write_cache
from corp_cli.images.sources import expand
from corp_cli.method.rank import Scores, uniform_sizes
from corp_cli.method.statistics import Statistics
from corp_cli.models.blocks import GROUPS, Block, Sizes
from corp_cli.models.token_block import most_merged, needed_tokens
from corp_cli.prepare import Inputs, curve_batches
from corp_cli.sizes.budget import Budget, make_budget, matching_fraction, spend, uniform
from corp_cli.sizes.curves import ANCHORS, TOKENS, Curve, damage_curves
from corp_cli.sizes.latency import latency_budget
from corp_cli.sizes.schedule import schedules

PLAN = "plan.yaml"
MERGE = "merge"  # beside the groups of a block in a plan: how many tokens it merges


@dataclass(frozen=True)
class SizePlan:
    """Sizes of every block, how many tokens each merges, and how many the last one updates (None: all).

    `predicted_kl` is the damage that a budget expects of the sizes, in nats per image; `predicted_speedup` what a
    latency budget expects to gain.
    """

    sizes: tuple[Sizes, ...]
    tokens: int | None = None
    merge: tuple[int, ...] = ()
    predicted_kl: float | None = None
    predicted_speedup: float | None = None


def make_target(inputs: Inputs, cfg: PruneConfig) -> SizePlan | Budget:
    """What is asked for: sizes, or a budget for them.

    Raises CorpError, before any long work, for a plan that does not fit the model or a budget that cannot be met.
    """
    sparsity, blocks = cfg.sparsity, inputs.blocks
    tokens = updated_tokens(inputs.dense, sparsity)
    if sparsity.plan is not None:
        plan = read_plan(expand(sparsity.plan), blocks, needed_tokens(inputs.dense), most_merged(inputs.dense))
        plan = plan if sparsity.skip_unread is None else replace(plan, tokens=tokens)
        return replace(plan, merge=()) if sparsity.merge_tokens is False else plan
    merges = merges_tokens(inputs.dense, sparsity)
    base = tuple(uniform_sizes(block, inputs.groups, sparsity) for block in blocks)
    if sparsity.latency is not None:
        return latency_budget(inputs, sparsity, base, tokens, merges)
    if sparsity.budget() is not None:
        return make_budget(inputs.spec, blocks, sparsity, base, tokens, merges)
    return SizePlan(base, tokens)


def merges_tokens(dense: nn.Module, sparsity: SparsityConfig) -> bool:
    """Whether a budget may merge tokens.

    Raises CorpError where `sparsity.merge_tokens` is asked of a model that it does not suit, or without such a budget.
    """
    asked, able = sparsity.merge_tokens, most_merged(dense) > 0
    if asked and sparsity.plan is None and sparsity.budget() not in ("macs", "latency"):
        raise CorpError(
            "sparsity.merge_tokens=true needs a budget that tokens count for; give sparsity.macs or sparsity.latency, "
            "or leave it out."
        )
    if asked and not able:
        raise CorpError(
            f"sparsity.merge_tokens=true does not suit {type(dense).__name__}: its head reads every token, or not all "
            "of its blocks are plain ones; leave it out."
        )
    if sparsity.budget() not in ("macs", "latency"):
        return False
    return able and getattr(dense, "num_classes", 0) > 0 if asked is None else asked


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


@torch.no_grad()
def choose_sizes(
    target: SizePlan | Budget,
    inputs: Inputs,
    cfg: PruneConfig,
    statistics: Statistics,
    scores: tuple[Scores, ...],
    cache: Path | None,
) -> SizePlan:
    """The sizes of `target`: as they are, or those that do the least damage within the budget.

    Damage is measured in a context: every other group cut by a fraction in ANCHORS, so that budgets share their curves;
    in further rounds, cut to the sizes found. See `context_fraction`.
    """
    if isinstance(target, SizePlan):
        return target
    fraction = context_fraction(target)
    context, plan, wanted = uniform(target, fraction), SizePlan(target.base), target.wanted()
    if target.token_costs:
        wanted += [(i, TOKENS) for i in range(len(target.base) - 1)]
    for _ in range(cfg.sparsity.rounds):
        curves = _measured_curves(inputs, cfg, statistics, scores, context, fraction, wanted, cache)
        plan = best_plan(target, {(c.block, c.group): c.damage for c in curves})
        context = plan.sizes
    return plan


def context_fraction(target: Budget) -> float:
    """The fraction in ANCHORS of every group that is cut around the one measured.

    It is the nearest to what the budget asks of all groups alike; none where tokens may be merged, since the groups
    then lose little.
    """
    if target.token_costs:
        return 0.0
    matching = matching_fraction(target)
    return min((f for f in ANCHORS if f > 0), key=lambda fraction: abs(fraction - matching))


def best_plan(target: Budget, damage: dict[tuple[int, str], Tensor]) -> SizePlan:
    """The plan with the least predicted damage, over schedules of merging; damage[block, group] by kept size."""
    ways: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    if target.token_costs is not None:
        ways = schedules([damage[i, TOKENS] for i in range(len(target.base) - 1)], target.token_costs)
    least, best = math.inf, SizePlan(target.base)
    for merge, hurt in ways:
        budget = target.merging(merge)
        if hurt < least and budget.least <= budget.limit:
            sizes, predicted = spend(budget, damage)
            if predicted + hurt < least:
                least = predicted + hurt
                best = SizePlan(sizes, target.tokens, budget.merge, least, budget.speedup(sizes))
    return best


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
    for entry, count in zip(sizes.values(), plan.merge, strict=False):  # empty where none is merged
        entry[MERGE] = count
    content = {"predicted_kl": plan.predicted_kl, "last_block_tokens": plan.tokens, "blocks": sizes}
    text = yaml.safe_dump(content, sort_keys=False)
    try:
        (folder / PLAN).write_text(text)
    except OSError as error:
        raise CorpError(f"{folder / PLAN} cannot be written ({error}); check space and permissions.") from error


def read_plan(path: Path, blocks: tuple[Block, ...], needed: int, mergeable: int) -> SizePlan:
    """The sizes in a plan.yaml; blocks and groups that it leaves out stay dense.

    needed: what the last block must update at least, 0 for all tokens; mergeable: how many may be merged. Raises
    CorpError naming the block and group for what the model does not have or allow.
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
    entries = [dict(asked.get(block.name) or {}) for block in blocks]
    merge = _read_merge([entry.pop(MERGE, 0) for entry in entries], mergeable, path)
    sizes = tuple(_read_sizes(block, entry, path) for block, entry in zip(blocks, entries, strict=True))
    return SizePlan(sizes, tokens, merge)


def _read_merge(asked: list[Any], most: int, path: Path) -> tuple[int, ...]:
    if any(type(count) is not int or count < 0 for count in asked) or sum(asked) > most or asked[-1] > 0:
        allowed = f"give counts that add up to {most} at most, and none in the last block" if most else "leave them out"
        raise CorpError(
            f"sparsity.plan={path} asks merge={', '.join(map(str, asked))} of the blocks; for this model, {allowed}."
        )
    return tuple(asked) if any(asked) else ()


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
