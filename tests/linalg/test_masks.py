"""Relations of tokens, representatives and masks against their formulas, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from corp_cli.linalg.masks import input_gram, least_squares_masks, representatives
from corp_cli.linalg.relations import relation_distance
from tests.linalg.test_linalg import correlated, moments_of, normal


@pytest.mark.parametrize("apart", [1.0, 1e-4])
def test_relations_are_compared_pair_by_pair(apart: float) -> None:
    tokens = normal(1, 7, 5)
    others = tokens + apart * normal(2, 3, 7, 5)
    cosines = [F.normalize(t, dim=-1) @ F.normalize(t, dim=-1).T for t in (tokens, *others)]
    expected = torch.stack([(cosines[0] - other).square().mean() for other in cosines[1:]])
    torch.testing.assert_close(relation_distance(tokens, others), expected)


def test_relations_of_near_tokens_keep_their_digits_in_float32() -> None:
    tokens = normal(1, 50, 8)
    others = tokens + 1e-4 * normal(2, 1, 50, 8)
    found = relation_distance(tokens.float(), others.float())
    torch.testing.assert_close(found, relation_distance(tokens, others), rtol=1e-2, atol=0.0)


def test_turned_tokens_have_the_same_relations() -> None:
    tokens, turn = normal(1, 7, 5), torch.linalg.qr(normal(2, 5, 5))[0]
    assert relation_distance(tokens, (3 * tokens @ turn)[None]) < 1e-20


def test_representatives_are_the_loop_of_the_paper() -> None:
    points = normal(3, 6, 4)
    square = [[float((p - q).square().sum()) for q in points] for p in points]
    width = sum(map(sum, square)) / 36
    kernel = [[math.exp(-d / width) for d in row] for row in square]
    c = [[1 / 6] * 6 for _ in range(6)]
    for _ in range(200):
        total = sum(map(sum, c))
        product = [[sum(kernel[i][k] * c[k][j] for k in range(6)) for j in range(6)] for i in range(6)]
        c = [[c[i][j] * math.sqrt(kernel[i][j] / product[i][j]) for j in range(6)] for i in range(6)]
        if abs(sum(map(sum, c)) - total) <= 0.01 * total:
            break
    torch.testing.assert_close(representatives(points), torch.tensor([c[i][i] for i in range(6)]).double())


def test_a_point_apart_stands_for_itself_and_copies_do_not() -> None:
    points = torch.cat([normal(4, 1, 3).expand(5, 3) + 1e-3 * normal(5, 5, 3), 4 + normal(6, 1, 3)])
    assert representatives(points).argmax() == 5
    assert representatives(torch.ones(4, 3).double()).isfinite().all()


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_masks_are_those_of_lstsq(ridge: float) -> None:
    """Two heads of three inputs, of which one loses an input, and a third head that goes as a whole."""
    x, weight = correlated(7, 40, 9), normal(8, 4, 9)
    kept, owner = torch.tensor([0, 1, 2, 3, 5]), torch.tensor([0, 0, 0, 1, 1])
    gram = input_gram(weight, moments_of(x))
    found = least_squares_masks(gram, kept, owner, ridge)
    parts = [(x[:, index] @ weight[:, index].T).flatten() / 40**0.5 for index in ([0, 1, 2], [3, 5])]
    design, whole = torch.stack(parts, 1).numpy(), ((x @ weight.T).flatten() / 40**0.5).numpy()
    strength = (ridge * (design**2).sum(0).mean()) ** 0.5
    rows, goal = np.vstack([design, strength * np.eye(2)]), np.concatenate([whole, strength * np.ones(2)])
    masks = torch.from_numpy(np.linalg.lstsq(rows, goal, rcond=None)[0])
    torch.testing.assert_close(found, masks[owner])


def test_masks_of_all_units_are_one() -> None:
    gram = input_gram(normal(1, 3, 6), moments_of(correlated(2, 30, 6)))
    torch.testing.assert_close(
        least_squares_masks(gram, torch.arange(6), torch.arange(6), 1e-3), torch.ones(6).double()
    )
