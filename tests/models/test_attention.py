"""PlainAttention: against a float64 oracle, and under everything that users do to a module."""

from __future__ import annotations

import pytest
import torch
from timm.layers import Attention
from torch import Tensor

from corp_cli.models.attention.plain import PlainAttention
from corp_cli.models.spec import AttentionSizes
from tests.support import reference

SIZES = [(2, 3, 5), (3, 8, 4), (1, 4, 4)]  # heads, qk, vo


def attention(heads: int, qk: int, vo: int, bias: bool = True) -> PlainAttention:
    torch.manual_seed(heads)
    dense = Attention(12, num_heads=3, qkv_bias=bias)
    return PlainAttention(dense, AttentionSizes(heads, qk, vo, 0.3, bias, True)).eval()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_formula_with_the_stored_scale(sizes: tuple[int, int, int], bias: bool) -> None:
    heads, qk, vo = sizes
    module, x = attention(*sizes, bias), torch.randn(1, 6, 12)
    weight = module.qkv.weight.detach().double()
    rows = module.qkv.bias.detach().double() if bias else torch.zeros(len(weight), dtype=torch.float64)
    parts = [heads * qk, heads * qk, heads * vo]
    (wq, wk, wv), (bq, bk, bv) = weight.split(parts), rows.split(parts)
    outputs = []
    for h in range(heads):
        a, b = slice(h * qk, (h + 1) * qk), slice(h * vo, (h + 1) * vo)
        q, k, v = (x[0].double() @ w.T + b_ for w, b_ in ((wq[a], bq[a]), (wk[a], bk[a]), (wv[b], bv[b])))
        outputs.append(torch.from_numpy(reference.softmax(0.3 * (q @ k.T).numpy()) @ v.numpy()))
    expected = torch.cat(outputs, -1) @ module.proj.weight.detach().double().T + module.proj.bias.detach().double()
    torch.testing.assert_close(module(x)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_masks_reach_the_kernel() -> None:
    module, x = attention(2, 3, 5), torch.randn(2, 4, 12)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(module(x, attn_mask=mask), module(x, is_causal=True))
    assert not torch.allclose(module(x), module(x, is_causal=True))


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_are_those_of_float64(sizes: tuple[int, int, int]) -> None:
    module = attention(*sizes).double()

    def forward(x: Tensor) -> Tensor:
        return module(x)

    assert torch.autograd.gradcheck(forward, torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True))


def test_runs_compiled_in_half_and_under_autocast() -> None:
    module, x = attention(2, 3, 5), torch.randn(2, 4, 12)
    expected = module(x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(x).float(), expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(module.half()(x.half()).float(), expected, rtol=0.05, atol=0.05)
