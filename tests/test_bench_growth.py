"""How steps grow: the sizes that are taken, what is found and said, and its chart."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import jax
import pytest
from PIL import Image

from jaxgpt import cli
from jaxgpt.bench import chart, growth, step
from jaxgpt.bench.chart import Line, Panel
from jaxgpt.errors import ConfigError, HangError, JaxgptError
from jaxgpt.model import gpt
from jaxgpt.model import params as parameters
from jaxgpt.runtime import devices as starting

TINY = (
    "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.seq_len=16",
    "model.vocab_size=32", "train.global_batch=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Run the command over two numbers of simulated devices."""
    path = tmp_path_factory.mktemp("growth") / "growth.png"
    words = ["bench", "growth", "--json", "--axis=devices", "--points=2", "--dtype=f32"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*words, "--steps=2", "--warm-up=1", f"--out={path}", *TINY]) == 0
    return json.loads(printed.getvalue()), path


def test_simulated_devices_have_the_same_rows_each_and_share_the_cores(command):
    (axis,) = command[0]["axes"]
    one, two = axis["points"]
    assert (axis["axis"], one["size"], two["size"]) == ("devices", 1, 2)
    assert two["flops"] == 2 * one["flops"]
    assert two["update_bytes"] == 2 * one["update_bytes"]
    assert axis["growth"] == two["seconds_median"] / one["seconds_median"]


def test_the_command_draws_what_it_measured(command):
    with Image.open(command[1]) as image:
        assert (image.format, image.size) == ("PNG", (chart.WIDTH, chart.HEIGHT))
        assert len(image.getcolors(1 << 20)) > 10  # lines and words, not an empty page


def test_the_process_that_measures_answers_for_each_size(monkeypatch, capsys):
    asked = []

    def measured(cfg, *, steps, warm_up, least_seconds, say, devices, check):
        asked.append((steps, warm_up, len(devices)))
        assert least_seconds >= 1  # else a pause of the machine is most of what is timed
        assert not check  # of a dozen small models, each twice
        tokens = cfg.train.global_batch * cfg.model.seq_len
        count = {"parameters": parameters.count(parameters.specs(cfg.model)), "repeats": steps}
        rates = {"seconds_median": 0.5, "spread": 0.0, "tokens_per_sec_median": 2.0 * tokens}
        share = {"mfu": 0.5, "peak_flops": 1e9, "tokens_per_step": tokens}
        return rates | count | share | {"flops_per_token": gpt.flops_per_token(cfg.model, True)}

    monkeypatch.setattr(growth, "prepare_environment", lambda argv: None)
    monkeypatch.setattr(starting, "start_jax", lambda cfg: None)
    monkeypatch.setattr(step, "measure", measured)
    axis = {"dtype": "f32", "words": TINY, "axis": "batch", "points": 2}
    some = {"dtype": "f32", "words": TINY, "axis": "devices", "devices": 2}
    many = some | {"devices": 2 * jax.device_count()}
    request = {"cases": [axis, some, many], "steps": 5, "warm_up": 3}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    assert growth.main() == 0
    small, large, two, absent = map(json.loads, capsys.readouterr().out.splitlines())
    assert asked == [(5, 3, 1), (5, 3, 1), (5, 3, 2)]
    assert absent == {"axis": "devices", "left_out": many["devices"]}
    assert (small["size"], large["size"], two["size"]) == (2, 4, 2)
    # 6 for each weight of a product (norms are counted with them), 12 N H T / 2 for attention.
    weights = 12 * 16**2 + 32 * 16 + 3 * 16
    assert small["flops"] == (6 * weights + 12 * 16 * 16 / 2) * 2 * 16
    assert large["flops"] == two["flops"] == 2 * small["flops"]
    # Positions, too, are read as weight, gradient and two moments, and written but for the
    # gradient, in 4 bytes; by each of the devices that share this machine.
    assert small["update_bytes"] == large["update_bytes"] == 7 * 4 * (weights + 16 * 16)
    assert two["update_bytes"] == 2 * small["update_bytes"]


@pytest.mark.parametrize(
    ("axis", "field", "value"),
    [
        ("depth", "num_layers", 4), ("width", "embed_dim", 64), ("width", "num_heads", 8),
        ("context", "seq_len", 64),
    ],
)  # fmt: skip
def test_a_size_is_grown_alone(axis, field, value):
    base = growth.load("f32", TINY, "cpu")
    grown = growth.scaled(base, axis, 4)
    assert getattr(grown.model, field) == value
    assert grown.train == base.train
    assert grown.model.head_width == base.model.head_width


@pytest.mark.parametrize("axis", ["batch", "devices"])
def test_rows_grow_with_batch_and_devices(axis):
    base = growth.load("f32", [*TINY, "train.micro_batch=1"], "cpu")
    grown = growth.scaled(base, axis, 4)
    assert (grown.train.global_batch, grown.train.micro_rows) == (8, 4)
    assert grown.model == base.model


def test_what_is_given_beside_the_width_grows_with_it():
    base = growth.load("f32", [*TINY, "model.mlp_dim=40", "model.num_kv_heads=1"], "cpu")
    grown = growth.scaled(base, "width", 2).model
    assert (grown.mlp_dim, grown.kv_heads, grown.num_heads) == (80, 2, 4)


def at(size: int, seconds: float, flops: float, **more) -> dict:
    point = {
        "axis": "depth", "platform": "cpu", "size": size, "seconds_median": seconds, "spread": 0.0,
        "flops": flops, "update_bytes": 28e6, "mfu": 0.05,
    }  # fmt: skip
    return point | more


@pytest.mark.parametrize(
    ("last", "ratio", "near"), [(4.3, 1.075, True), (4.5, 1.125, False), (3.5, 0.875, False)]
)
def test_growth_is_near_that_of_flops_within_a_tenth(last, ratio, near):
    found = growth.of_axis("depth", [at(2, 1.0, 1e9), at(4, 2.0, 2e9), at(8, last, 4e9)])
    assert (found["growth"], found["growth_by_flops"]) == (last, 4.0)
    assert found["ratio"] == pytest.approx(ratio)
    assert found["within_10_percent"] is near
    assert ("within 10 %" in found["verdict"]) is near


def test_steps_that_are_too_small_are_told_with_their_fixed_costs():
    # 2 ms + 1 ms per GFLOP
    points = [at(1, 0.003, 1e9), at(4, 0.006, 4e9)]
    assert "2.00 of its 3.00 ms are fixed costs" in growth.of_axis("depth", points)["verdict"]
    said = growth.of_axis("batch", points)["verdict"]
    assert "the update moves 28.0 MB at any batch" in said


def test_devices_that_share_a_machine_are_told_apart_from_real_ones():
    points = [at(1, 1.0, 1e9), at(2, 3.0, 2e9, update_bytes=56e6)]
    said = growth.of_axis("devices", points)["verdict"]
    assert "share the cores and one memory bandwidth" in said and "56.0 MB in place of 28.0" in said
    real = [at(1, 1.0, 1e9, platform="gpu"), at(2, 1.5, 1e9, platform="gpu")]
    said = growth.of_axis("devices", real)["verdict"]
    assert "4.0 MB of gradients are summed" in said  # 28 bytes of update, 4 of gradient


def test_a_difference_within_the_spread_is_no_finding():
    points = [at(1, 1.0, 1e9, spread=0.2), at(2, 2.5, 2e9, spread=0.1)]
    assert "the same step varied by 30%" in growth.of_axis("depth", points)["verdict"]


def test_the_same_step_says_how_busy_the_machine_was():
    bases = [at(1, 1.0, 1e9), at(1, 1.5, 1e9), at(1, 1.2, 1e9)]
    assert growth.variation(bases) == 0.5
    assert growth.variation([]) == 0.0
    points = [at(1, 1.0, 1e9), at(2, 2.0, 2e9)]
    busy = growth.of_axis("depth", points, 0.5)["verdict"]
    assert "no finding, as the same step varied by 50%" in busy
    assert "no finding" not in growth.of_axis("depth", points, 0.05)["verdict"]
    far = [at(1, 1.0, 1e9), at(2, 8.0, 2e9)]  # four times as long as by FLOPs
    assert "no finding" not in growth.of_axis("depth", far, 0.5)["verdict"]


def test_one_device_is_nothing_to_compare():
    found = growth.of_axis("devices", [at(1, 1.0, 1e9), {"axis": "devices", "left_out": 2}])
    assert found["ratio"] is None and "only one device" in found["verdict"]
    assert growth.panels([found]) == []


def test_a_step_that_fails_is_one_line(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "Traceback\nRESOURCE_EXHAUSTED: 9 GB\n")
    monkeypatch.setattr(growth.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(JaxgptError, match=r"a step on 4 device\(s\) failed: RESOURCE_EXHAUSTED"):
        growth.child({}, 4, print)


def test_a_step_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(growth, "LIMIT", 0.01)
    with pytest.raises(HangError, match=r"steps on 1 device\(s\) took more than 0.01 s"):
        growth.child({"cases": []}, 1, print)


def test_a_wrong_base_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(growth, "child", None)
    counts = {"axes": ["depth"], "points": 2, "steps": 1, "warm_up": 1, "say": print}
    with pytest.raises(ConfigError, match="model.num_heads"):
        growth.measure("f32", [*TINY, "model.num_heads=3"], **counts)


# The chart.


def test_the_axes_of_a_chart_are_logarithmic():
    assert chart.position(10, 1, 100) == pytest.approx(0.5)
    low, high = chart.limits([1, 10, 100])
    assert (low, high) == pytest.approx((10**-0.2, 10**2.2))
    flat, top = chart.limits([5, 5])
    assert flat < 5 < top


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00123, "0.00123"), (12, "12"), (512, "512"), (16384, "16.4k"), (2.5e6, "2.5M")],
)
def test_numbers_on_an_axis_are_short(value, text):
    assert chart.short(value) == text


def test_a_point_is_drawn_where_it_belongs(tmp_path):
    path = tmp_path / "a.png"
    chart.draw([Panel("t", "x", "y", (Line("", ((1, 1), (10, 10), (100, 100))),))], path)
    x = chart.LEFT + (chart.WIDTH - chart.LEFT - chart.RIGHT) // 2
    y = chart.TOP + (chart.HEIGHT - chart.TOP - chart.BOTTOM) // 2
    with Image.open(path) as image:
        red, green, blue = image.convert("RGB").getpixel((x, y))
    assert blue > 150 > green > red  # the first colour, #0072b2


@pytest.mark.parametrize("name", ["growth.jpg", "nowhere/growth.png"])
def test_a_chart_that_cannot_be_written_is_refused_at_once(tmp_path, name):
    with pytest.raises(ConfigError, match="growth"):
        chart.check(tmp_path / name)


def test_a_machine_without_pillow_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        chart.check(tmp_path / "growth.png")
