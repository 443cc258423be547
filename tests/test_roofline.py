"""Bounds of a step against hand arithmetic and published figures."""

from __future__ import annotations

import math

import pytest

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.model.gpt import flops_per_token
from jaxgpt.planning.hardware import parse
from jaxgpt.planning.layout import layout
from jaxgpt.planning.roofline import (
    Bound,
    bound,
    bubble_share,
    recomputed,
    run,
    saving,
    update_bytes,
)

GPT2 = config.load("configs/gpt2_124m.toml")
LLAMA = config.load("configs/llama3_8b.toml")


def on(cfg: Config, target: str, **sections: dict) -> tuple[object, Bound]:
    at = layout(config.with_values(cfg, "test", **sections), parse(target))
    return at, bound(at)


def test_flops_of_gpt2_small_are_the_published_ones():
    # 12 layers, 768, 50,257 ids, 1,024 tokens, tied head.
    assert flops_per_token(GPT2.model, causal=False) == 855_166_464
    assert flops_per_token(GPT2.model, causal=True) == 798_543_360


def test_the_products_of_a_step_take_their_flops_over_the_peak():
    at, found = on(GPT2, "h100x8", model={"remat": "none"})
    tokens = 512 * 1024
    assert found.flops == tokens * 798_543_360
    assert found.compute == pytest.approx(tokens * 798_543_360 / (8 * 989e12))
    # Flash attention multiplies queries and keys once more: 2 D T / 2 per layer and token.
    assert recomputed(at, causal=True) == 12 * 2 * 768 * 512


def test_full_recomputation_of_llama_3_8b_is_the_forward_pass_of_its_blocks_without_w_down():
    at, _ = on(LLAMA, "v5p-128")
    D, F, KH, T = 4096, 14336, 1024, 8192
    products = 2 * D * (2 * D + 2 * KH + 2 * F)
    attention = 4 * D * T / 2 + 2 * D * T / 2
    assert recomputed(at, causal=True) == 32 * (products + attention)


def test_saved_tensors_are_not_computed_again():
    at, _ = on(LLAMA, "v5p-128", model={"remat_save": ("gate", "attn")})
    whole, _ = on(LLAMA, "v5p-128")
    D, F, T = 4096, 14336, 8192
    saved = recomputed(whole, causal=True) - recomputed(at, causal=True)
    assert saved == 32 * (2 * D * F + 4 * D * T / 2)


def test_adamw_moves_28_bytes_a_weight():
    at, found = on(GPT2, "h200x1", train={"micro_batch": 32})
    assert update_bytes(at) == pytest.approx(28 * 124_439_808, rel=1e-6)
    # Published arithmetic: 0.73 ms on an H200 of 4.8 TB/s.
    assert found.update == pytest.approx(0.726e-3, rel=1e-2)


# Llama 3 8B over n devices of fsdp, in A micro-batches.
D, F, V = 4096, 14336, 128_256
BLOCKS = 32 * (2 * D * D + 2 * D * 1024 + 3 * D * F)


def sent_over(found: Bound, axis: str) -> dict[str, float]:
    sent: dict[str, float] = {}
    for t in found.transfers:
        if t.axis == axis:
            sent[t.what] = sent.get(t.what, 0) + t.bytes
    return sent


def test_fsdp_gathers_twice_scatters_once_and_looks_up_tokens():
    at, found = on(LLAMA, "v5p-64")
    n, A = 32, 2
    # The embedding is not gathered: its rows are brought, and their gradients taken back.
    weights = A * 2 * (2 * BLOCKS + V * D) * (n - 1) / n
    gradients = A * (2 * BLOCKS + 4 * V * D) * (n - 1) / n
    gradients += A * 2 * (2 * 64 * D + 4 * D) * (n - 1) / n  # norms are whole: an all-reduce
    rows = 2 * A * at.tokens * D * 2 * (n - 1) / n
    assert sent_over(found, "fsdp") == pytest.approx(
        {"weights": weights, "gradients": gradients, "looked-up embeddings": rows}
    )
    # Three lines of 2x4x4 chips, each one link of 90 GB/s; all of it can overlap.
    seconds = sum(t.seconds for t in found.transfers if t.what != "looked-up embeddings")
    assert seconds == pytest.approx((weights + gradients) / 270e9, rel=1e-3)
    assert found.exposed == 0


def test_a_tied_embedding_is_gathered_for_the_head_and_looked_up_as_well():
    at, found = on(config.load("configs/llama3_1b.toml"), "v5p-16", mesh={"data": 1, "fsdp": 8})
    m = at.cfg.model
    sent = sent_over(found, "fsdp")
    block = m.embed_dim * (2 * m.embed_dim + 2 * 512 + 3 * m.mlp_dim)
    whole = 2 * (2 * m.num_layers * block + m.vocab_size * m.embed_dim)
    assert sent["weights"] == at.accum * whole * 7 / 8
    assert sent["looked-up embeddings"] == 2 * at.accum * at.tokens * m.embed_dim * 2 * 7 / 8


def test_over_a_whole_torus_weights_are_sums_in_the_open_and_twice_the_bytes():
    # libtpu 0.0.50: from 4x4x4 chips on; not over 2x4x4, nor over two dimensions of 4x8x8.
    _, whole = on(LLAMA, "v5p-128")
    n, A = 64, 2
    weights = A * 2 * (2 * BLOCKS + V * D) * (n - 1) / n
    assert sent_over(whole, "fsdp")["weights"] == pytest.approx(2 * weights)
    in_open = [t for t in whole.transfers if not t.overlaps]
    assert {t.what for t in in_open} == {"weights", "gradients"}
    assert sum(t.seconds for t in in_open if t.what == "weights") == pytest.approx(
        2 * weights / 540e9  # three rings, both ways
    )
    _, split = on(LLAMA, "v5p-128", mesh={"data": 4, "fsdp": 16})
    assert split.exposed == 0 and split.seconds < whole.seconds


def test_two_axes_that_gather_together_over_a_whole_torus_do_so_as_well():
    mesh = {"data": 1, "fsdp": 8, "expert": 8}
    _, found = on(config.load("configs/mixtral_8x7b.toml"), "v5p-128", mesh=mesh)
    dense = [t for t in found.transfers if t.what == "weights" and t.axis == "expert"]
    assert dense and not any(t.overlaps for t in dense)  # attention's, over both axes
    # Those of experts are gathered over fsdp alone.
    assert any(t.overlaps for t in found.transfers if t.what == "weights" and t.axis == "fsdp")


def test_between_hosts_only_a_share_of_the_weights_crosses_the_network():
    _, found = on(LLAMA, "h100x64")
    sent = {t.link: 0.0 for t in found.transfers}
    for t in found.transfers:
        if t.what == "weights":
            sent[t.link] += t.bytes
    # 8 hosts of 8: 1/8 x 7/8 over the network and 7/8 over NVLink.
    assert sent["network"] == pytest.approx(sent["NVLink"] / 8)


def test_replicas_meet_once_a_step_in_float32():
    _, found = on(GPT2, "h100x8", train={"micro_batch": 64})
    (total,) = {t.axis for t in found.transfers}
    assert total == "data"
    assert sum(t.bytes for t in found.transfers) == 2 * 4 * 124_439_808 * 7 / 8


def test_tensor_parallel_sums_are_waited_for():
    at, found = on(LLAMA, "h100x8", mesh={"data": 1, "fsdp": 1, "tensor": 8})
    per_block = [t for t in found.transfers if t.what == "sums of activations"]
    # 2 forward, 2 backward, attention's again: each twice 7/8 of [tokens, 4096] in bfloat16.
    stream = at.tokens * 4096 * 2
    assert per_block[0].bytes == 2 * 32 * 5 * 2 * stream * 7 / 8
    assert found.exposed >= per_block[0].seconds and "links of tensor" not in found.links


def test_a_pipeline_waits_for_its_share():
    mesh = {"data": 1, "fsdp": 16, "stage": 4}
    at, found = on(LLAMA, "v5p-128", mesh=mesh, train={"micro_batch": 64})
    assert bubble_share(at) == 3 / (8 + 3)
    busy = found.compute + found.recompute
    assert found.bubble / (busy + found.bubble) == pytest.approx(3 / 11)


def test_rounds_shorten_the_wait():
    mesh = {"data": 1, "fsdp": 16, "stage": 4, "rounds": 2}
    at, _ = on(LLAMA, "v5p-128", mesh=mesh, train={"micro_batch": 64})
    assert bubble_share(at) == 3 / (8 * 2 + 3)


def test_a_pipeline_gathers_the_weights_of_its_blocks_three_times_in_each_turn():
    mesh = {"data": 1, "fsdp": 2, "stage": 4, "rounds": 2}
    model, train = {"num_layers": 8}, {"micro_batch": 16, "global_batch": 128}
    cfg = config.load("configs/llama3_1b.toml")
    at, found = on(cfg, "h100x8", mesh=mesh, model=model, train=train)
    D, F, V, turns = 2048, 8192, 128_256, 8 * 2 + 3
    block = 2 * D * D + 2 * D * 512 + 3 * D * F
    assert at.ticks == turns
    # A block of a stage in each turn, bfloat16, half of it sent; the tied embedding once a step.
    assert of(found, "weights") == turns * 2 * 2 * block / 2 + 2 * V * D / 2
    # XLA's program sends 1.681 GB in its reduce-scatters.
    assert of(found, "gradients") == pytest.approx(1.6809e9, rel=1e-3)
    # Four blocks a stage and round instead of one: their inputs come from the stage's.
    at, more = on(cfg, "h100x8", mesh=mesh, model={"num_layers": 32}, train=train)
    assert of(more, "weights") == turns * 3 * 2 * 4 * block / 2 + 2 * V * D / 2


def test_a_stage_of_several_blocks_is_computed_twice_again():
    mesh, train = {"data": 1, "fsdp": 16, "stage": 4}, {"micro_batch": 64}
    one, _ = on(LLAMA, "v5p-128", train=train)
    piped, _ = on(LLAMA, "v5p-128", mesh=mesh, train=train)
    D, F, T = 4096, 14336, 8192
    forward = 2 * D * (2 * D + 2 * 1024 + 3 * F) + 4 * D * T / 2
    again = recomputed(piped, causal=True) - recomputed(one, causal=True)
    assert again == pytest.approx(32 * forward * 7 / 8)  # all but the last of eight blocks


def of(found: Bound, what: str) -> float:
    return sum(t.bytes for t in found.transfers if t.what == what and t.axis == "fsdp")


def test_a_ring_passes_keys_and_values_of_all_other_devices():
    mesh = {"data": 1, "fsdp": 16, "context": 4}
    at, found = on(LLAMA, "v5p-128", mesh=mesh)
    (ring,) = (t for t in found.transfers if t.what == "keys and values")
    pair = at.tokens * 2 * 1024 * 2
    # Once forward, again for the recomputation, twice (with gradients) backward.
    assert ring.bytes == 2 * 32 * 4 * 3 * pair and ring.overlaps


def test_tokens_travel_to_experts_and_back():
    cfg = config.load("configs/mixtral_8x7b.toml")
    mesh = {"data": 1, "fsdp": 16, "expert": 4}
    at, found = on(cfg, "h100x64", mesh=mesh)
    (moved,) = (t for t in found.transfers if t.what == "tokens to experts")
    # There and back, forward, backward, and the recomputed way there; half as much again is places
    # that stay empty when the choice is even.
    assert moved.bytes == 1.5 * 32 * 5 * 2 * at.tokens * 4096 * 2 * 3 / 4 and not moved.overlaps


def test_offloaded_tensors_go_to_the_host_and_back():
    model = {"remat_offload": ("block_in",)}
    at, found = on(LLAMA, "v6e-256", model=model, train={"micro_batch": 256})
    (moved,) = (t for t in found.transfers if t.axis == "host")
    assert moved.bytes == 2 * 2 * 32 * at.tokens * 4096 * 2
    assert moved.seconds == moved.bytes / 32e9


@pytest.mark.parametrize(
    ("name", "target", "tokens_per_second"),
    # Published tokens per second of a device, in bfloat16: AI-Hypercomputer/tpu-recipes
    # (training/trillium, training/v5p, training/ironwood), gpu-recipes (training/a3ultra),
    # torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06).
    # llm.c's 475,000 are 10.26 billion tokens in 45 minutes (KellerJordan/modded-nanogpt).
    [
        ("llama3_8b", "v6e-256", 7_207),
        ("llama3_8b", "v6e-8", 7_139),
        ("llama3_70b", "v6e-256", 960),
        ("llama3_405b", "v6e-256", 149),
        ("llama2_70b", "v5p-1024", 692),
        ("llama3_405b", "v5p-1024", 125),
        ("llama3_8b", "h100x8", 6_667),
        ("llama3_70b", "h100x256", 652),
        ("llama3_70b", "h200x256", 1_056),
        ("gpt2_124m", "h100x8", 475_000),
    ],
)
def test_no_published_run_is_faster_than_the_bound(name, target, tokens_per_second):
    at, found = on(config.load(f"configs/{name}.toml"), target, model={"remat": "none"})
    tokens = at.cfg.train.global_batch * at.cfg.model.seq_len
    ceiling = tokens / found.seconds / at.target.num_devices
    assert tokens_per_second < ceiling < 4 * tokens_per_second
    assert found.mfu < 1


@pytest.mark.parametrize(
    ("name", "target", "published"),
    # Causal count: tokens per second x FLOPs per token over the peak, as those who measured it say
    # or as follows from their rates: MaxText on v6e 40.4 % and 47.0 %, v5p 64.6 %, H200 48.0 %.
    [
        ("llama3_8b", "v6e-256", 0.404),
        ("llama3_70b", "v6e-256", 0.470),
        ("llama2_70b", "v5p-1024", 0.646),
        ("llama3_70b", "h200x256", 0.480),
    ],
)
def test_no_published_utilisation_is_above_the_ceiling(name, target, published):
    _, found = on(config.load(f"configs/{name}.toml"), target, model={"remat": "none"})
    assert published < found.mfu <= 1


@pytest.mark.parametrize(
    ("name", "causal", "flops"),
    # 417.4 TFLOP/s at 7,207 tokens/s (full square) and 1,207 at 2,687 (causal): tpu-recipes.
    [("llama3_8b", False, 417.4e12 / 7_207), ("llama3_70b", True, 1_207e12 / 2_687)],
)
def test_flops_per_token_are_those_of_published_rates(name, causal, flops):
    model = config.load(f"configs/{name}.toml").model
    assert flops_per_token(model, causal) == pytest.approx(flops, rel=0.005)


def test_a_run_is_its_steps():
    at, found = on(LLAMA, "v5p-128")
    whole = run(at, 10.0)
    assert whole.steps == math.ceil(160e9 / (512 * 8192))
    assert whole.days == whole.steps * 10 / 86_400
    assert whole.device_hours == pytest.approx(whole.steps * 10 * 64 / 3600)
    assert found.seconds > 0


def test_checkpoints_of_llama_3_8b_are_96_gb_and_their_interval_is_youngs():
    at, _ = on(LLAMA, "v5p-128")
    save = saving(at)
    assert save.bytes == pytest.approx(96.4e9, rel=1e-3)
    assert save.blocking == pytest.approx(96.4e9 / 64 / 15e9, rel=1e-3)
    between = 86_400 / (64 * 419 / 54 / 16_384)
    assert save.interval == pytest.approx(math.sqrt(2 * save.blocking * between))
