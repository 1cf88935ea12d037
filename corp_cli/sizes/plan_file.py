"""plan.yaml: the sizes of a run, to be read, edited and given back as sparsity.plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from corp_cli.errors import CorpError
from corp_cli.models.blocks import GROUPS, Block, Sizes
from corp_cli.sizes.plan import SizePlan

MERGE = "merge"  # beside the groups of a block: how many tokens it merges


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines would make more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As in the class above."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds aliases, which a plan does without")
        return super().compose_node(parent, index)


def plan_text(plan: SizePlan, blocks: tuple[Block, ...]) -> str:
    """The content of plan.yaml: sizes by block."""
    sizes = {block.name: asdict(size) for block, size in zip(blocks, plan.sizes, strict=True)}
    for entry, count in zip(sizes.values(), plan.merge, strict=False):  # empty where none is merged
        entry[MERGE] = count
    content = {"predicted_kl": plan.predicted_kl, "last_block_tokens": plan.updated_tokens, "blocks": sizes}
    return yaml.safe_dump(content, sort_keys=False)


def read_plan(path: Path, blocks: tuple[Block, ...], needed: int, total: int, mergeable: int) -> SizePlan:
    """The sizes in a plan.yaml; blocks and groups that it leaves out stay dense.

    needed: what the last block must update at least of `total` tokens, 0 for all; mergeable: how many may be merged.
    Raises CorpError naming the block and group for what the model does not have or allow.
    """
    if not path.is_file():
        raise CorpError(f"sparsity.plan={path} does not exist; give a plan.yaml that corp prune wrote.")
    try:
        content: Any = yaml.load(path.read_text("utf-8"), PlainLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise CorpError(f"sparsity.plan={path} cannot be read ({what}).") from error
    asked = content.get("blocks") if isinstance(content, dict) else None
    if not isinstance(asked, dict):
        raise CorpError(f"sparsity.plan={path} holds no `blocks`; give a plan.yaml that corp prune wrote.")
    if unknown := sorted(map(str, asked.keys() - {block.name for block in blocks})):
        raise CorpError(f"sparsity.plan={path} names {unknown[0]}, which the model does not have.")
    tokens = content.get("last_block_tokens")
    if tokens is not None and (type(tokens) is not int or not 0 < needed <= tokens <= total):
        allowed = f"{needed} to {total}, or null" if needed else "null"
        raise CorpError(
            f"sparsity.plan={path} asks last_block_tokens={tokens}; this model needs {allowed} (all tokens)."
        )
    for name, entry in asked.items():
        if not isinstance(entry, dict | None):
            raise CorpError(f"sparsity.plan={path}: {name} is no list of group: size; leave it out to keep it dense.")
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
