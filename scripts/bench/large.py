"""Peak memory and time of pruning a large random model in bfloat16, whose blocks come to the device one at a time.

    python scripts/bench/large.py --device cuda                                     # 7 billion parameters
    python scripts/bench/large.py --args embed_dim=64 depth=2 num_heads=4 --img-size 32 --images 16  # a shrunken shape

Prunes half of every MLP by random images, writes and reads back the checkpoint in a folder that is gone afterwards, and
prints what the run took at most: of the host by the resident memory of the process, of a GPU by its allocated memory.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp_cli import prune_model
from corp_cli.files.shards import checkpoint_files
from corp_cli.images.batches import resolve_device
from corp_cli.models.loading import build, filled, parameters, skeleton
from corp_cli.models.spec import ModelSpec
from corp_cli.runtime.environment import peak_memory_mib


def random_model(name: str, args: dict[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The architecture with random weights, made in `dtype`, each on `device`: there is never a second copy of all."""
    model = filled(skeleton(ModelSpec(name, args, {})).to(dtype), lambda: build(name, args))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path and path.endswith("weight"):
                parameter.fill_(1)
            elif parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, dtype=dtype, device=device)
                parameter.copy_(drawn.mul_(parameter[0].numel() ** -0.5))
            else:
                parameter.fill_(0.1 if "gamma" in path else 0)
    return model


def main() -> None:
    """Build, prune, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vit_7b_patch16_dinov3", help="a name of timm (%(default)s)")
    parser.add_argument("--args", nargs="*", default=[], metavar="KEY=VALUE", help="of its architecture")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--mlp", type=float, default=0.5, help="fraction of every MLP to remove")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scratch", help="a folder for the tokens of all images")
    parser.add_argument("overrides", nargs="*", help="other settings of corp prune, behind --")
    args = parser.parse_args()
    asked = {key: json.loads(value) for key, _, value in (one.partition("=") for one in args.args)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    begin = time.perf_counter()
    architecture, device = {"num_classes": 1000, "img_size": args.img_size, **asked}, resolve_device(args.device)
    model = random_model(args.model, architecture, torch.bfloat16, device)
    size, built = parameters(model), time.perf_counter() - begin
    print(f"{args.model}: {size / 1e9:.2f} billion parameters, built in {built:.0f} s", file=sys.stderr)
    images = torch.randn(args.images, 3, args.img_size, args.img_size, generator=torch.Generator().manual_seed(0))
    overrides = [
        f"calibration.num_images={args.images}",
        f"calibration.scratch={args.scratch or 'null'}",
        "calibration.offload=blocks",
        f"device={args.device}",
        *args.overrides,
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = prune_model(model, images, mlp=args.mlp, overrides=overrides, output_dir=folder)
        finally:  # a run that is ended early says so much
            print(f"{peak_memory_mib(device)}, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        files = [path.stat().st_size for path in checkpoint_files(Path(folder, "pruned.safetensors"))]
    report = result.report
    found = {
        "parameters": [size, parameters(result.model)],
        "dtype": str(next(result.model.parameters()).dtype),
        "peak_memory_mib": vars(report.peak_memory_mib),
        "seconds": {"build": built, **report.stage_seconds},
        "checkpoint_bytes": files,
        "kl": {"uncompensated": report.evaluation.uncompensated.kl, "pruned": report.evaluation.pruned.kl},
    }
    print(json.dumps(found, indent=2, default=str))


if __name__ == "__main__":
    main()
