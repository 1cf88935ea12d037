"""Latency of ONNX Runtime: files of one model, such as dense and pruned, in turns on this machine.

    corp export model=deit_tiny hydra.run.dir=dense
    corp export checkpoint=pruned.safetensors hydra.run.dir=pruned
    python scripts/bench/onnx_runtime.py dense/model.onnx pruned/model.onnx --threads 2

Every turn runs each file once, so that a machine whose speed drifts slows all of them; gains are of the medians.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch

from corp_cli.export.onnx_files import OnnxModel
from corp_cli.measure.timing import pass_seconds


def main() -> None:
    """Print the median and the fastest pass of every file, and the gain over the first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="ONNX files of corp export, the dense model's first")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    models = {str(path): OnnxModel(path) for path in args.files}
    shape, *others = {model.image_shape() for model in models.values()}
    if others:
        parser.error(f"the files take images of different shapes: {[shape, *others]}")
    images = torch.randn(args.batch_size, *shape, generator=torch.Generator().manual_seed(0))
    seconds = pass_seconds(dict(models), images, args.runs)
    first = median(next(iter(seconds.values())))
    print(f"batch {args.batch_size}, {args.threads} threads, {args.runs} turns")
    for name, times in seconds.items():
        middle = median(times)
        print(f"{1e3 * middle:8.2f} ms (fastest {1e3 * min(times):.2f})  x{first / middle:.2f}  {name}")


if __name__ == "__main__":
    main()
