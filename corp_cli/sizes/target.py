"""What a run is to reach: sizes as asked or from a plan, or a budget for them. Known before any long work."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from corp_cli.config.prune import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.images.sources import expand
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.token_block import all_tokens, most_merged, needed_tokens
from corp_cli.sizes.budget import Budget, make_budget
from corp_cli.sizes.latency import latency_budget
from corp_cli.sizes.plan import SizePlan
from corp_cli.sizes.plan_file import read_plan
from corp_cli.sizes.uniform import uniform_sizes

Target = SizePlan | Budget


def make_target(dense: LoadedModel, groups: frozenset[str], sparsity: SparsityConfig) -> Target:
    """What is asked for: sizes, or a budget for them.

    Raises CorpError, before any long work, for a plan that does not fit the model or a budget that cannot be met.
    """
    model, blocks = dense.model, dense.blocks
    updated = updated_tokens(model, sparsity)
    if sparsity.plan is not None:
        plan = read_plan(expand(sparsity.plan), blocks, needed_tokens(model), all_tokens(model), most_merged(model))
        plan = plan if sparsity.skip_unread is None else replace(plan, updated_tokens=updated)
        return replace(plan, merge=()) if sparsity.merge_tokens is False else plan
    merges = merges_tokens(model, sparsity)
    base = tuple(uniform_sizes(block, groups, sparsity, dense.device.type) for block in blocks)
    if sparsity.latency is not None:
        return latency_budget(dense, sparsity, base, updated, merges)
    if sparsity.budget() is not None:
        return make_budget(dense.spec, blocks, sparsity, base, updated, merges, dense.device.type)
    return SizePlan(base, updated)


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
    by_itself = able and sparsity.search == "damage" and getattr(dense, "num_classes", 0) > 0
    return by_itself if asked is None else asked


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
