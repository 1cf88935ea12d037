"""Best maps of a given rank: of the logits of a head, and of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CUT = 1e-10  # eigenvalues below this fraction of the largest count as zero
SMALL = 256  # a GPU decomposes several matrices up to this size one by one, and slower than the host does


def roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """G^½ and G^-½ of positive semi-definite G [..., d, d]; the inverse is zero where G (relatively) is."""
    values, vectors = _decomposed(torch.linalg.eigh, gram)
    values = values.clamp(min=0)
    seen = values > CUT * values.amax(-1, keepdim=True)
    root = torch.where(seen, values.sqrt(), 0.0)
    inverse = torch.where(seen, 1 / root.where(seen, torch.ones_like(root)), 0.0)
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors * inverse[..., None, :]) @ vectors.mT


def _decomposed(how: Callable[[Tensor], Iterable[Tensor]], matrices: Tensor) -> list[Tensor]:
    """how(matrices), worked out where that is fastest."""
    if not matrices.is_cuda or matrices.ndim == 2 or matrices.shape[-1] > SMALL:
        return list(how(matrices))
    with one_thread():
        return [part.to(matrices.device) for part in how(matrices.cpu())]


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it the host works alone on each matrix: many threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def logit_factors(gram_q: Tensor, gram_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A, B, σ): the first k rows of A and B give the best rank-k logits (A_k q)·(B_k k) ≈ q·k; [H, d, d], σ [H, d].

    ‖G_Q^½ (I - AᵀB) G_K^½‖² is least for the truncated SVD of G_Q^½ G_K^½ = UΣVᵀ (Eckart and Young, 1936):
    A = Σ^½ Uᵀ G_Q^-½, B = Σ^½ Vᵀ G_K^-½. The error left at rank k is Σ_{i>k} σ_i². Softmax ignores what is constant
    over the keys of one query, so `gram_k` should be that of keys centred per image.
    """
    root_q, inverse_q = roots(gram_q)
    root_k, inverse_k = roots(gram_k)
    U, sigma, Vt = _decomposed(torch.linalg.svd, root_q @ root_k)
    half = sigma.sqrt()[..., None]
    return half * (U.mT @ inverse_q), half * (Vt @ inverse_k), sigma


def output_factors(covariance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E, D, σ): for every head o ≈ D_k E_k o with the first k rows of E, columns of D, as seen through W_h.

    covariance [H, d, d] of the head outputs, weight [H, O, d]. With C^½ Wᵀ = UΣVᵀ: E = Uᵀ C^-½, D = C^½ U. The error
    of W_h o left at rank k is Σ_{i>k} σ_i². E: [H, d, d], σ: [H, d].
    """
    root, inverse = roots(covariance)
    through = root @ weight.mT
    # left singular vectors from the [d, d] product: O may be many times d
    values, U = _decomposed(torch.linalg.eigh, through @ through.mT)
    U = U.flip(-1)
    return U.mT @ inverse, root @ U, values.flip(-1).clamp(min=0).sqrt()
