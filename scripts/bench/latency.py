"""What `sparsity.latency` expects of sizes, beside what a model of these sizes takes.

    python scripts/bench/latency.py --model deit3_huge_patch14_224 --dtype bfloat16 --batch-size 256 --device cuda

The same fraction of every group removed, weights random. Dense and pruned are timed in turns, after the table of
timings that a budget goes by was made.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from corp_cli.config.prune import SparsityConfig
from corp_cli.measure.timing import pass_seconds
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.loading import build
from corp_cli.models.resize import resize
from corp_cli.models.spec import ModelSpec
from corp_cli.sizes.budget import uniform
from corp_cli.sizes.costs import pruned_blocks
from corp_cli.sizes.latency import latency_budget

ASKED = 0.01  # of the time; the table is the same for any


def main() -> None:
    """Print the dense model's time, and a row a fraction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="of timm, for images of 224 x 224")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    dtype, spec = getattr(torch, args.dtype), ModelSpec(args.model, {}, {"input_size": [3, 224, 224]})
    with torch.device(args.device):
        model = build(args.model, {}).eval()
    dense = LoadedModel("", model, spec)
    cfg = SparsityConfig(latency=ASKED, latency_dtype=args.dtype, latency_batch_size=args.batch_size)
    budget = latency_budget(dense, cfg, tuple(block.sizes for block in dense.blocks), None, merges=False)
    print(f"{args.model}, {args.dtype}, batch {args.batch_size}, {args.device}, torch {torch.__version__}")
    print(f"dense {1e3 * budget.dense:.2f} ms, of which no size changes {1e3 * budget.fixed:.2f} ms")
    model.to(dtype)
    images = torch.randn(args.batch_size, *spec.data["input_size"], device=args.device, dtype=dtype)
    for fraction in args.fractions:
        sizes = uniform(budget, fraction)
        with torch.device(args.device):
            pruned = build(args.model, {}).eval()
            resize(pruned, pruned_blocks(dense.blocks, sizes))
        seconds = pass_seconds({"dense": model, "pruned": pruned.to(dtype)}, images, args.repeats, 10.0)
        speedup = median(seconds["dense"]) / median(seconds["pruned"])
        print(f"{fraction:.0%} of every group: expected x{budget.speedup(sizes):.3f}, measured x{speedup:.3f}")


if __name__ == "__main__":
    main()
