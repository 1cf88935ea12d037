"""`corp info`: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from corp_cli.config.prune import InfoConfig
from corp_cli.files.checkpoint import read_manifest
from corp_cli.measure.macs import count_macs
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import parameters, skeleton
from corp_cli.models.resize import resize
from corp_cli.runtime import console


def run(cfg: InfoConfig, output_dir: Path) -> None:
    """Print architecture, preprocessing, recipe, sizes per block and MACs of a pruned checkpoint; nothing is written.

    Reads the manifest alone and builds the model on the meta device. Raises CorpError for another file.
    """
    manifest = read_manifest(str(cfg.checkpoint))
    dense, pruned = skeleton(manifest.model), skeleton(manifest.model)
    resize(pruned, manifest.blocks)
    input_size = manifest.model.data["input_size"]
    table = Table("block", "mlp", "qk", "vo", "heads", title=f"{manifest.model.name} (kept of dense)")
    for old, new in zip(blocks_of(dense), blocks_of(pruned), strict=True):
        pairs = ((getattr(new.sizes, g), getattr(old.sizes, g)) for g in ("mlp", "qk", "vo", "heads"))
        table.add_row(old.name, *(f"{left} of {of}" if left != of else f"{of}" for left, of in pairs))
    merged = [sizes.merge or 0 for sizes in manifest.blocks.values()]
    out = console.out()
    out.print(table)
    for label, value in (
        ("parameters", f"{parameters(pruned):,} of {parameters(dense):,}"),
        ("MACs", f"{count_macs(pruned, input_size):,} of {count_macs(dense, input_size):,}"),
        *([("merged tokens", f"{sum(merged)}, by block {', '.join(map(str, merged))}")] if any(merged) else []),
        ("input", ", ".join(f"{key} {value}" for key, value in manifest.model.data.items())),
        ("arguments", ", ".join(f"{key}={value}" for key, value in manifest.model.args.items())),
        ("recipe", manifest.recipe["recipe"]),
        ("sparsity", ", ".join(f"{k}={v}" for k, v in manifest.recipe["sparsity"].items() if v is not None)),
        ("dense weights", f"sha256 {manifest.dense_sha256}"),
        ("written by", ", ".join(f"{package} {version}" for package, version in manifest.versions.items())),
    ):
        out.print(f"{label:<14} {value}", markup=False)
