"""Several processes: what each does of the work, and what they exchange."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.linalg.moments import RunningMoments
from corp_cli.method import calibrate
from corp_cli.runtime import ranks
from corp_cli.runtime.parcels import packed, unpacked
from tests.faults.forks import warm_up
from tests.support.several import each_of


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What a run imports on first use is there for all children."""
    warm_up()


def test_parcels_arrive_as_they_were() -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    value = {"a": (shared.T, 3, None), "b": nn.Parameter(shared.double()), "c": [torch.zeros(0, 2, dtype=torch.bool)]}
    content, tensors = packed(value)
    assert b"numpy" not in content
    assert len(content) < 1000
    found, empty = unpacked(content)
    for into, tensor in zip(empty, tensors, strict=True):
        into.copy_(tensor)
    assert torch.equal(found["a"][0], shared.T)
    assert found["a"][1:] == (3, None)
    assert torch.equal(found["b"], shared.double())
    assert found["c"][0].shape == (0, 2)
    assert found["c"][0].dtype == torch.bool


def test_one_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, started or asked for, whatever WORLD_SIZE says of other programs."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    ranks.start()
    own = torch.ones(3)
    assert ranks.total(own) is own
    assert ranks.gathered(own) == [own]
    assert ranks.once(lambda: own) is own
    assert list(ranks.spread(str, range(3))) == ["0", "1", "2"]
    assert (ranks.rank(), ranks.count(), ranks.leads(), ranks.speaks()) == (0, 1, True, True)
    assert (ranks.part(7), ranks.at_the_end(7)) == (range(7), range(7))


def test_parts_are_one_stretch_each_and_all_of_it(tmp_path: Path) -> None:
    def work() -> None:
        for total in (0, 1, 2, 3, 7, 61):
            parts = ranks.gathered(ranks.part(total))
            assert [index for part in parts for index in part] == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert [len(part) for part in ranks.gathered(ranks.at_the_end(total))] == [0, 0, total]

    each_of(3, tmp_path, work)


def test_what_one_has_all_get(tmp_path: Path) -> None:
    def work() -> None:
        rank = ranks.rank()
        assert ranks.total(torch.tensor([rank, 1.0])).tolist() == [3, 3]
        assert [one.tolist() for one in ranks.gathered(torch.full((rank,), rank))] == [[], [1], [2, 2]]
        assert ranks.once(lambda: ("only", rank)) == ("only", 0)
        assert list(ranks.spread(lambda item: (item, ranks.rank()), range(5))) == [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 0),
            (4, 1),
        ]
        assert ranks.gathered([item for item in range(5) if ranks.takes(item)]) == [[0, 3], [1, 4], [2]]
        with ranks.alone():
            assert ranks.gathered(rank) == [rank]
        assert sum(ranks.gathered(ranks.speaks())) == 1
        assert sum(ranks.gathered(ranks.speaks())) == 1

    each_of(3, tmp_path, work)


def test_a_mistake_that_one_finds_is_raised_by_all(tmp_path: Path) -> None:
    def fail() -> None:
        raise CorpError("It is wrong; mend it.")

    def work() -> None:
        with pytest.raises(CorpError, match="It is wrong"):
            ranks.once(fail)
        assert ranks.gathered(ranks.rank()) == [0, 1]

    each_of(2, tmp_path, work)


@pytest.mark.parametrize("parts", [(5, 11, 1), (0, 3, 9), (4, 0, 0), (0, 0, 0)])
def test_moments_of_all_against_those_of_one(parts: tuple[int, ...], tmp_path: Path) -> None:
    x = 100 + torch.randn(sum(parts), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.rand(sum(parts), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def moments(x: Tensor, weights: Tensor) -> RunningMoments:
        running = RunningMoments(4, torch.device("cpu"))
        if len(x):
            running.add(x, weights)
        return running

    def work() -> None:
        own = slice(sum(parts[: ranks.rank()]), sum(parts[: ranks.rank() + 1]))
        found, whole = calibrate.pooled(moments(x[own], weights[own])), moments(x, weights)
        assert found.count == whole.count == sum(parts)
        assert found.weight == pytest.approx(whole.weight)
        torch.testing.assert_close(found.mean, whole.mean)
        torch.testing.assert_close(found.scatter.triu(), whole.scatter.triu())

    each_of(3, tmp_path, work)


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.device() == torch.device("cuda:1")
    assert current == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CorpError, match="more processes than the 1 GPUs here"):
        ranks.device()
