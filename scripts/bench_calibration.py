"""Cost of calibration: the plain forward pass of the dense model against the same pass with statistics.

    python scripts/bench_calibration.py --checkpoint deit_tiny.safetensors --images imgs/ --num-images 1000

Images are decoded once, before anything is timed. The two passes take turns over the same batches, so that a machine
whose speed drifts slows both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from corp_cli.calibrate import Calibration
from corp_cli.config import ModelConfig
from corp_cli.data import batches, choose, resolve_device
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import load_dense
from corp_cli.models.preprocess import eval_transform
from corp_cli.sources import read_images
from corp_cli.timing import synchronize


@torch.inference_mode()
def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="a timm or bundled name (%(default)s)")
    parser.add_argument("--checkpoint", help="weights; random ones without it")
    parser.add_argument("--images", type=Path, required=True, help="a folder of images")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--groups", nargs="+", default=["mlp", "qk"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    device = resolve_device(args.device)
    model, spec = load_dense(ModelConfig(args.model, pretrained=False, checkpoint=args.checkpoint))
    model.to(device)
    images, _ = choose(read_images(args.images, "--images"), args.num_images, seed=0)
    decoded = [x.to(device) for x, _ in batches(images, eval_transform(spec.data), args.batch_size, 2)]
    calibration = Calibration(model, blocks_of(model), frozenset(args.groups), device)
    model(decoded[0])  # warm up
    seconds = {"forward": 0.0, "calibrate": 0.0}
    for batch in decoded:
        for name, step in (("forward", model), ("calibrate", calibration.add)):
            synchronize(device)
            start = time.perf_counter()
            step(batch)
            synchronize(device)
            seconds[name] += time.perf_counter() - start
    start = time.perf_counter()
    calibration.result()
    seconds["calibrate"] += time.perf_counter() - start
    forward, calibrate = seconds["forward"], seconds["calibrate"]
    print(f"{len(images)} images, batches of {args.batch_size}, {device}, {torch.get_num_threads()} threads")
    print(f"forward {forward:.2f} s, calibrate {calibrate:.2f} s, ratio {calibrate / forward:.2f}")


if __name__ == "__main__":
    main()
