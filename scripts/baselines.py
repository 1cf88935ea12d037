"""Table of published baselines beside the paper's method and recipe=best, at equal MACs and at equal parameters.

    python scripts/baselines.py --checkpoint deit_tiny.safetensors --calibration imgs/ --evaluation labelled/

Every row really cuts: figures are of the model whose weights are smaller. Rankers without a budget of their own are
given the least uniform sparsity.joint that removes what is asked for, to the unit; OPTIN and Kwon et al. search by
their scores. One line is printed, and added to --csv, as each row is done; one that fails says why, and the table goes
on. Statistics, damage curves and trajectory scores are kept in --cache, so that rows and a second call share them.
Nothing is tuned.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ablation import config

from corp_cli import prune
from corp_cli.config.prune import SparsityConfig
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.report.schema import Report
from corp_cli.sizes.costs import cost_of, dense_cost
from corp_cli.sizes.uniform import check_supported, uniform_sizes

REMOVED = (0.2, 0.3, 0.38, 0.5)
COLUMNS = ("at", "row", "compensation", "seed", "MACs", "params", "top-1", "agree", "KL", "seconds")


@dataclass(frozen=True)
class Row:
    """One way to prune: what it is called, and overrides given (kind, fraction to remove, uniform joint)."""

    name: str
    compensation: str
    overrides: Callable[[str, float, float], list[str]]
    kinds: tuple[str, ...] = ("macs", "params")


def uniform(*overrides: str) -> Callable[[str, float, float], list[str]]:
    """The same sizes in every block, to the unit: multiples of 8 would remove more than what is asked for."""
    return lambda kind, fraction, joint: [*overrides, f"sparsity.joint={joint:g}", "sparsity.round_to=1"]


def budget(*overrides: str) -> Callable[[str, float, float], list[str]]:
    """Sizes of its own choice."""
    return lambda kind, fraction, joint: [*overrides, f"sparsity.{kind}={fraction:g}"]


ROWS = [
    *(
        Row(ranker, repair, uniform(f"ranker={ranker}", f"compensation={repair}"))
        for ranker in ("random", "magnitude", "activation", "variance", "kcm")
        for repair in ("none", "mean", "paper")
        if (ranker, repair) != ("activation", "paper")  # that is the paper's method
    ),
    *(Row("optin", repair, budget("recipe=optin", f"compensation={repair}")) for repair in ("none", "mean", "paper")),
    Row("optin, merging", "none", budget("recipe=optin", "sparsity.merge_tokens=true"), kinds=("macs",)),
    *(Row("kwon", repair, budget("recipe=kwon", f"compensation={repair}")) for repair in ("none", "scale", "paper")),
    Row("paper", "paper", uniform("recipe=paper")),
    Row("best, same sizes", "best", uniform()),
    Row("best, no merging", "best", budget("sparsity.merge_tokens=false")),
    Row("best", "best", budget(), kinds=("macs",)),  # merging removes no parameters
]


def main() -> None:
    """Print one line per row, and write it to the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--checkpoint", help="of that model; else timm's weights, or the bundled ones")
    parser.add_argument("--calibration", help="a folder of images; else those of a bundled model")
    parser.add_argument("--evaluation", help="a folder of labelled images; else those left over, by KL and agreement")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=("macs", "params"), default=["macs", "params"])
    parser.add_argument("--removed", type=float, nargs="+", default=REMOVED, help="fractions of it to remove")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each draws other calibration images")
    parser.add_argument("--rows", nargs="*", help='only rows whose "name, compensation" holds one of these')
    parser.add_argument("--overrides", nargs="*", default=[], help="for every row, such as ranker.optin_images=32")
    parser.add_argument("--num-workers", type=int, default=2, help="that decode images")
    parser.add_argument("--cache", default=tempfile.gettempdir(), help="folder for statistics, curves and scores")
    parser.add_argument("--csv", type=Path, help="a file that every row is added to")
    args = parser.parse_args()

    cfg = config(args, 0, args.overrides)
    dense = dense_model(cfg.model, cfg.data, cfg.seed)
    say(COLUMNS, None if args.csv and args.csv.exists() else args.csv)
    for kind in args.kinds:
        for fraction in args.removed:
            joint = matching_joint(dense, kind, fraction)
            for row in ROWS:
                if kind in row.kinds and (
                    not args.rows or any(part in f"{row.name}, {row.compensation}" for part in args.rows)
                ):
                    for seed in args.seeds:
                        head = (f"{kind} -{100 * fraction:g}%", row.name, row.compensation, str(seed))
                        given = [*row.overrides(kind, fraction, joint), *args.overrides]
                        say((*head, *measured(args, seed, given)), args.csv)


def measured(args: argparse.Namespace, seed: int, overrides: list[str]) -> tuple[str, ...]:
    """The figures of one row, or why there are none."""
    start = time.perf_counter()
    try:
        report = prune(config(args, seed, overrides)).report
    except Exception as error:  # whatever it is, the other rows are worth having
        return (f"failed: {type(error).__name__}: {' '.join(str(error).split())}",)
    return (*figures(report), f"{time.perf_counter() - start:.1f}")


def figures(report: Report) -> tuple[str, ...]:
    """MACs and parameters that are left, as fractions, and how the pruned model does."""
    size, pruned = report.size, report.evaluation.pruned
    # Images left over from calibration are there to choose settings by, not to report accuracy on.
    accurate = pruned.top1 is not None and report.evaluation.held_out
    return (
        f"{size.pruned.macs / size.dense.macs:.4f}",
        f"{size.pruned.parameters / size.dense.parameters:.4f}",
        f"{pruned.top1:.1f}" if accurate else "-",
        f"{pruned.agreement:.1f}" if pruned.agreement is not None else "-",
        f"{pruned.kl:.4f}" if pruned.kl is not None else "-",
    )


def matching_joint(dense: LoadedModel, kind: str, fraction: float) -> float:
    """The least sparsity.joint, in thousandths, that removes `fraction` of the MACs or parameters; 1, which is refused,
    where none does."""
    whole = dense_cost(dense.spec, kind)

    def left(thousandths: int) -> float:
        sparsity = SparsityConfig(joint=thousandths / 1000, round_to=1, skip_unsupported=True)
        groups, _ = check_supported(dense.blocks, sparsity)
        sizes = tuple(uniform_sizes(block, groups, sparsity) for block in dense.blocks)
        return cost_of(dense.spec, dense.blocks, sizes, kind) / whole

    low, high = 0, 1000  # what is left never grows with joint
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= 1 - fraction else (middle, high)
    return high / 1000


def say(cells: tuple[str, ...], path: Path | None) -> None:
    """Print one line, and add it to the CSV."""
    print(("{:<12} {:<17} {:<12} {:>4} " + "{:>7} " * (len(cells) - 4)).format(*cells).rstrip(), flush=True)
    if path:
        with path.open("a", newline="") as file:
            csv.writer(file).writerow(cells)


if __name__ == "__main__":
    main()
