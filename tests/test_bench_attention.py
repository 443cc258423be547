"""`bench attention`: the figures are what they say, of the work that was asked for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.bench import attention
from jaxgpt.errors import ConfigError
from jaxgpt.model import attention as model_attention

B, T, N, K, H, WINDOW, DOCUMENTS = 2, 24, 4, 2, 8, 5, 3


@pytest.fixture(scope="module")
def measured() -> dict:
    """Tiny attention; `calls` are the (implementation, window, segments) it was done with."""
    calls, attend = set(), model_attention.attend

    def recorded(*arrays, **options):
        ids = options["segment_ids"]
        calls.add((options["impl"], options["window"], None if ids is None else ids.shape))
        return attend(*arrays, **options)

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_attention, "attend", recorded)
        found = attention.measure(
            rows=B, context=T, heads=N, kv_heads=K, head_dim=H, dtype="float32",
            documents=DOCUMENTS, window=WINDOW, repeats=3, warm_up=1, say=lines.append,
        )  # fmt: skip
    return found | {"calls": calls, "lines": lines}


def test_every_implementation_that_a_cpu_can_run_is_measured(measured):
    names = [found["implementation"] for found in measured["implementations"]]
    assert names == ["blocks", "dot_product"]


def test_for_the_others_is_said_what_they_need(measured):
    assert any("'splash': a TPU is needed" in line for line in measured["lines"])
    assert any("'cudnn': an NVIDIA GPU is needed" in line for line in measured["lines"])


def test_what_is_measured_is_what_was_asked_for(measured):
    both = {(name, WINDOW, (B, T)) for name in ("blocks", "dot_product")}
    assert measured["calls"] == both


def test_the_figures_above_are_those_of_the_implementation_that_training_takes(measured):
    chosen = measured["implementations"][0]
    assert chosen == {name: measured[name] for name in chosen}


def test_implementations_agree_on_output_and_gradients(measured):
    other = measured["implementations"][1]
    assert 0 < other["deviation"] < 1e-5  # of float32; the same bits would be the same program


def test_utilisation_is_the_rate_times_the_operations_over_the_peak(measured):
    for found in measured["implementations"]:
        for part in ("", "forward_"):
            rate = B * T / found[f"{part}seconds_median"] / measured["peak_flops"]
            full = rate * measured[f"{part}flops_per_token_full"]
            causal = rate * measured[f"{part}flops_per_token"]
            assert found[f"{part}mfu_full"] == pytest.approx(full, abs=1e-4)
            assert found[f"{part}mfu"] == pytest.approx(causal, abs=1e-4)


def test_tokens_per_second_are_those_of_all_rows(measured):
    assert measured["tokens_per_sec_median"] == pytest.approx(
        B * T / measured["seconds_median"], 1e-3
    )


def test_each_program_says_its_memory_and_compile_time(measured):
    for found in measured["implementations"]:
        for part in ("", "forward_"):
            assert found[f"{part}temporary_bytes"] > 0
            assert found[f"{part}compile_seconds"] > 0


def test_gradients_take_more_memory_than_the_forward_pass(measured):
    assert measured["temporary_bytes"] > measured["forward_temporary_bytes"]


def test_operations_forward_are_two_products_with_each_key():
    # 2 products, 2 operations, N H numbers, T keys.
    assert attention.flops(2, N, H, T, 0, causal=False) == 2 * 2 * N * H * T


def test_a_causal_mask_leaves_half():
    full = attention.flops(6, N, H, T, 0, causal=False)
    assert attention.flops(6, N, H, T, 0, causal=True) == full / 2


def test_a_window_counts_its_keys_and_on_average_those_before_the_first_row_is_full():
    assert attention.flops(6, N, H, T, WINDOW, causal=False) == 12 * N * H * WINDOW
    # w - w^2 / 2T, as in PaLM's appendix B.
    keys = WINDOW - WINDOW**2 / (2 * T)
    assert attention.flops(6, N, H, T, WINDOW, causal=True) == 12 * N * H * keys


def test_the_operations_of_training_are_six_products(measured):
    assert measured["flops_per_token_full"] == 3 * measured["forward_flops_per_token_full"]
    assert measured["flops_per_token_full"] == 12 * N * H * WINDOW


def test_rows_have_as_many_documents_as_asked_for():
    ids = attention.random_segments(5, 40, 7)
    assert ids.shape == (5, 40)
    for row in ids:
        assert sorted(set(row.tolist())) == list(range(7))
        assert (np.diff(row) >= 0).all()


def test_a_row_can_be_documents_of_one_token():
    np.testing.assert_array_equal(attention.random_segments(1, 4, 4), [[0, 1, 2, 3]])


@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_the_visible_share_is_that_of_the_pairs(window):
    ids = attention.random_segments(3, 20, 4)
    distance = np.arange(20)[:, None] - np.arange(20)
    seen = (distance >= 0) & (distance < (window or 20))
    inside = seen & (ids[:, :, None] == ids[:, None])
    share = inside.sum() / (3 * seen.sum())
    assert attention.visible_share(ids, 20, window) == round(float(share), 4)


def test_without_documents_all_is_visible():
    assert attention.visible_share(None, 20, 0) == 1.0


def test_the_second_pass_returns_the_gradients_of_a_function():
    both = attention.with_gradients(lambda q, k, v: q * k + v)
    q, k, v, grad = (jnp.float32(x) for x in (2, 3, 5, 7))
    assert [float(x) for x in both(q, k, v, grad)] == [11.0, 21.0, 14.0, 7.0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 3}, "--kv-heads 3: does not divide --heads 4"),
        ({"documents": 25}, "--documents 25: must be at most --context 24"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, message):
    given = {"rows": B, "context": T, "heads": N, "kv_heads": K, "head_dim": H, "dtype": "float32"}
    with pytest.raises(ConfigError, match=message):
        attention.measure(**given | sizes)
