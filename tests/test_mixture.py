"""Mixing: exact counts, closed-form counters over stages, sources that run out, changed plans."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.mixture import (
    MAX_POSITION,
    Mixture,
    draws,
    ends,
    make_mixture,
    position_of,
    replan,
    resume,
    same_from,
    visits_before,
)
from jaxgpt.errors import ConfigError

PLANS = [
    ((0, {"a": 1.0}),),
    ((0, {"a": 0.7, "b": 0.3}),),
    ((0, {"a": 0.7, "b": 0.3}), (25, {"a": 0.3, "b": 0.7})),
    # A source is added, removed and added again, at block borders and inside blocks.
    ((0, {"b": 1}), (7, {"a": 1, "b": 2}), (13, {"c": 1, "b": 1}), (40, {"a": 5, "b": 1, "c": 1})),
    ((0, {"a": 2, "b": 1}), (1, {"c": 1}), (2, {"a": 1, "c": 3}), (3, {"b": 1})),
    ((0, {"a": 0.999, "b": 0.001}), (2500, {f"s{i:02}": 1 + i for i in range(40)})),
    ((0, {"a": math.pi, "b": math.e}), (500, {"a": 1, "b": 1, "c": 1e-4})),
]
tables = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1)
plans = st.tuples(tables, st.dictionaries(st.integers(1, 60), tables, max_size=3)).map(
    lambda parts: ((0, parts[0]), *sorted(parts[1].items()))
)


def drawn_by_name(mixture: Mixture, stop: int) -> dict[str, int]:
    source, _ = draws(mixture, np.arange(stop))
    counts = np.bincount(source, minlength=len(mixture.names)).tolist()
    return dict(zip(mixture.names, counts, strict=True))


def stages_of(plan):
    """(start, stop, weights) of each stage; the last one gets three blocks or so."""
    starts = [start for start, _ in plan]
    return list(zip(starts, [*starts[1:], starts[-1] + 3000], [t for _, t in plan], strict=True))


@pytest.mark.parametrize("weights, counts", [((0.999, 0.001), (999, 1)), ((0.7, 0.3), (700, 300))])
def test_a_thousand_draws_are_shared_out_exactly(weights, counts):
    mixture = make_mixture(((0, dict(zip("ab", weights, strict=True))),))
    assert tuple(drawn_by_name(mixture, 1000).values()) == counts


def test_the_second_half_is_the_same_whether_or_not_one_starts_there():
    mixture = make_mixture(((0, {"a": 0.999, "b": 0.001}), (300, {"a": 0.7, "b": 0.3})))
    whole = draws(mixture, np.arange(1000))
    half = draws(mixture, np.arange(500, 1000))
    np.testing.assert_array_equal(np.stack(whole)[:, 500:], np.stack(half))


@pytest.mark.parametrize("plan", PLANS[:6])
def test_the_counts_are_exact_at_every_block_border_of_every_stage(plan):
    mixture = make_mixture(plan)
    for start, stop, table in stages_of(plan):
        weights = {name: Fraction(repr(float(weight))) for name, weight in table.items()}
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        block = math.lcm(*(share.denominator for share in shares.values()))
        before = visits_before(mixture, start)
        for blocks in range((stop - start) // block + 1):
            made = visits_before(mixture, start + blocks * block) - before
            right = [shares.get(name, 0) * block * blocks for name in mixture.names]
            assert made.tolist() == right


@pytest.mark.parametrize("plan", PLANS)
def test_every_part_of_a_stage_is_within_one_of_each_share(plan):
    mixture = make_mixture(plan)
    for start, stop, table in stages_of(plan):
        source, _ = draws(mixture, np.arange(start, stop))
        made = np.cumsum(source[:, None] == np.arange(len(mixture.names)), axis=0)
        counts = next(stage for stage in mixture.stages if stage.start == start).counts
        exact = np.arange(1, stop - start + 1)[:, None] * counts / counts.sum()
        assert np.abs(made - exact).max() < 1
        asked = np.array([table.get(name, 0) for name in mixture.names]) / sum(table.values())
        assert np.abs(counts / counts.sum() - asked).max() <= 1 / 65536


@pytest.mark.parametrize("plan", PLANS)
def test_each_source_is_visited_in_order_without_gap_or_repeat_over_all_stages(plan):
    mixture = make_mixture(plan)
    source, visit = draws(mixture, np.arange(stages_of(plan)[-1][1]))
    for number in range(len(mixture.names)):
        mine = visit[source == number]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))


@pytest.mark.parametrize("plan", PLANS)
def test_visits_before_a_position_are_those_that_were_made(plan):
    mixture = make_mixture(plan)
    source, _ = draws(mixture, np.arange(3000))
    for position in (0, 1, 2, 3, 7, 12, 13, 14, 25, 500, 999, 1000, 2499, 2501, 3000):
        right = np.bincount(source[:position], minlength=len(mixture.names))
        np.testing.assert_array_equal(visits_before(mixture, position), right)


@pytest.mark.parametrize("plan", PLANS)
def test_each_visit_is_found_again_at_its_position(plan):
    mixture = make_mixture(plan)
    source, visit = draws(mixture, np.arange(3000))
    for number in range(len(mixture.names)):
        right = np.flatnonzero(source == number)
        np.testing.assert_array_equal(position_of(mixture, number, visit[right]), right)


def test_a_visit_that_is_never_made_has_no_position():
    mixture = make_mixture(((0, {"a": 1, "b": 1}), (10, {"b": 1})))
    assert position_of(mixture, 0, np.array([4, 5, 2**61, -1])).tolist() == [8, -1, -1, -1]


@pytest.mark.parametrize("start", [0, 1, 500, 999, 1000, 2**33 + 7, 2**40, 2**61])
def test_far_positions_are_exact(start):
    mixture = make_mixture(((0, {"a": 0.7, "b": 0.3}), (5, {"a": 0.999, "b": 0.001})))
    # From 5 on, b comes once in every thousand.
    base = visits_before(mixture, 5).tolist()
    source, visit = draws(mixture, np.arange(start + 5, start + 1005))
    assert np.bincount(source).tolist() == [999, 1]
    made = visits_before(mixture, start + 5).tolist()
    assert sum(made) == start + 5
    assert 0 <= made[1] - base[1] - start // 1000 <= 1
    for number in range(2):
        assert visit[source == number][0] == made[number]
        found = position_of(mixture, number, visit[source == number])
        np.testing.assert_array_equal(found, start + 5 + np.flatnonzero(source == number))


def test_positions_in_any_order_draw_what_each_draws_alone():
    mixture = make_mixture(PLANS[3])
    positions = np.random.default_rng(0).integers(0, 100, 300)
    source, visit = draws(mixture, positions)
    alone = [[int(x[0]) for x in draws(mixture, np.array([p]))] for p in positions]
    assert np.stack([source, visit], 1).tolist() == alone


def test_sources_are_numbered_by_key_whatever_the_order_of_the_table():
    first = make_mixture(((0, {"b": 2, "a": 1, "c": 4}),))
    second = make_mixture(((0, {"c": 4, "b": 2, "a": 1}),))
    assert first.names == second.names == ("a", "b", "c")
    np.testing.assert_array_equal(draws(first, np.arange(70)), draws(second, np.arange(70)))


def test_weights_need_not_sum_to_one():
    np.testing.assert_array_equal(make_mixture(((0, {"a": 14, "b": 6}),)).stages[0].counts, [7, 3])


def test_a_position_that_does_not_exist_is_refused():
    mixture = make_mixture(((0, {"a": 1, "b": 1}),), {"a": 10, "b": 10}, max_epochs=1)
    assert mixture.end == 20
    for position in (-1, 20):
        with pytest.raises(IndexError, match=r"not all in 0\.\.19"):
            draws(mixture, np.array([3, position]))
    assert visits_before(mixture, 20).tolist() == [10, 10]
    for position in (-1, 21):
        with pytest.raises(IndexError, match=rf"position {position} is not in 0\.\.20"):
            visits_before(mixture, position)


# Sources that run out, against a walk over the positions one by one.


def simulate(plan, limits, run_out, positions):
    """Return (source names drawn, end) by asking for one position after the other.

    What a stage draws comes from a mixture of that stage alone.
    """
    drawn = dict.fromkeys(limits, 0)
    stream: list[str] = []
    weights: dict[str, float] = {}
    start = 0

    def next_source() -> str:
        alone = make_mixture(((0, weights),))
        return alone.names[int(draws(alone, np.array([position - start]))[0][0])]

    def left(table):
        return {name: weight for name, weight in table.items() if drawn[name] < limits[name]}

    for position in range(positions):
        if position in dict(plan):
            start, weights = position, dict(plan)[position]
            weights = left(weights) if run_out == "drop" else weights
        if weights and drawn[next_source()] == limits[next_source()]:
            start, weights = position, left(weights) if run_out == "drop" else {}
        if not weights:
            return stream, position
        stream.append(next_source())
        drawn[stream[-1]] += 1
    return stream, None


def stream_of(mixture: Mixture, positions: int) -> list[str]:
    source, _ = draws(mixture, np.arange(min(positions, mixture.end or positions)))
    return [mixture.names[number] for number in source.tolist()]


@settings(deadline=None, max_examples=80)
@given(
    plan=plans,
    rows=st.fixed_dictionaries({name: st.integers(1, 25) for name in "abcd"}),
    passes=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
    run_out=st.sampled_from(["stop", "drop"]),
)
def test_sources_run_out_as_in_a_walk_over_the_positions(plan, rows, passes, run_out):
    limits = {name: max(1, math.floor(passes * n)) for name, n in rows.items()}
    mixture = make_mixture(plan, rows, max_epochs=passes, run_out=run_out)
    stream, end = simulate(plan, limits, run_out, 260)
    assert stream_of(mixture, 260) == stream
    assert mixture.end == end
    last = {n: [p for p, m in enumerate(stream) if m == n] for n in mixture.names}
    used_up = {n: at[-1] + 1 for n, at in last.items() if len(at) == limits[n]}
    assert ends(mixture) == used_up
    for number, name in enumerate(mixture.names):
        visits = np.arange(len(last[name]) + 1)
        assert position_of(mixture, number, visits).tolist() == [*last[name], -1]


def test_the_run_stops_where_a_source_that_has_run_out_would_be_drawn():
    rows = {"small": 5, "large": 10**9}
    mixture = make_mixture(((0, {"large": 0.9, "small": 0.1}),), rows, max_epochs=2)
    # 10 draws of the small one in 100 positions; the eleventh falls in the next ten.
    assert 100 <= mixture.end < 110
    assert visits_before(mixture, mixture.end).tolist() == [mixture.end - 10, 10]
    assert 90 < ends(mixture)["small"] <= 100
    assert list(ends(mixture)) == ["small"]


def test_the_others_go_on_by_their_weights_when_a_source_has_run_out():
    rows = {"a": 1000, "b": 2000, "tiny": 4}
    table = {"a": 2, "b": 1, "tiny": 1}
    mixture = make_mixture(((0, table),), rows, max_epochs=1, run_out="drop")
    first, second, third = mixture.stages
    assert 16 <= second.start < 20
    assert mixture.plan[1] == (second.start, {"a": 2, "b": 1})
    made = visits_before(mixture, second.start + 300) - visits_before(mixture, second.start)
    assert made.tolist() == [200, 100, 0]
    assert mixture.plan[2] == (third.start, {"b": 1})
    assert mixture.end == 3004  # every row of every source, once
    assert ends(mixture)["b"] == 3004


def test_a_source_without_a_limit_never_runs_out():
    mixture = make_mixture(((0, {"a": 1, "b": 1}),), {"a": 10}, max_epochs=1, run_out="drop")
    assert mixture.end is None
    assert list(ends(mixture)) == ["a"]
    assert make_mixture(((0, {"a": 1}),), {"a": 10}).end is None
    assert ends(make_mixture(((0, {"a": 1}),), {"a": 10})) == {}


@pytest.mark.parametrize(
    "rows, passes, limit",
    [
        (100, 0.29, 29),
        (3, 0.1, 1),
        (10, 1.95, 19),
        (2**40, 0.5, 2**39),
        (2**40 + 1, 3, 3 * 2**40 + 3),
    ],
)
def test_passes_are_counted_in_whole_rows_and_exactly(rows, passes, limit):
    assert make_mixture(((0, {"a": 1}),), {"a": rows}, max_epochs=passes).end == limit


def test_limits_beyond_every_position_are_none():
    rows = {"a": 2**60, "b": 2**61}
    mixture = make_mixture(((0, {"a": 1, "b": 1e-3}),), rows, max_epochs=1e9, run_out="drop")
    assert mixture.end is None
    assert visits_before(mixture, MAX_POSITION).sum() == MAX_POSITION


def test_many_sources_that_run_out_together_are_all_used_up():
    rows = {f"s{i:04}": 50 + i * 7919 % 211 for i in range(300)}
    table = {name: float(n) for name, n in rows.items()}
    mixture = make_mixture(((0, table),), rows, max_epochs=1, run_out="drop")
    assert mixture.end == sum(rows.values())
    assert visits_before(mixture, mixture.end).tolist() == [rows[name] for name in mixture.names]


# Plans that change while a run goes on.

OLD = ((0, {"a": 1, "b": 1}), (50, {"a": 3, "b": 1}), (100, {"b": 1}))


@pytest.mark.parametrize(
    "new, position, same",
    [
        (OLD, 0, True),
        (OLD, 77, True),
        (((0, {"b": 2, "a": 2}), (50, {"b": 0.25, "a": 0.75}), (100, {"b": 7})), 10, True),
        (((0, {"c": 1}), (60, {"a": 3, "b": 1}), (100, {"b": 1})), 77, True),
        (((0, {"c": 1}), (60, {"a": 3, "b": 1}), (100, {"b": 1})), 59, False),
        (((0, {"b": 1}),), 100, True),
        (((0, {"b": 1}),), 99, False),
        (((0, {"a": 3, "b": 1}), (101, {"b": 1})), 77, False),
        (((0, {"a": 3, "b": 1}), (100, {"c": 1})), 77, False),
        (((0, {"a": 3, "b": 1}),), 77, False),
        (((0, {"a": 3, "b": 1.001}), (100, {"b": 1})), 77, False),
        (((0, {"a": 3, "b": 1, "c": 1}), (100, {"b": 1})), 77, False),
    ],
)
def test_plans_are_the_same_where_shares_in_force_and_later_stages_are(new, position, same):
    assert same_from(OLD, new, position) is same
    if same:
        assert replan(OLD, new, position) == OLD


def test_shares_that_are_drawn_alike_are_the_same():
    assert same_from(((0, {"a": 1 / 3, "b": 2 / 3}),), ((0, {"a": 1, "b": 2}),), 5)


def test_other_weights_begin_a_stage_at_the_position():
    new = ((0, {"c": 1}), (60, {"a": 1, "c": 1}), (90, {"c": 2}))
    assert replan(OLD, new, 77) == (OLD[0], OLD[1], (77, {"a": 1, "c": 1}), (90, {"c": 2}))
    assert replan(OLD, new, 50) == (OLD[0], (50, {"c": 1}), *new[1:])
    assert replan(OLD, new, 0) == new
    assert replan(OLD, new, 95) == (OLD[0], OLD[1], (95, {"c": 2}))


def test_a_later_stage_that_differs_leaves_the_block_at_the_position_alone():
    new = ((0, {"a": 3, "b": 1}), (200, {"a": 1}))
    assert replan(OLD, new, 77) == (OLD[0], OLD[1], (200, {"a": 1}))
    assert replan(OLD, new, 50) == (OLD[0], OLD[1], (200, {"a": 1}))


@settings(deadline=None, max_examples=100)
@given(old=plans, new=plans, position=st.integers(0, 80))
def test_a_changed_plan_keeps_the_past_and_follows_the_new_one_from_there(old, new, position):
    plan = replan(old, new, position)
    before, after = make_mixture(old), make_mixture(plan)
    assert stream_of(after, position) == stream_of(before, position)
    assert same_from(plan, new, position)
    assert replan(plan, new, position) == plan
    source, visit = draws(after, np.arange(200))
    for number in range(len(after.names)):
        mine = visit[source == number]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))


rows_of = st.fixed_dictionaries({name: st.integers(1, 40) for name in "abcd"})
settings_of = st.fixed_dictionaries(
    {
        "max_epochs": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "run_out": st.sampled_from(["stop", "drop"]),
    }
)


@settings(deadline=None, max_examples=100)
@given(
    plan=plans, rows=rows_of, options=settings_of, stops=st.lists(st.integers(0, 120), max_size=4)
)
def test_a_run_that_goes_on_with_the_same_settings_is_not_changed(plan, rows, options, stops):
    whole = make_mixture(plan, rows, **options)
    now = whole
    for position in sorted(min(stop, whole.end or stop) for stop in stops):
        now = resume(now.plan, plan, position, rows, **options)
        assert same_from(whole.plan, now.plan, position)
    assert now.plan == whole.plan
    assert now.end == whole.end
    assert stream_of(now, 300) == stream_of(whole, 300)


@settings(deadline=None, max_examples=100)
@given(
    old=plans, new=plans, rows=rows_of, first=settings_of, second=settings_of,
    position=st.integers(0, 120), later=st.integers(0, 60),
)  # fmt: skip
def test_a_run_with_other_limits_and_weights_keeps_its_past(
    old, new, rows, first, second, position, later
):
    before = make_mixture(old, rows, **first)
    position = min(position, before.end or position)
    kept = {name: rows[name] for _, table in new for name in table}  # others are gone
    after = resume(before.plan, new, position, kept, **second)
    assert stream_of(after, position) == stream_of(before, position)
    source, visit = draws(after, np.arange(min(300, after.end or 300)))
    for number, name in enumerate(after.names):
        mine = visit[source == number]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))
        drawn = int(visits_before(after, position)[number])
        if second["max_epochs"] and name in kept:
            limit = max(1, math.floor(second["max_epochs"] * kept[name]))
            assert len(mine) <= max(limit, drawn)
    # Going on once more from there changes nothing.
    later = min(position + later, after.end or position + later)
    again = resume(after.plan, new, later, kept, **second)
    assert again.plan == after.plan
    assert again.end == after.end


def test_a_run_goes_on_unchanged_between_the_last_draw_and_the_next_one_of_a_source():
    plan, rows = ((0, {"a": 1, "b": 3}),), {"a": 5, "b": 1000}
    whole = make_mixture(plan, rows, max_epochs=1, run_out="drop")
    last, dropped = ends(whole)["a"], whole.stages[1].start
    assert last + 2 < dropped
    for position in range(last - 1, dropped + 2):
        now = resume(whole.plan, plan, position, rows, max_epochs=1, run_out="drop")
        assert now.plan == whole.plan


def test_a_lower_limit_leaves_a_stage_alone_that_names_a_source_it_has_not_drawn_yet():
    plan = ((0, {"a": 1}), (10, {"a": 1, "b": 2, "c": 5}))
    rows = {"a": 10, "b": 1000, "c": 1000}
    # The stage begins c b c c c a; without a it would begin c c b c c.
    before = make_mixture(plan)
    assert stream_of(before, 16)[10:] == list("cbccca")
    after = resume(plan, plan, 13, rows, max_epochs=1, run_out="drop")
    assert stream_of(after, 15) == stream_of(before, 15)
    assert after.plan[:3] == (*plan, (15, {"b": 2, "c": 5}))


def test_a_higher_limit_lets_a_run_go_on_that_had_ended():
    rows = {"a": 10, "b": 10}
    plan = ((0, {"a": 1, "b": 1}),)
    first = make_mixture(plan, rows, max_epochs=1)
    assert first.end == 20
    second = resume(first.plan, plan, 20, rows, max_epochs=3)
    assert second.end == 60
    assert second.plan == first.plan


def test_a_source_that_was_dropped_comes_back_with_a_higher_limit():
    rows = {"a": 4, "b": 1000}
    plan = ((0, {"a": 1, "b": 1}),)
    first = make_mixture(plan, rows, max_epochs=1, run_out="drop")
    position = first.stages[1].start + 10
    second = resume(first.plan, plan, position, rows, max_epochs=2, run_out="drop")
    assert second.plan[:3] == (*first.plan, (position, {"a": 1, "b": 1}))
    assert visits_before(second, second.end).tolist() == [8, 2000]


def test_a_limit_below_what_was_drawn_ends_the_run_at_the_next_draw():
    plan = ((0, {"a": 3, "b": 1}),)
    first = make_mixture(plan)
    second = resume(first.plan, plan, 40, {"a": 1000, "b": 5}, max_epochs=1)
    assert 40 <= second.end < 44
    assert visits_before(second, second.end)[1] == 10


# What is refused.


@pytest.mark.parametrize("weight", [0, 0.0, -1, math.nan, math.inf, -math.inf, True, "0.5", None])
def test_a_weight_that_is_not_a_positive_number_is_refused_by_name(weight):
    with pytest.raises(ConfigError, match="^data.store: weight of 'bad' is ") as caught:
        make_mixture(((0, {"good": 1.0, "bad": weight}),))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError, match=r"^data.stages\['70'\]: weight of 'bad' is "):
        make_mixture(((0, {"good": 1.0}), (70, {"bad": weight})))


def test_a_table_of_zeros_is_refused_with_a_line_for_each():
    with pytest.raises(ConfigError) as caught:
        make_mixture(((0, {"a": 0, "b": 0.0}),))
    assert [line.split(" is ")[0] for line in caught.value.problems] == [
        "data.store: weight of 'a'",
        "data.store: weight of 'b'",
    ]


@pytest.mark.parametrize("where, start", [("data.store", 0), (r"data.stages\['70'\]", 70)])
def test_a_source_that_could_never_be_drawn_is_refused_by_name(where, start):
    plan = ((0, {"common": 1.0, "rare": 1e-9}),)
    if start:
        plan = ((0, {"common": 1.0}), (start, plan[0][1]))
    with pytest.raises(
        ConfigError, match=f"^{where}: .*'rare' is a share of 1e-09, never drawn"
    ) as caught:
        make_mixture(plan)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("plan", [(), ((0, {}),), ((0, {"a": 1}), (5, {}))])
def test_an_empty_table_is_refused(plan):
    with pytest.raises(ConfigError, match="is empty"):
        make_mixture(plan)


@pytest.mark.parametrize("starts", [(1,), (0, 0), (0, 5, 5), (0, 5, 4), (0, -3), (0, 2**62)])
def test_stages_that_do_not_rise_from_0_are_refused(starts):
    with pytest.raises(ConfigError, match="^data.stages: stages start at rows"):
        make_mixture(tuple((start, {"a": 1}) for start in starts))


@pytest.mark.parametrize("passes", [-1, -0.5, math.nan, math.inf])
def test_passes_that_are_no_count_are_refused(passes):
    with pytest.raises(ConfigError, match="^data.max_epochs: "):
        make_mixture(((0, {"a": 1}),), {"a": 5}, max_epochs=passes)
