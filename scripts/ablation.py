"""Tables of recipe=best on a real model: what each ingredient brings, and accuracy at the MACs of the paper's settings.

    python scripts/ablation.py --checkpoint deit_tiny.safetensors --calibration imgs/ --evaluation labelled/ ingredients
    python scripts/ablation.py ... budgets

Statistics are measured once per set of calibration images and kept in --cache. Nothing here is tuned: settings were
chosen on images kept aside from the calibration set, and every row is printed as it comes out.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from corp_cli import load_config, prune

# ingredient → overrides that take it away from, or add it to, recipe=best at joint .5
INGREDIENTS = {
    "paper": ["recipe=paper"],
    "best": [],
    "best, one shot": ["compensation.propagate=none"],
    "best, activation ranking": ["ranker.mlp=activation"],
    "best, variance ranking": ["ranker.mlp=variance"],
    "best, Sylvester logits": ["compensation.qk=sylvester"],
    "best, re-collection only (alpha = beta = 0)": ["compensation.alpha=0", "compensation.beta=0"],
    "best, alpha = 0": ["compensation.alpha=0"],
    "best, beta = 0": ["compensation.beta=0"],
    "best, every token once": ["compensation.token_weights=uniform"],
    "best, class token 20 times": ["compensation.token_weights=class_token"],
    "best, ridge 0.01": ["compensation.ridge_lambda=0.01"],
    "best, ridge 0.03": ["compensation.ridge_lambda=0.03"],
}
ON_BUDGET = {
    "best, MACs budget": [],
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
    "joint .5 (budget), 128 images": ([f"sparsity.macs={JOINT_HALF}", "calibration.num_images=128"], ""),
}


def main() -> None:
    """Print one row per setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("ingredients", "budgets"))
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--calibration", required=True, help="a folder of images")
    parser.add_argument("--evaluation", required=True, help="a folder of labelled images")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each draws other calibration images")
    parser.add_argument("--paper", action="store_true", help="budgets: the paper's method at the same MACs as well")
    parser.add_argument("--rows", nargs="*", help="only the rows whose names hold one of these")
    parser.add_argument("--num-workers", type=int, default=2, help="that decode images")
    parser.add_argument("--cache", default=tempfile.gettempdir(), help="folder for statistics")
    args = parser.parse_args()

    rows = dict(INGREDIENTS)
    if args.table == "ingredients":
        rows.update({name: [f"sparsity.macs={JOINT_HALF}", *extra] for name, extra in ON_BUDGET.items()})
    else:
        rows = {name: overrides for name, (overrides, _) in BUDGETS.items()}
        if args.paper:
            rows.update({f"{n}: paper": ["recipe=paper", p] for n, (_, p) in BUDGETS.items() if p})
    print(
        f"{'setting':<46} {'seed':>4} {'MACs':>7} {'top-1':>6} {'agree':>6} {'KL':>7} {'predicted':>9} {'seconds':>8}"
    )
    for name, overrides in rows.items():
        if args.rows and not any(part in name for part in args.rows):
            continue
        for seed in args.seeds:
            start = time.perf_counter()
            cfg = load_config(
                f"model={args.model}",
                f"model.checkpoint={args.checkpoint}",
                f"calibration.path={args.calibration}",
                f"calibration.num_images={args.num_images}",
                f"calibration.cache={args.cache}",
                f"calibration.num_workers={args.num_workers}",
                f"evaluation.num_workers={args.num_workers}",
                f"evaluation.path={args.evaluation}",
                "evaluation.throughput_batches=0",
                f"seed={seed}",
                *overrides,
            )
            report = prune(cfg).report
            found, predicted = report.evaluation["pruned"], report.sparsity["predicted_kl"]
            print(
                f"{name:<46} {seed:>4} {report.size['pruned']['macs'] / 1e9:>6.3f}G {found['top1']:>6.1f} "
                f"{found['agreement']:>6.1f} {found['kl']:>7.4f} {'' if predicted is None else f'{predicted:.3f}':>9} "
                f"{time.perf_counter() - start:>8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
