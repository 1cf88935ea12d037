"""Peak memory of calibration on 100 and on 10 000 images: it must not grow with their number.

    python scripts/bench/memory.py

Writes small random images to a temporary folder and runs `corp prune` on them with the bundled model, each run in a
process of its own, whose report gives the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

LIMIT = 5  # percent


def write_images(folder: Path, count: int) -> None:
    """`count` random 8x8 images in sub-folders of a thousand."""
    generator = np.random.default_rng(0)
    for index in range(count):
        path = folder / str(index // 1000) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8), np.uint8)).save(path)


def peak_mib(images: Path, count: int, workers: int, output: Path) -> float:
    """Peak resident memory of a run that calibrates on `count` of the images."""
    overrides = {
        "calibration.path": images,
        "calibration.num_images": count,
        "compensation.propagate": "none",  # sequential repair holds the stream of every image on the host
        "calibration.num_workers": workers,
        "evaluation.num_images": 64,
        "evaluation.num_workers": 0,
        "evaluation.throughput_batches": 0,
        "device": "cpu",
        "hydra.run.dir": output,
    }
    command = [sys.executable, "-m", "corp_cli", "prune", *(f"{key}={value}" for key, value in overrides.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((output / "report.json").read_text())
    assert report["calibration"]["images"] == count
    return float(report["peak_memory_mib"]["host"])


def main() -> None:
    """Print both peaks and their difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", type=int, nargs=2, default=[100, 10_000])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        write_images(images, max(args.counts) + 200)  # some are left over to evaluate on
        peaks = [peak_mib(images, count, args.workers, Path(folder, str(count))) for count in args.counts]
    for count, peak in zip(args.counts, peaks, strict=True):
        print(f"{count:>6} images: peak {peak:.0f} MiB")
    change = 100 * (peaks[1] / peaks[0] - 1)
    print(f"change {change:+.1f}%, {'within' if abs(change) <= LIMIT else 'ABOVE'} the limit of {LIMIT}%")


if __name__ == "__main__":
    main()
