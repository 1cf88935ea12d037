"""`corp info`: what is in a checkpoint."""

from __future__ import annotations

from rich.table import Table

from corp_cli.files.checkpoint import read_manifest
from corp_cli.models.adapter import blocks_of
from corp_cli.models.counts import count, sized_skeleton
from corp_cli.models.resize import PrunedSizes
from corp_cli.runtime import console


def describe(path: str) -> None:
    """Print architecture, preprocessing, recipe, sizes per block and MACs of a pruned checkpoint.

    Reads the manifest alone and builds the model on the meta device. Raises CorpError for another file.
    """
    manifest = read_manifest(path)
    both: tuple[dict[str, PrunedSizes], ...] = ({}, manifest.blocks)
    dense, pruned = (blocks_of(sized_skeleton(manifest.model, blocks)) for blocks in both)
    before, after = (count(manifest.model, blocks) for blocks in both)
    table = Table("block", "mlp", "qk", "vo", "heads", title=f"{manifest.model.name} (kept of dense)")
    for old, new in zip(dense, pruned, strict=True):
        pairs = ((getattr(new.sizes, g), getattr(old.sizes, g)) for g in ("mlp", "qk", "vo", "heads"))
        table.add_row(old.name, *(f"{left} of {of}" if left != of else f"{of}" for left, of in pairs))
    merged = [sizes.merge or 0 for sizes in manifest.blocks.values()]
    out = console.out()
    out.print(table)
    for label, value in (
        ("parameters", f"{after.parameters:,} of {before.parameters:,}"),
        ("MACs", f"{after.macs:,} of {before.macs:,}"),
        *([("merged tokens", f"{sum(merged)}, by block {', '.join(map(str, merged))}")] if any(merged) else []),
        ("input", ", ".join(f"{key} {value}" for key, value in manifest.model.data.items())),
        ("arguments", ", ".join(f"{key}={value}" for key, value in manifest.model.args.items())),
        ("recipe", manifest.recipe["recipe"]),
        ("sparsity", ", ".join(f"{k}={v}" for k, v in manifest.recipe["sparsity"].items() if v is not None)),
        ("dense weights", f"sha256 {manifest.dense_sha256}"),
        ("written by", ", ".join(f"{package} {version}" for package, version in manifest.versions.items())),
    ):
        out.print(f"{label:<14} {value}", markup=False)
