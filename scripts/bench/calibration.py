"""Cost of calibration: the plain forward pass of the dense model against the same pass with statistics.

    python scripts/bench/calibration.py --checkpoint deit_tiny.safetensors --images imgs/ --num-images 1000

Images are decoded once, before anything is timed. The two passes take turns over the same batches, so that a machine
whose speed drifts slows both.
"""

from __future__ import annotations

import time

import torch
from setting import set_up

from corp_cli.measure.timing import synchronize


@torch.inference_mode()
def main() -> None:
    """Print both times and their ratio."""
    setup = set_up(__doc__)
    device, model, calibration = setup.device, setup.model, setup.calibration()
    decoded = [setup.scaled(pixels.to(device)) for pixels in setup.decoded()]
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
    print(f"{len(setup.images)} images, batches of {setup.batch_size}, {device}, {torch.get_num_threads()} threads")
    print(f"forward {forward:.2f} s, calibrate {calibrate:.2f} s, ratio {calibrate / forward:.2f}")


if __name__ == "__main__":
    main()
