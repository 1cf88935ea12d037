"""Fine-tune a pruned digit model on the bundled training images, as any timm model, and print what that brings.

    corp prune sparsity.joint=0.75 hydra.run.dir=cut
    python scripts/finetune_digits.py cut/pruned.safetensors --out tuned.safetensors

The result is a checkpoint like the one it came from: corp evaluate, bench and export read it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import corp_cli
from corp_cli.models.bundled import BUNDLED

DIGITS = BUNDLED["vit_digits"]
BATCH = 64
WEIGHT_DECAY = 0.05


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in -1..1, as the model was trained to see them, and their classes [N]."""
    content = load_file(path)
    images = content["images"].reshape(-1, 1, 8, 8).float()
    return images / 127.5 - 1, content["labels"].long()


def train_epoch(model: nn.Module, optimiser: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One pass over the images in random order → the mean loss."""
    model.train()
    total = 0.0
    for index in torch.randperm(len(labels)).split(BATCH):
        loss = F.cross_entropy(model(images[index]), labels[index])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        total += loss.item() * len(index)
    return total / len(labels)


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percentage of the images whose highest logit is their class."""
    right = model.eval()(images).argmax(1) == labels
    return 100 * right.float().mean().item()


def main() -> None:
    """Print top-1 before and after every epoch, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a pruned.safetensors of model=vit_digits")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the fine-tuned checkpoint")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the order of sums must not depend on the number of cores
    corp_cli.register()
    model = timm.create_model("corp_pruned", checkpoint=args.checkpoint)
    images, labels = read(DIGITS.calibration)
    test = read(DIGITS.evaluation)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=WEIGHT_DECAY)
    print(f"pruned: top-1 {accuracy(model, *test):.2f}% of {len(test[1])} test images")
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, optimiser, images, labels)
        print(f"epoch {epoch}: loss {loss:.4f}, top-1 {accuracy(model, *test):.2f}%")
    if args.out:
        corp_cli.save_pruned(model, args.out)


if __name__ == "__main__":
    main()
