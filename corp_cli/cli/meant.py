"""What an argument that is none was probably meant for, and how to type that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra.core.config_loader import ConfigLoader

# Words of other tools → the key here.
ALIASES = {
    "amount": "sparsity.joint",
    "flops": "sparsity.macs",
    "gflops": "sparsity.macs",
    "gpu": "device",
    "images": "calibration.path",
    "out": "hydra.run.dir",
    "output": "hydra.run.dir",
    "output_dir": "hydra.run.dir",
    "pruning_ratio": "sparsity.joint",
    "ratio": "sparsity.joint",
    "speedup": "sparsity.latency",
    "val": "evaluation.path",
    "weights": "model.checkpoint",
}
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".safetensors.index.json")
GROUPS_FIRST = ("model", "recipe", "ranker", "compensation")  # whose choices a bare word may name


def near(word: str, known: Iterable[str], cutoff: float = 0.75, most: int = 1) -> list[str]:
    """Up to `most` of `known` that `word` may stand for: by an alias, its last part, or how it is spelled."""
    keys = list(known)
    leaf = word.rpartition(".")[2]
    if (alias := ALIASES.get(leaf)) in keys or (alias or "").startswith("hydra."):
        return [alias or ""]
    if same := [key for key in keys if key.rpartition(".")[2] == leaf]:
        return same[:most] if word == leaf else same
    return get_close_matches(word, keys, n=most, cutoff=cutoff)


def flag(said: str, args: Sequence[str], known: Sequence[str]) -> str | None:
    """How to type `--key value`, the first of what argparse did not know, or None."""
    given = re.search(r"--?([A-Za-z][\w.-]*)", said)
    word = given and next((arg for arg in args if arg.lstrip("-").partition("=")[0] == given[1]), None)
    if not given or not word:
        return None
    found = near(given[1].replace("-", "_"), known, most=3)
    _, equals, value = word.lstrip("-").partition("=")
    if not equals:
        behind = list(args)[list(args).index(word) + 1 :][:1]
        value = behind[0] if behind and not behind[0].startswith("-") and "=" not in behind[0] else "..."
    return " or ".join(f"{key}={value}" for key in found) or None


def without_spaces(override: str, overrides: Sequence[str]) -> str | None:
    """`override` with what spaces have cut off it, as the one word that it should be, or None."""
    if spaced := re.fullmatch(r"([\w.]+)\s*=\s+(.+)|([\w.]+)\s+=\s*(.+)", override):
        key, value, other, rest = spaced.groups()
        return f"{key or other}={value or rest}"
    words = list(overrides)
    joined = [i for i in range(1, len(words)) if words[i - 1].endswith((",", "=")) or words[i].startswith((",", "="))]
    start = end = words.index(override) if override in words else len(words)
    while start in joined:
        start -= 1
    while end + 1 in joined:
        end += 1
    whole = "".join(words[start : end + 1])
    return whole if end > start and "=" in whole else None


def bare(word: str, known: Sequence[str], loader: ConfigLoader) -> str | None:
    """The override that a word without = may stand for: a choice of a group, a file or a folder; or None."""
    checkpoint = next((key for key in ("checkpoint", "model.checkpoint") if key in known), None)
    if checkpoint and word.endswith(WEIGHTS):
        return f"{checkpoint}={word}"
    groups = {key.partition(".")[0] for key in known}
    for group in GROUPS_FIRST:
        if group in groups and word in loader.get_group_options(group):
            return f"{group}={word}"
    if "calibration.path" in known and Path(word).is_dir():
        return f"calibration.path={word}"
    if "model.name" in known and re.match(r"(hf-hub:|transformers:)|\w*(vit|deit|swin|beit|eva|dino)\w*$", word):
        return f"model.name={word}"
    return None
