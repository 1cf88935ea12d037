"""Plan files: what a run writes comes back, and what does not fit the model is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from corp_cli.config.prune import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.models.blocks import Sizes
from corp_cli.pipeline import prune
from corp_cli.sizes.plan import SizePlan
from corp_cli.sizes.plan_file import plan_text, read_plan
from tests.support.budgets import BLOCKS, DENSE, run


def test_plans_come_back(tmp_path: Path) -> None:
    sizes = (Sizes(40, 5, 9, 2), Sizes(128, 16, 16, 1))
    (tmp_path / "plan.yaml").write_text(plan_text(SizePlan(sizes, 1, (), 0.25), BLOCKS))
    again = read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 0)
    assert (again.sizes, again.updated_tokens) == (sizes, 1)
    (tmp_path / "part.yaml").write_text("blocks: {blocks.1: {mlp: 8}}")
    assert read_plan(tmp_path / "part.yaml", BLOCKS, 0, 0, 0).sizes == (DENSE[0], Sizes(8, 16, 16, 2))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no `blocks`"),
        ("blocks: [1]", "holds no `blocks`"),
        ("{", "cannot be read"),
        ("blocks: {blocks.7: {mlp: 8}}", "names blocks.7, which the model does not have"),
        ("blocks: {blocks.0: {mpl: 8}}", r"names blocks\.0\.mpl"),
        ("blocks: {blocks.0: {mlp: 0}}", "give a number from 1 to 128"),
        ("blocks: {blocks.0: {mlp: 129}}", "give a number from 1 to 128"),
        ("blocks: {blocks.0: {mlp: 8.5}}", "give a number from 1 to 128"),
        ("blocks: {3: {mlp: 8}, blocks.0: {mlp: 8}, x: {}}", "names 3, which the model does not have"),
        ("blocks: {blocks.0: {3: 8}}", r"names blocks\.0\.3; the groups are"),
        ("blocks: {blocks.0: [8]}", r"blocks\.0 is no list of group: size"),
        ("[" * 10**5, "nested too deeply"),
        ("a: &a [x]\n" + "".join(f"{i}: &{i} [*{i - 1}, *{i - 1}]\n" for i in range(1, 60)), "cannot be read"),
        ("a: &a {mlp: 8}\nblocks: {blocks.0: *a, blocks.1: *a}", "holds aliases, which a plan does without"),
        ("{blocks: {}, last_block_tokens: 1}", r"last_block_tokens=1; this model needs null \(all tokens\)"),
    ],
)
def test_broken_plans_are_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(CorpError, match=sentence):
        read_plan(path, BLOCKS, 0, 0, 0)


@pytest.mark.parametrize("tokens", [0, 6, 10**9])
def test_the_last_block_updates_no_more_tokens_than_there_are(tmp_path: Path, tokens: int) -> None:
    (tmp_path / "plan.yaml").write_text(f"{{blocks: {{}}, last_block_tokens: {tokens}}}")
    with pytest.raises(CorpError, match=f"last_block_tokens={tokens}; this model needs 1 to 5, or null"):
        read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 0)


@pytest.mark.parametrize(
    ("merge", "mergeable", "said"),
    [
        (3, 2, "asks merge=3, 0 of the blocks; for this model, give counts that add up to 2 at most"),
        (-1, 2, "asks merge=-1, 0"),
        (True, 2, "asks merge=True, 0"),
        (1, 0, "asks merge=1, 0 of the blocks; for this model, leave them out"),
    ],
)
def test_plans_say_how_many_tokens_are_merged(tmp_path: Path, merge: int, mergeable: int, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(SizePlan(DENSE, 1, (2, 0)), BLOCKS))
    assert read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 2) == SizePlan(DENSE, 1, (2, 0))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"blocks": {"blocks.0": {"merge": merge}}}))
    with pytest.raises(CorpError, match=re.escape(said)):
        read_plan(tmp_path / "bad.yaml", BLOCKS, 1, 5, mergeable)


@pytest.mark.usefixtures("tiny_digits")
def test_a_missing_plan_is_told_before_any_long_work(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match=r"sparsity\.plan=.*nowhere\.yaml does not exist"):
        prune(run(SparsityConfig(plan=str(tmp_path / "nowhere.yaml"))))
