"""Tables of recipe=best on a real model: what each ingredient brings, and accuracy at the MACs of the paper's settings.

    python scripts/ablation.py --checkpoint deit_tiny.safetensors --calibration imgs/ --evaluation labelled/ ingredients
    python scripts/ablation.py ... budgets

Statistics and damage curves are measured once per set of calibration images and kept in --cache. Nothing here is tuned:
settings were chosen on images kept aside from the calibration set, as this script does without --evaluation and with a
--num-images below what there is. Every row is printed as it comes out. With several --seeds, which need fewer images
than there are to differ, the mean and the standard deviation follow.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from corp_cli import load_config, prune
from corp_cli.config.prune import PruneConfig
from corp_cli.report.schema import Report

# ingredient → overrides that take it away from, or add it to, recipe=best at joint .5
INGREDIENTS = {
    "paper": ["recipe=paper"],
    "best": [],
    "best, one shot": ["compensation.propagate=none"],
    "best, activation ranking": ["ranker.mlp=activation"],
    "best, variance ranking": ["ranker.mlp=variance"],
    "best, Sylvester logits": ["compensation.qk=sylvester"],
    "best, logits that all count alike": ["compensation.qk=lowrank"],
    "best, re-collection only (alpha = beta = 0)": ["compensation.alpha=0", "compensation.beta=0"],
    "best, alpha = 0": ["compensation.alpha=0"],
    "best, beta = 0": ["compensation.beta=0"],
    "best, every token once": ["compensation.token_weights=uniform"],
    "best, class token 20 times": ["compensation.token_weights=class_token"],
    "best, one ridge for all layers": ["compensation.ridge_lambda=0.1"],
    "best, fc1 as chosen": ["compensation.mlp=affine"],
    "best, fc1 as chosen, one ridge": ["compensation.mlp=affine", "compensation.ridge_lambda=0.1"],
    "best, values cut too": ["sparsity.vo=0.5"],
    "best, values cut too, low-rank": ["sparsity.vo=0.5", "compensation.vo=lowrank"],
    "best, three times the tokens": ["compensation.fit_tokens=196608"],
}
ON_BUDGET = {
    "best, MACs budget": [],
    "best, MACs budget, no tokens merged": ["sparsity.merge_tokens=false"],
    "best, MACs budget, last block whole": ["sparsity.skip_unread=false"],
    "best, MACs budget, one shot": ["compensation.propagate=none"],
    "best, MACs budget, two rounds of curves": ["sparsity.rounds=2"],
}
JOINT_HALF = 0.3832  # fraction of DeiT-Tiny's MACs that joint .5 removes

# name → (overrides, what the paper's method is given at the same MACs)
BUDGETS = {
    "joint .25 (budget)": (["sparsity.macs=0.1916"], "sparsity.joint=0.25"),
    "joint .375 (budget)": (["sparsity.macs=0.2874"], "sparsity.joint=0.375"),
    "joint .5, uniform sizes": (["sparsity.joint=0.5"], "sparsity.joint=0.5"),
    "joint .5 (budget)": ([f"sparsity.macs={JOINT_HALF}"], "sparsity.joint=0.5"),
    "joint .625 (budget)": (["sparsity.macs=0.479"], "sparsity.joint=0.625"),
    "joint .75 (budget)": (["sparsity.macs=0.5748"], "sparsity.joint=0.75"),
    "MLP .5 only, uniform": (["sparsity.mlp=0.5"], "sparsity.mlp=0.5"),
    "QK .5 only": (["sparsity.qk=0.5"], "sparsity.qk=0.5"),
    "joint .5 and vo .5, uniform": (["sparsity.joint=0.5", "sparsity.vo=0.5"], ""),
    "parameters of joint .5 (budget)": (["sparsity.params=0.388"], ""),
    "joint .5 (budget), 128 images": ([f"sparsity.macs={JOINT_HALF}", "calibration.num_images=128"], ""),
}


def main() -> None:
    """Print one row per setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("ingredients", "budgets"))
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--calibration", required=True, help="a folder of images")
    parser.add_argument("--evaluation", help="a folder of labelled images; else those left over, by KL and agreement")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each draws other calibration images")
    parser.add_argument("--paper", action="store_true", help="budgets: the paper's method at the same MACs as well")
    parser.add_argument("--rows", nargs="*", help="only the rows whose names hold one of these")
    parser.add_argument("--overrides", nargs="*", default=[], help="for every row, such as sparsity.merge_tokens=false")
    parser.add_argument("--num-workers", type=int, default=2, help="that decode images")
    parser.add_argument("--cache", default=tempfile.gettempdir(), help="folder for statistics")
    args = parser.parse_args()

    rows = {name: ["sparsity.joint=0.5", *overrides] for name, overrides in INGREDIENTS.items()}
    if args.table == "ingredients":
        rows.update({name: [f"sparsity.macs={JOINT_HALF}", *extra] for name, extra in ON_BUDGET.items()})
    else:
        rows = {name: overrides for name, (overrides, _) in BUDGETS.items()}
        if args.paper:
            rows.update({f"{n}: paper": ["recipe=paper", p] for n, (_, p) in BUDGETS.items() if p})
    head = ("setting", "seed", "MACs", "top-1", "agree", "KL", "predicted", "seconds")
    print("{:<44} {:>4} {:>7} {:>11} {:>6} {:>16} {:>9} {:>8}".format(*head))
    for name, overrides in rows.items():
        if args.rows and not any(part in name for part in args.rows):
            continue
        found = []
        for seed in args.seeds:
            start = time.perf_counter()
            found.append(prune(config(args, seed, [*overrides, *args.overrides])).report)
            print(line(name, str(seed), [found[-1]], time.perf_counter() - start), flush=True)
        if len(found) > 1:
            print(line(name, "mean", found), flush=True)


def config(args: argparse.Namespace, seed: int, overrides: list[str]) -> PruneConfig:
    """The run of one row."""
    paths = {
        "model.checkpoint": args.checkpoint,
        "calibration.path": args.calibration,
        "evaluation.path": args.evaluation,
    }
    return load_config(
        f"model={args.model}",
        *(f"{key}={value}" for key, value in paths.items() if value),
        f"calibration.num_images={args.num_images}",
        f"calibration.cache={args.cache}",
        f"calibration.num_workers={args.num_workers}",
        f"evaluation.num_workers={args.num_workers}",
        "evaluation.throughput_batches=0",
        f"seed={seed}",
        *overrides,
    )


def line(name: str, seed: str, reports: list[Report], seconds: float | None = None) -> str:
    """One row: a report, or the mean of several with the standard deviation of top-1 and KL."""

    def mean(key: str) -> float:
        return statistics.mean(getattr(r.evaluation.pruned, key) for r in reports)

    def spread(key: str, digits: int) -> str:
        found = [getattr(r.evaluation.pruned, key) for r in reports]
        return f" +- {statistics.stdev(found):.{digits}f}" if reports[1:] else ""

    predicted = [r.sparsity.predicted_kl for r in reports if r.sparsity.predicted_kl is not None]
    expected = f"{statistics.mean(predicted):.3f}" if predicted else ""
    macs = statistics.mean(r.size.pruned.macs for r in reports) / 1e9
    # Images left over from calibration are there to choose settings by, not to report accuracy on.
    judged = all(r.config["evaluation"]["path"] for r in reports)
    top1 = f"{mean('top1'):.1f}{spread('top1', 1)}" if judged else "-"
    kl = f"{mean('kl'):.4f}{spread('kl', 4)}"
    return (
        f"{name:<44} {seed:>4} {macs:>6.3f}G {top1:>11} {mean('agreement'):>6.1f} {kl:>16} {expected:>9} "
        f"{'' if seconds is None else f'{seconds:.1f}':>8}"
    )


if __name__ == "__main__":
    main()
