"""Where the time of a forward pass goes: what the GPU computes, what it waits for Python, and which kernels run.

    python scripts/bench/kernels.py --model deit3_huge_patch14_224 --joint 0.5 --dtype bfloat16 --batch-sizes 1 256

A dense model and the same one cut to these sizes, both with random weights. `eager` is a pass as Python launches it,
`graph` the same as a CUDA graph, without Python: where eager takes longer, a larger batch, a graph or torch.compile
helps, and narrower layers do not. `launches` are kernels a pass. --widths times an MLP around the size asked for,
which is what sparsity.round_to is about.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from corp_cli.measure.timing import pass_seconds
from corp_cli.models.adapter import blocks_of, resize_attention, resize_mlp
from corp_cli.models.layer_scale import fold_layer_scale
from corp_cli.models.loading import build
from corp_cli.models.plain_block import put_plain_blocks
from corp_cli.models.spec import AttentionSizes

OFFSETS = (-64, -56, -48, -32, -16, -8, 0, 8, 16, 32, 64)


def cut(model: nn.Module, joint: float, vo: float) -> nn.Module:
    """A copy with `joint` of its MLPs, queries and keys and `vo` of its values removed, the weights random."""
    pruned = copy.deepcopy(model)
    for block in blocks_of(pruned):
        size, biased = block.sizes, True
        kept = [round(n * (1 - s)) for n, s in ((size.mlp, joint), (size.qk, joint), (size.vo, vo))]
        resize_mlp(pruned, block, kept[0], biased)
        resize_attention(pruned, block, AttentionSizes(size.heads, kept[1], kept[2], block.scale, biased, biased))
    fold_layer_scale(pruned)
    put_plain_blocks(pruned)
    return pruned.eval()


def as_graph(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """`model` on `images` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made on a first pass must not be recorded
        for _ in range(3):
            model(images)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(images)

    def replay(_: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def kernels(model: nn.Module, images: Tensor) -> Counter[str]:
    """Kernel → how often it runs in a pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(images)
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() or [] if "CUDA" in str(event.device_type))


def milliseconds(models: dict[str, Any], images: Tensor, repeats: int) -> dict[str, float]:
    """The median pass of each, in turns."""
    return {name: 1e3 * median(times) for name, times in pass_seconds(models, images, repeats, 10.0).items()}


@torch.inference_mode()
def main() -> None:
    """Print a row a batch size, and one a width."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deit3_huge_patch14_224", help="of timm")
    parser.add_argument("--joint", type=float, default=0.5)
    parser.add_argument("--vo", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--widths", action="store_true")
    args = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    print(f"{args.model}, {args.dtype}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    dense = build(args.model, {}).to(device, dtype).eval()
    models = {"dense": dense, "pruned": cut(dense, args.joint, args.vo)}
    for size in args.batch_sizes:
        images = torch.randn(size, *default_cfg(dense)["input_size"], device=device, dtype=dtype)
        eager = milliseconds(models, images, args.repeats)
        graphs = milliseconds({name: as_graph(model, images) for name, model in models.items()}, images, args.repeats)
        for way, found in (("eager", eager), ("graph", graphs)):
            gain = found["dense"] / found["pruned"]
            print(f"batch {size}, {way}: dense {found['dense']:.2f} ms, pruned {found['pruned']:.2f} ms, x{gain:.2f}")
        for name, model in models.items():
            launched = kernels(model, images)
            print(f"batch {size}, {name}: {sum(launched.values())} launches")
            for kernel, count in launched.most_common(8):
                print(f"  {count:5} {kernel[:100]}")
    if args.widths:
        block = blocks_of(dense)[0]
        around = round(block.sizes.mlp * (1 - args.joint))
        images = torch.randn(max(args.batch_sizes), 257, block_width(dense), device=device, dtype=dtype)
        mlps = {}
        for offset in OFFSETS:
            holder = copy.deepcopy(dense.get_submodule(block.name))
            mlps[str(around + offset)] = alone(holder, block, around + offset)
        for width, taken in milliseconds(mlps, images, args.repeats).items():
            print(f"MLP of {width}: {taken:.3f} ms")


def alone(holder: nn.Module, block: Any, hidden: int) -> nn.Module:
    """The MLP of a block, of another size."""
    return resize_mlp(holder, replace(block, mlp="mlp"), hidden, True)


def block_width(model: Any) -> int:
    """Channels of the stream."""
    return int(model.embed_dim)


def default_cfg(model: Any) -> dict[str, Any]:
    """What timm says of the images of a model."""
    found: dict[str, Any] = model.default_cfg
    return found


if __name__ == "__main__":
    main()
