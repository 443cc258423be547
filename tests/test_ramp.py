"""Growing batches: which update consumes which rows, counted by hand and by a plain loop."""

from __future__ import annotations

import pytest

from jaxgpt import config, ramp
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.validation import num_steps, warmup_steps

T = 10
# 4 rows until 100 tokens: updates begin at rows 0, 4 and 8, the last before token 100. From row 12
# 6 rows until 200 tokens: at 12 and 18. From row 24 on 8 rows.
GROWING = 'train.batch_ramp={"100" = 4, "2_00" = 6}'


def cfg_of(*overrides: str) -> Config:
    return config.load(None, [f"model.seq_len={T}", "train.global_batch=8", *overrides])


def walk(cfg: Config, updates: int, position: int = 0) -> list[tuple[int, int]]:
    """Return (position, rows) of updates, one after the other, by the definition."""
    found = []
    for _ in range(updates):
        limits = [(int(tokens), rows) for tokens, rows in cfg.train.batch_ramp.items()]
        rows = next((r for t, r in limits if position * T < t), cfg.train.global_batch)
        found.append((position, rows))
        position += rows
    return found


def test_updates_are_as_large_as_their_first_token_says():
    spans = ramp.spans(cfg_of(GROWING))
    assert [span[:3] for span in spans] == [(4, 0, 0), (6, 3, 12), (8, 5, 24)]
    assert [span.updates for span in spans] == [3, 2, ramp.ENDLESS]


@pytest.mark.parametrize("overrides", [[], [GROWING], ['train.batch_ramp={"5" = 16, "77" = 3}']])
@pytest.mark.parametrize("step, position", [(0, 0), (7, 3), (2, 12), (1, 1000)])
def test_steps_and_positions_are_those_of_a_plain_loop_from_anywhere(overrides, step, position):
    cfg = cfg_of(*overrides)
    spans = ramp.spans(cfg, step, position)
    for number, (first, rows) in enumerate(walk(cfg, 12, position), step + 1):
        assert ramp.batch_rows(cfg, first) == rows
        assert ramp.position_after(spans, number) == first + rows
        for row in range(rows):
            assert ramp.place(spans, first + row) == (number, row + 1)
            assert ramp.whole_steps(spans, first + row) == number - 1
            assert ramp.steps_until(spans, first + row + 1) == number


def test_where_all_is_consumed_already_no_update_is_left():
    spans = ramp.spans(cfg_of(GROWING), 5, 24)
    assert ramp.whole_steps(spans, 20) == ramp.steps_until(spans, 20) == 5


def test_spans_end_with_the_last_update():
    spans = ramp.spans(cfg_of(GROWING))
    assert [(s.step, s.updates) for s in ramp.cut(spans, 4)] == [(0, 3), (3, 1)]
    assert [(s.step, s.updates) for s in ramp.cut(spans, 9)] == [(0, 3), (3, 2), (5, 4)]
    assert ramp.cut(spans, 0) == ()


@pytest.mark.parametrize("tokens, steps", [(1, 1), (120, 3), (121, 4), (240, 5), (241, 6)])
def test_budgets_in_tokens_count_the_rows_of_the_ramp(tokens, steps):
    cfg = cfg_of(GROWING, f"train.num_tokens={tokens}")
    assert num_steps(cfg) == steps
    assert warmup_steps(cfg_of(GROWING, f"optim.warmup_tokens={tokens}")) == steps


def test_a_budget_of_tokens_is_kept_when_a_run_goes_on_with_another_ramp():
    # 3 updates have consumed 24 rows of 10 tokens; 26 are left: 8 rows each.
    cfg = cfg_of('train.batch_ramp={"100" = 4}', "train.num_tokens=500")
    assert num_steps(cfg, 3, 24) == 3 + 4


def test_a_ramp_is_put_in_words_before_the_batch_it_ends_with():
    cfg = cfg_of(GROWING)
    words = "4 until 100 tokens, then 6 until 200 tokens, then "
    assert ramp.describe(cfg.train.batch_ramp) == words
    assert ramp.describe({}) == ""


@pytest.mark.parametrize(
    "overrides, words",
    [
        (['train.batch_ramp={"0" = 4}'], ["train.batch_ramp['0']", "at least 1"]),
        (['train.batch_ramp={"1e6" = 4}'], ["train.batch_ramp['1e6']", "whole number"]),
        (['train.batch_ramp={"1__0" = 4}'], ["train.batch_ramp['1__0']", "whole number"]),
        (['train.batch_ramp={"10" = 0}'], ["train.batch_ramp['10'] = 0", "at least 1"]),
        (['train.batch_ramp={"10" = 2147483648}'], ["= 2147483648", "at most 2147483647"]),
        (['train.batch_ramp={"90" = 4, "80" = 6}'], ["train.batch_ramp['80']", "after 90"]),
        (['train.batch_ramp={"1000" = 4, "1_000" = 6}'], ["['1_000']", "after 1_000"]),
        (
            ['train.batch_ramp={"10" = 3}', "train.micro_batch=4"],
            ["train.batch_ramp['10'] = 3", "train.micro_batch = 4"],
        ),
    ],
)
def test_a_ramp_that_cannot_be_meant_is_refused_in_one_line(overrides, words):
    with pytest.raises(ConfigError) as refused:
        cfg_of(*overrides, "train.num_tokens=1000")
    (line,) = str(refused.value).splitlines()
    assert all(word in line for word in words), line


def test_a_batch_of_nothing_is_one_problem_and_no_crash():
    with pytest.raises(ConfigError) as refused:
        cfg_of(GROWING, "train.global_batch=0", "train.num_tokens=1000")
    assert str(refused.value) == "train.global_batch = 0: must be at least 1"
