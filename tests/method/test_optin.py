"""Trajectory scores against models from which one unit after the other is really cut."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp_cli.method.compensate import only_heads, pruned_indices
from corp_cli.method.optin import Losses, trajectory_losses, trajectory_scores
from corp_cli.models.adapter import attention_weights, blocks_of, mlp_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import TOKENS, Block, MlpWeights
from corp_cli.models.streams import head, through, tokens
from tests.support import variants

BOTH = frozenset({"mlp", "heads"})


def without(model: nn.Module, block: Block, group: str, unit: int) -> nn.Module:
    """A copy from whose weights one unit is gone."""
    model, kept = copy.deepcopy(model), pruned_indices(torch.tensor([unit]), getattr(block.sizes, group))
    if group == "mlp":
        mlp = mlp_weights(model, block)
        fc1, biases = tuple(w[kept] for w in mlp.fc1), tuple(None if b is None else b[kept] for b in mlp.fc1_bias)
        replace_mlp(model, block, MlpWeights(fc1, biases, mlp.fc2[:, kept], mlp.fc2_bias))
    else:
        attn = only_heads(attention_weights(model, block), kept)
        v_bias = None if attn.v_bias is None else attn.v_bias[kept]
        replace_attention(model, block, replace(attn, v=attn.v[kept], v_bias=v_bias, proj=attn.proj[:, kept]))
    return model


def run(model: nn.Module, blocks: tuple[Block, ...], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """(the cosines of all tokens behind every block, log-probabilities)"""
    cosines: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Tensor) -> None:
        unit = F.normalize(out.flatten(0, -2), dim=-1)
        cosines.append(unit @ unit.T)

    handles = [model.get_submodule(block.name).register_forward_hook(keep) for block in blocks]
    found = F.log_softmax(variants.logits(model, x), -1)
    for handle in handles:
        handle.remove()
    return cosines, found


@pytest.mark.parametrize("variant", ["vit", "deit3_layer_scale", "res_post_norm", "swiglu", "beit", "sam", "swin"])
def test_scores_are_those_of_models_that_lack_the_unit(variant: str) -> None:
    model, x = variants.build(variant).double(), variants.images(variant).double()
    blocks = blocks_of(model)
    dense, known = run(model, blocks, x)
    found = trajectory_losses(model, blocks, BOTH, x.split(2), at_once=5)
    scores = trajectory_scores(found, 0.3)
    for i, block in enumerate(blocks):
        assert found[i].keys() == BOTH - block.refusals.keys()
        for group, terms in found[i].items():
            assert terms.shape == (2, getattr(block.sizes, group))
            for unit in range(0, terms.shape[1], 1 if group == "heads" else 23):
                cosines, logits = run(without(model, block, group, unit), blocks, x)
                relations = sum(float((a - b).square().mean()) for a, b in zip(dense[i:], cosines[i:], strict=True))
                kl = float((known.exp() * (known - logits)).sum()) / len(x)
                assert terms[:, unit].tolist() == pytest.approx([relations, kl], rel=1e-6, abs=1e-12)
                score = getattr(scores[i], group)
                assert float(score[unit]) == pytest.approx(relations + 0.3 * kl, rel=1e-6, abs=1e-12)


def test_tokens_are_masked_by_leaving_them_out() -> None:
    """The relations of the others, behind their block and every later one, and the outputs; not in the last block."""
    model, x = variants.build("vit").double(), variants.images("vit").double()
    blocks = blocks_of(model)
    found = trajectory_losses(model, blocks, frozenset({"heads", TOKENS}), x.split(2), at_once=3)
    assert [set(each) for each in found] == [{"heads", TOKENS}, {"heads"}]
    inside, known = tokens(model, x), F.log_softmax(variants.logits(model, x), -1)
    with torch.no_grad():
        first = through(model, blocks[0], inside)
        last = through(model, blocks[1], first)
        assert found[0][TOKENS].shape == (2, first.shape[1] - 1)
        for place in range(1, first.shape[1]):
            left = [token for token in range(first.shape[1]) if token != place]
            again = through(model, blocks[1], first[:, left])
            units = [F.normalize(t.flatten(0, 1), dim=-1) for t in (last[:, left], again)]
            relations = float((units[0] @ units[0].T - units[1] @ units[1].T).square().mean())
            logits = F.log_softmax(head(model, again), -1)
            kl = float((known.exp() * (known - logits)).sum()) / len(x)
            assert found[0][TOKENS][:, place - 1].tolist() == pytest.approx([relations, kl], rel=1e-6, abs=1e-12)


class Held:
    """Progress in memory."""

    def __init__(self, losses: dict[int, Losses]) -> None:
        self.losses, self.written = losses, list[int]()

    def read(self, index: int) -> Losses | None:
        return self.losses.get(index)

    def write(self, index: int, losses: Losses) -> None:
        self.written.append(index)


def test_blocks_that_are_kept_are_not_masked_again() -> None:
    model, x = variants.build("vit"), variants.images("vit")
    whole = trajectory_losses(model, blocks_of(model), frozenset({"heads"}), [x], 2)
    held = Held({0: {"heads": torch.full((2, 2), 7.0)}})
    found = trajectory_losses(model, blocks_of(model), frozenset({"heads"}), [x], 1, held)
    assert held.written == [1]
    assert found[0]["heads"].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    torch.testing.assert_close(found[1]["heads"], whole[1]["heads"], rtol=1e-2, atol=1e-7)


def test_without_a_classifier_only_relations_count() -> None:
    name, args = variants.arguments("vit")
    model = variants.noisy(name, {**args, "num_classes": 0})
    terms = trajectory_losses(model, blocks_of(model), frozenset({"heads"}), [variants.images("vit")], 2)[0]["heads"]
    assert (terms[0] > 0).all()
    assert (terms[1] == 0).all()
