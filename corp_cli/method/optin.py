"""The trajectory scores of OPTIN (Khaki and Plataniotis, "The need for speed", arXiv 2403.17921, section 3).

    I_u = Σ_{l≥i} ‖M(x_l) - M(x̃_l)‖² / n² + λ KL(z ‖ z̃)

with unit u of block i masked in x̃ and z̃, x_l the n tokens that come out of block l over all images, M their cosines
(the manifold distillation loss), and z the logits. A masked block is not computed again: one channel j is h_j fc2_:j of
its output, and one head W_O,h o_h, so that only what lies behind is run, for many masked models in one pass. A token of
the patches is masked by leaving it out behind its block: the others are what is compared.

Otherwise than the published code: all pairs of tokens count, not 768 drawn anew for each unit; KL is weighted by λ
alone, and not by powers of ten until it is about a tenth of the rest; and no score is weighted by the unit's index.
Without a classifier, only the relations count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp_cli.linalg.relations import relation_distance
from corp_cli.method.rank import Scores
from corp_cli.models.blocks import TOKENS, Block
from corp_cli.models.streams import enter, head, input_of, sublayers, through, tokens
from corp_cli.models.sublayers import Sublayer
from corp_cli.models.token_block import all_tokens, prefix_tokens
from corp_cli.runtime import console
from corp_cli.runtime.memory import room_of

Losses = dict[str, Tensor]  # group → the two terms for every unit, [2, units] float64: relations, KL per image
COPIES = 32  # of a stream, that a pass through a block takes at its peak


class Progress(Protocol):
    """Where the losses of blocks that are done are kept for a run that goes on, and for other runs."""

    def read(self, index: int) -> Losses | None:
        """Those of a block; None where none are kept."""

    def write(self, index: int, losses: Losses) -> None:
        """Keep those of a block."""


def trajectory_scores(losses: tuple[Losses, ...], weight: float) -> tuple[Scores, ...]:
    """I_u of every unit of every block, with λ = `weight`."""
    return tuple(Scores(**{group: part[0] + weight * part[1] for group, part in of.items()}) for of in losses)


@torch.no_grad()
def trajectory_losses(
    model: nn.Module,
    blocks: tuple[Block, ...],
    groups: frozenset[str],
    batches: Iterable[Tensor],
    at_once: int,
    progress: Progress | None = None,
) -> tuple[Losses, ...]:
    """Both terms for every hidden channel and head of every block, of the `groups` that it allows.

    Where TOKENS are among these, for every token of the patches behind every block but the last, too.

    Up to `at_once` masked models share a pass, fewer where memory asks for it. Blocks that `progress` holds are taken
    from it, and others are added to it.
    """
    x = torch.cat([tokens(model, images) for images in batches])
    at_once = max(1, min(at_once, room_of(x.device) // (COPIES * x.numel() * x.element_size())))
    outputs = [x]
    for block in blocks:
        outputs.append(through(model, block, outputs[-1]))
    reference = head(model, outputs[-1]) if getattr(model, "num_classes", None) != 0 else None
    found = [progress.read(i) if progress else None for i in range(len(blocks))]
    missing, asked = [i for i, known in enumerate(found) if known is None], asked_of(blocks, groups)
    with passes_shown(sum(units_of(model, blocks[i], asked[i]) * (len(blocks) - i) for i in missing)) as show:
        for i in missing:
            losses: Losses = {}
            for group, masked, left in masked_streams(model, blocks[i], outputs[i], asked[i], at_once):
                relations = by_model(outputs[i + 1], masked, left)
                for block, known in zip(blocks[i + 1 :], outputs[i + 2 :], strict=True):
                    masked = through(model, block, masked)
                    relations = relations + by_model(known, masked, left)
                of_logits = relations.new_zeros(len(relations))
                if reference is not None:
                    of_logits = divergences(reference, head(model, masked))
                terms = torch.stack([relations, of_logits]).cpu()
                losses[group] = torch.cat([losses[group], terms], 1) if group in losses else terms
                show(terms.shape[1] * (len(blocks) - i))
            found[i] = losses
            if progress:
                progress.write(i, losses)
    return tuple(losses for losses in found if losses is not None)


def masked_streams(
    model: nn.Module, block: Block, x: Tensor, groups: frozenset[str], at_once: int
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(group, what comes out of `block` where units of it are masked, one in each model, [U B, ...], tokens), in order.

    tokens [U, N - 1]: which of them each model has left; None: all.
    """
    x, allowed = enter(model, block, x), groups - block.refusals.keys()
    attention, mlp = sublayers(model, block)
    with input_of(attention.output) as inputs:
        out = attention.branch(x)
    if "heads" in allowed:
        for masked in without_each(attention, x, out, inputs[0], block.sizes.vo, at_once):
            yield "heads", mlp.added(masked, mlp.branch(masked)), None
    x = attention.added(x, out)
    with input_of(mlp.output) as inputs:
        out = mlp.branch(x)
    if "mlp" in allowed:
        for masked in without_each(mlp, x, out, inputs[0], 1, at_once):
            yield "mlp", masked, None
    if TOKENS in groups:
        x = mlp.added(x, out)
        every, first = torch.arange(x.shape[1], device=x.device), prefix_tokens(model)
        for some in every[first:].split(at_once):
            left = torch.stack([every[every != token] for token in some])
            yield TOKENS, x[:, left].transpose(0, 1).flatten(0, 1), left


def without_each(
    branch: Sublayer, stream: Tensor, out: Tensor, inputs: Tensor, size: int, at_once: int
) -> Iterator[Tensor]:
    """The stream behind a branch that gave `out`, without what one unit added: `size` inputs of its last layer."""
    by_unit, weight = inputs.unflatten(-1, (-1, size)), branch.output.weight.unflatten(1, (-1, size))
    for some in torch.arange(weight.shape[1], device=out.device).split(at_once):
        added = torch.einsum("...us,ous->u...o", by_unit[..., some, :], weight[:, some])
        masked = out - added.reshape(-1, *out.shape)  # SAM's last layer sees its grid as a sequence
        yield branch.added(stream.expand(len(some), *stream.shape).flatten(0, 1), masked.flatten(0, 1))


def by_model(known: Tensor, masked: Tensor, left: Tensor | None) -> Tensor:
    """The distance of the relations of tokens [B, ..., D] to those of every masked model [U B, ..., D], [U].

    left [U, N - 1]: which tokens each has; None: all.
    """
    rows = known.flatten(0, -2) if left is None else known[:, left].transpose(0, 1).flatten(1, 2)
    return relation_distance(rows, masked.reshape(-1, *rows.shape[-2:]))


def divergences(reference: Tensor, found: Tensor) -> Tensor:
    """KL(dense ‖ masked) per image in nats, [U], by logits [B, C] and [U B, C]."""
    dense, masked = (F.log_softmax(logits.double(), -1) for logits in (reference, found))
    each = F.kl_div(masked.unflatten(0, (-1, len(dense))), dense, reduction="none", log_target=True)
    return each.sum((1, 2)) / len(dense)


def asked_of(blocks: tuple[Block, ...], groups: frozenset[str]) -> list[frozenset[str]]:
    """What is masked in every block: `groups`, but the last passes on no tokens that another block could miss."""
    return [groups] * (len(blocks) - 1) + [groups - {TOKENS}]


def units_of(model: nn.Module, block: Block, groups: frozenset[str]) -> int:
    """How many units of a block are masked."""
    of_block = sum(int(getattr(block.sizes, group)) for group in groups - block.refusals.keys() - {TOKENS})
    return of_block + (all_tokens(model) - prefix_tokens(model) if TOKENS in groups else 0)


@contextmanager
def passes_shown(total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` masked models and blocks are done: call with those that have been added."""
    done, start = 0, monotonic()
    with console.shown("masked passes") as show:

        def add(count: int) -> None:
            nonlocal done
            done += count
            show(done, total, (monotonic() - start) / done * (total - done))

        yield add
