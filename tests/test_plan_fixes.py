"""What would make a plan fit: changes save and cost what they say, alone or together."""

from __future__ import annotations

import pytest

from jaxgpt import config
from jaxgpt.planning import fixes, search
from jaxgpt.planning.hardware import parse

LLAMA_8B = config.load("configs/llama3_8b.toml")


def test_fixes_save_what_they_say_and_cost_what_they_say():
    target = parse("h100x8")
    start = search.evaluate(LLAMA_8B, target)
    assert not start.fits
    found = fixes.fixes(start)
    assert len(found) == 3 and len({fix.kind for fix in found}) > 1
    for fix in found:
        if fix.cfg is not None:
            after = search.evaluate(fix.cfg, target)
            assert start.memory.device - after.memory.device == fix.saved > 0
            assert after.bound.seconds - start.bound.seconds == fix.seconds
            assert after.fits == fix.fits
    assert found[0].fits


def test_the_cheapest_fix_of_a_little_too_much_is_free():
    # Smaller micro-batches exchange more, but NVLink has time to spare.
    start = search.evaluate(LLAMA_8B, parse("h100x8"))
    (first, *_) = fixes.fixes(start)
    assert first.change == "train.micro_batch = 64 (now 256)" and first.seconds == 0


def test_changes_together_are_proposed_where_none_is_enough_alone():
    cfg, target = config.load("configs/llama3_70b.toml"), parse("v5e-256")
    start = search.evaluate(cfg, target)
    first, *others = fixes.fixes(start)
    assert not start.fits and first.fits and "; and " in first.change
    for fix in (fix for fix in (first, *others) if fix.cfg is not None):
        after = search.evaluate(fix.cfg, target)
        assert after.fits == fix.fits
        assert start.memory.device - after.memory.device == fix.saved
        assert after.bound.seconds - start.bound.seconds == pytest.approx(fix.seconds)


def test_moments_in_bfloat16_are_a_fix_where_the_state_is_too_big():
    cfg = config.with_values(LLAMA_8B, "test", train={"micro_batch": 8})
    start = search.evaluate(cfg, parse("v5e-8"))
    changes = {fix.change: fix for fix in fixes.fixes(start, limit=20)}
    fix = changes['optim.moment_dtype = "bfloat16"']
    assert fix.saved == pytest.approx(4 * 8_030_261_248 / 8, rel=1e-3)
