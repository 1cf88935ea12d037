"""Does the model wait for its images? Pure decoding, pure statistics, and both together as `corp prune` runs them.

    python scripts/bench/data.py --checkpoint deit_tiny.safetensors --images imgs/ --num-images 1000

Whatever the overlap, decoding cannot be faster than decoding alone: what counts is how much longer than that the model
waits, as a fraction of the whole.
"""

from __future__ import annotations

import os
import time

import torch
from setting import set_up

from corp_cli.images.batches import readers
from corp_cli.measure.timing import synchronize

LIMIT = 20  # percent of the whole that the model may wait beyond pure decoding


@torch.inference_mode()
def main() -> None:
    """Print the split."""
    setup = set_up(__doc__)
    device = setup.device

    start = time.perf_counter()
    decoded = list(setup.decoded())
    decode = time.perf_counter() - start

    calibration = setup.calibration()
    start = time.perf_counter()
    for pixels in decoded:
        calibration.add(setup.scaled(pixels.to(device)))
    synchronize(device)
    statistics = time.perf_counter() - start
    del decoded

    calibration = setup.calibration()
    waited = 0.0
    start = before = time.perf_counter()
    for pixels in setup.decoded():
        waited += time.perf_counter() - before
        calibration.add(setup.scaled(pixels.to(device, non_blocking=True)))
        synchronize(device)
        before = time.perf_counter()
    both = time.perf_counter() - start

    beyond = 100 * max(0.0, waited - decode) / both
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{len(setup.images)} images, batches of {setup.batch_size}, {readers(setup.workers)} workers, {cores} cores, "
        f"{device}, {torch.get_num_threads()} threads"
    )
    print(f"pure decode {decode:.1f} s, pure statistics {statistics:.1f} s, in turn {decode + statistics:.1f} s")
    print(f"together {both:.1f} s, of which the model waited {waited:.1f} s ({100 * waited / both:.0f}%)")
    verdict = "within" if beyond <= LIMIT else "ABOVE"
    print(f"waited beyond pure decode: {beyond:.0f}% of the whole, {verdict} the limit of {LIMIT}%")


if __name__ == "__main__":
    main()
