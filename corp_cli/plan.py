"""The sizes of a run: as asked for every block alike, under a budget, or from a file that was saved and edited."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from corp_cli.budget import make_budget, matching_uniform, spend
from corp_cli.config import PruneConfig
from corp_cli.curves import damage_curves
from corp_cli.errors import CorpError
from corp_cli.inputs import Inputs, curve_batches
from corp_cli.models.blocks import GROUPS, Block, Sizes
from corp_cli.rank import Scores, uniform_sizes
from corp_cli.sources import expand
from corp_cli.statistics import Statistics

PLAN = "plan.yaml"


@dataclass(frozen=True)
class SizePlan:
    """Sizes of every block; `predicted` is the damage that a budget expects of them, KL in nats per image."""

    sizes: tuple[Sizes, ...]
    predicted: float | None = None


def check_sizes(inputs: Inputs, cfg: PruneConfig) -> None:
    """Raise CorpError, before any long work, for a plan that does not fit the model or a budget that cannot be met."""
    if cfg.sparsity.plan is not None:
        read_plan(expand(cfg.sparsity.plan), inputs.blocks)
    elif cfg.sparsity.chooses_sizes():
        base = tuple(uniform_sizes(block, inputs.groups, cfg.sparsity) for block in inputs.blocks)
        make_budget(inputs.spec, inputs.blocks, cfg.sparsity, base)


@torch.inference_mode()
def choose_sizes(inputs: Inputs, cfg: PruneConfig, statistics: Statistics, scores: tuple[Scores, ...]) -> SizePlan:
    """The sizes that `cfg.sparsity` asks for.

    A budget measures damage in the context of the uniform sizes that would meet it; further rounds measure it again
    in the context of the sizes found.
    """
    blocks, sparsity = inputs.blocks, cfg.sparsity
    if sparsity.plan is not None:
        return read_plan(expand(sparsity.plan), blocks)
    base = tuple(uniform_sizes(block, inputs.groups, sparsity) for block in blocks)
    if not sparsity.chooses_sizes():
        return SizePlan(base)
    budget = make_budget(inputs.spec, blocks, sparsity, base)
    batches = list(curve_batches(inputs, cfg))
    context, plan = matching_uniform(budget), SizePlan(base)
    for _ in range(sparsity.rounds):
        curves = damage_curves(inputs.dense, blocks, statistics, scores, context, budget.unit.keys(), batches, cfg)
        plan = SizePlan(*spend(budget, {(c.block, c.group): c.damage for c in curves}))
        context = plan.sizes
    return plan


# --- files ----------------------------------------------------------------------------------------------------


def write_plan(plan: SizePlan, blocks: tuple[Block, ...], folder: Path) -> None:
    """Write plan.yaml: sizes by block, to be read, edited and given back as sparsity.plan."""
    sizes = {block.name: asdict(size) for block, size in zip(blocks, plan.sizes, strict=True)}
    text = yaml.safe_dump({"predicted_kl": plan.predicted, "blocks": sizes}, sort_keys=False)
    try:
        (folder / PLAN).write_text(text)
    except OSError as error:
        raise CorpError(f"{folder / PLAN} cannot be written ({error}); check space and permissions.") from error


def read_plan(path: Path, blocks: tuple[Block, ...]) -> SizePlan:
    """The sizes in a plan.yaml; blocks and groups that it leaves out stay dense.

    Raises CorpError naming the block and group for what the model does not have or allow.
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
    return SizePlan(tuple(_read_sizes(block, asked.get(block.name) or {}, path) for block in blocks))


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
