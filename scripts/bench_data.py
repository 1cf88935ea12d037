"""Does the model wait for its images? Pure decoding, pure statistics, and both together as `corp prune` runs them.

    python scripts/bench_data.py --checkpoint deit_tiny.safetensors --images imgs/ --num-images 1000

Whatever the overlap, decoding cannot be faster than decoding alone: what counts is how much longer than that the model
waits, as a fraction of the whole.
"""

from __future__ import annotations

import argparse
import os
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

LIMIT = 20  # percent of the whole that the model may wait beyond pure decoding


@torch.inference_mode()
def main() -> None:
    """Print the split."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="a timm or bundled name (%(default)s)")
    parser.add_argument("--checkpoint", help="weights; random ones without it")
    parser.add_argument("--images", type=Path, required=True, help="a folder of images")
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", nargs="+", default=["mlp", "qk"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    device = resolve_device(args.device)
    model, spec = load_dense(ModelConfig(args.model, pretrained=False, checkpoint=args.checkpoint))
    model.to(device)
    blocks, groups = blocks_of(model), frozenset(args.groups)
    images, _ = choose(read_images(args.images, "--images"), args.num_images, seed=0)
    transform = eval_transform(spec.data)

    start = time.perf_counter()
    decoded = [pixels for pixels, _ in batches(images, transform, args.batch_size, args.workers)]
    decode = time.perf_counter() - start

    calibration = Calibration(model, blocks, groups, device)
    start = time.perf_counter()
    for pixels in decoded:
        calibration.add(pixels.to(device))
    synchronize(device)
    statistics = time.perf_counter() - start
    del decoded

    calibration = Calibration(model, blocks, groups, device)
    waited = 0.0
    start = before = time.perf_counter()
    for pixels, _ in batches(images, transform, args.batch_size, args.workers, device.type == "cuda"):
        waited += time.perf_counter() - before
        calibration.add(pixels.to(device, non_blocking=True))
        synchronize(device)
        before = time.perf_counter()
    both = time.perf_counter() - start

    beyond = 100 * max(0.0, waited - decode) / both
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{len(images)} images, batches of {args.batch_size}, {args.workers} workers, {cores} cores, {device}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"pure decode {decode:.1f} s, pure statistics {statistics:.1f} s, in turn {decode + statistics:.1f} s")
    print(f"together {both:.1f} s, of which the model waited {waited:.1f} s ({100 * waited / both:.0f}%)")
    verdict = "within" if beyond <= LIMIT else "ABOVE"
    print(f"waited beyond pure decode: {beyond:.0f}% of the whole, {verdict} the limit of {LIMIT}%")


if __name__ == "__main__":
    main()
