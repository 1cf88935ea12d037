"""`corp info`: what is in a checkpoint. Imports no torch where the file says what follows from its shapes."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from corp_cli.config.checkpoints import InfoConfig
from corp_cli.files.fetch import fetched
from corp_cli.files.manifest import read_manifest
from corp_cli.models.spec import Counts, Manifest, PrunedSizes
from corp_cli.runtime import console


def run(cfg: InfoConfig, output_dir: Path) -> None:
    """Print architecture, preprocessing, recipe, sizes per block and MACs of a pruned checkpoint; nothing is written.

    Raises CorpError for another file.
    """
    path = str(cfg.checkpoint)
    manifest = read_manifest(fetched(path))
    counts = manifest.counts or _count(path, manifest)
    names = sorted(counts.blocks, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    table = Table("block", "mlp", "qk", "vo", "heads", title=f"{manifest.model.name} (kept of dense)")
    pruned = [manifest.blocks.get(name, PrunedSizes()) for name in names]
    for name, sizes in zip(names, pruned, strict=True):
        dense = asdict(counts.blocks[name])
        kept = {**dense, **sizes.units()}
        cells = (f"{kept[g]} of {of}" if kept[g] != of else f"{of}" for g, of in dense.items())
        table.add_row(_shown(name), *cells)
    merged = [sizes.merge or 0 for sizes in pruned]
    out = console.out()
    out.print(table)
    sparsity = manifest.recipe.get("sparsity")
    for label, value in (
        ("parameters", f"{counts.pruned.parameters:,} of {counts.dense.parameters:,}"),
        ("MACs", f"{counts.pruned.macs:,} of {counts.dense.macs:,}"),
        *([("merged tokens", f"{sum(merged)}, by block {', '.join(map(str, merged))}")] if any(merged) else []),
        ("input", ", ".join(f"{key} {value}" for key, value in manifest.model.data.items())),
        ("arguments", ", ".join(f"{key}={value}" for key, value in manifest.model.args.items())),
        ("recipe", manifest.recipe.get("recipe")),
        ("sparsity", ", ".join(f"{k}={v}" for k, v in _items(sparsity) if v is not None)),
        *([("weights", "trained after pruning")] if manifest.trained else []),
        ("dense weights", f"sha256 {manifest.dense_sha256}"),
        ("written by", ", ".join(f"{package} {version}" for package, version in manifest.versions.items())),
    ):
        out.print(f"{label:<14} {_shown(value)}", markup=False)


def _items(value: object) -> list[tuple[object, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def _shown(value: object) -> str:
    """`value` without the characters that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in str(value))


def _count(path: str, manifest: Manifest) -> Counts:
    """The counts that files of format versions 1 to 3 do not hold."""
    from corp_cli.files.checkpoint import building, counts_of

    with building(path, manifest):
        return counts_of(manifest)
