"""What a compiled step exchanges beside what its layout implies, by hand arithmetic."""

from __future__ import annotations

import pytest

from jaxgpt import config
from jaxgpt.planning import exchanged
from jaxgpt.planning.collectives import Collective
from jaxgpt.planning.hardware import parse
from jaxgpt.planning.layout import Layout, layout
from jaxgpt.planning.roofline import bound

LLAMA = config.load("configs/llama3_8b.toml")


def on(target: str, **mesh: int) -> Layout:
    return layout(config.with_values(LLAMA, "test", mesh={"data": 1, **mesh}), parse(target))


def one(kind: str, axes: tuple[str, ...], sent: int, *, overlapped: bool = True) -> Collective:
    return Collective("x", kind, axes, False, 8, "bf16", (sent,), sent, sent, 1, overlapped, "")


def test_bytes_over_two_axes_are_shared_as_gathers_one_after_the_other_would():
    # Of n bytes over fsdp 8 and tensor 4, n 31/32 are sent: n 3/4 over tensor, n/4 7/8 over fsdp.
    at = on("v5p-64", fsdp=8, tensor=4)
    found = exchanged.exchanges(at, [one("all-gather", ("fsdp", "tensor"), 31 * 10**6)])
    sent = {t.axis: t.bytes for t in found}
    assert sent == pytest.approx({"tensor": 24e6, "fsdp": 7e6})


def test_between_hosts_an_exchange_takes_the_network():
    at = on("h100x64", fsdp=64)
    found = exchanged.exchanges(at, [one("reduce-scatter", ("fsdp",), 63 * 10**6)])
    # 8 hosts of 8: 7/8 within a host at 450 GB/s, 1/8 x 7/8 between them at 50 GB/s.
    assert {t.link: (t.bytes, t.seconds) for t in found} == {
        "NVLink": pytest.approx((56e6, 56e6 / 450e9)),
        "network": pytest.approx((7e6, 7e6 / 50e9)),
    }


def test_only_what_has_other_work_beside_it_can_hide():
    at = on("h100x8", fsdp=8)
    analytic = bound(at)
    found = [
        one("all-gather", ("fsdp",), 45 * 10**9),
        one("all-gather", ("fsdp",), 90 * 10**9, overlapped=False),
    ]
    least = exchanged.as_compiled(at, analytic, found)
    assert least.exposed == pytest.approx(90 / 450)
    assert least.links == {"NVLink": pytest.approx(45 / 450)}
    assert least.seconds == pytest.approx(analytic.seconds + 0.2)  # products take longer than 0.1 s
    (row,) = exchanged.by_axis(at, analytic, found)
    assert (row.compiled, row.open_bytes) == (pytest.approx(135e9), pytest.approx(90e9))
    assert row.open_seconds == pytest.approx(0.2)
    assert row.kinds == {"all-gather": (2, pytest.approx(135e9))}


def test_a_ring_in_pieces_uses_all_links_of_its_axis():
    at = on("v6e-256", fsdp=16, tensor=16)
    (t,) = exchanged.exchanges(at, [one("collective-permute", ("fsdp",), 18 * 10**6)])
    assert t.seconds == pytest.approx(18e6 / (2 * 90e9))  # a ring of 16, both ways


@pytest.mark.parametrize(
    ("times", "others", "found"),
    # More than 1.5 times what is expected, and more than 1 % of all bytes.
    [(1.4, 0, 0), (1.6, 0, 1), (1.6, 100, 0)],
)
def test_far_more_than_the_layout_implies_is_a_finding(times, others, found):
    rows = [
        exchanged.Row("fsdp", 10e9, 10e9 * times, 0, 0, {}),
        exchanged.Row("data", 10e9 * others, 10e9 * others, 0, 0, {}),
    ]
    lines = exchanged.findings(rows)
    assert len(lines) == found
    assert all("over fsdp: 16.00 GB" in line and "1.6 times" in line for line in lines)


def test_an_exchange_over_an_axis_that_should_have_none_is_a_finding():
    (line,) = exchanged.findings([exchanged.Row("context", 0, 2e9, 0, 0, {})])
    assert line.startswith("over context: 2.00 GB sent in a step, though the layout implies no")


def test_every_axis_is_in_the_table_also_where_the_compiled_step_sends_nothing():
    at = on("h100x8", fsdp=4, tensor=2)
    rows = exchanged.by_axis(at, bound(at), [one("all-gather", ("fsdp",), 10**9)])
    assert {row.axis: row.compiled > 0 for row in rows} == {"fsdp": True, "tensor": False}
