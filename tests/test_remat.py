"""What the backward pass of a block keeps is chosen by name, and changes no value."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # what print_saved_residuals prints
from tiny import TINY, random_params

from jaxgpt.model import gpt, remat
from jaxgpt.model.shards import Whole
from jaxgpt.validation import SAVED

GATED = dataclasses.replace(TINY, mlp="swiglu", num_layers=2)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 16)).astype(np.int32)
D, F, N, H = TINY.embed_dim, TINY.mlp_width, TINY.num_heads, TINY.head_width
SHAPES = {
    "q": (2, 16, N, H), "k": (2, 16, N, H), "v": (2, 16, N, H), "attn": (2, 16, N, H),
    "attn_out": (2, 16, D), "gate": (2, 16, F), "up": (2, 16, F), "mlp_out": (2, 16, D),
}  # fmt: skip


def loss(cfg, params):
    return jnp.square(gpt.hidden(cfg, params, TOKENS)).sum()


def saved(cfg) -> list[str]:
    """Return how what is kept for the backward pass is described, arguments left out."""
    found = saved_residuals(functools.partial(loss, cfg), random_params(cfg))
    return [f"{shape.str_short()} {why}" for shape, why in found if "argument" not in why]


@pytest.mark.parametrize("name", SAVED)
def test_a_named_tensor_of_each_block_is_kept(name):
    # Only the norm after an MLP, in sandwich placement, has a use for what the MLP returns.
    full = dataclasses.replace(GATED, remat="full", norm_placement="sandwich")
    more = dataclasses.replace(full, remat_save=(name,))
    named = [line for line in saved(more) if f"named '{name}'" in line]
    shape = ",".join(map(str, SHAPES[name]))
    assert len(named) == 2 and all(line.startswith(f"float32[{shape}]") for line in named)
    assert not any("named" in line for line in saved(full))


def test_as_wide_as_the_mlp_only_bfloat16_is_kept():
    for platform in ("cpu", "gpu", "tpu"):
        options = {"dtype": "bfloat16", "impl": "blocks", "shards": Whole(platform)}
        bf16 = lambda params, o=options: gpt.hidden(GATED, params, TOKENS, **o)  # noqa: E731
        found = saved_residuals(bf16, random_params(GATED))
        assert {str(shape.dtype) for shape, _ in found if shape.shape == (2, 16, F)} == {"bfloat16"}


@pytest.mark.parametrize("stacked", [False, True])
def test_gradients_do_not_depend_on_what_is_kept(stacked):
    plain = dataclasses.replace(GATED, stacked=stacked)
    params = random_params(plain)
    right = jax.jit(jax.grad(functools.partial(loss, plain)))(params)
    for save in ((), ("q", "attn", "up"), SAVED):
        cfg = dataclasses.replace(plain, remat="full", remat_save=save)
        found = jax.jit(jax.grad(functools.partial(loss, cfg)))(params)
        for mine, other in zip(*map(jax.tree.leaves, (found, right)), strict=True):
            assert np.linalg.norm(mine - other) < 1e-6 * np.linalg.norm(other)


def test_a_cpu_keeps_what_would_be_moved_to_the_host():
    cfg = dataclasses.replace(GATED, remat="full", remat_offload=("block_in", "attn"))
    kept = [line for line in saved(cfg) if "named 'attn'" in line]
    assert len(kept) == 2


def test_an_accelerator_moves_the_named_tensors_to_the_host():
    cfg = dataclasses.replace(GATED, remat="full", remat_save=("q",), remat_offload=("attn",))
    keep = remat.policy(cfg, "tpu")
    name = lambda x: remat.named(x, "attn")  # noqa: E731
    (eqn,) = jax.make_jaxpr(name)(1.0).eqns
    moved = keep(eqn.primitive, **eqn.params)
    assert (moved.src, moved.dst) == ("device", "pinned_host")
    assert remat.policy(dataclasses.replace(GATED, remat="full"), "tpu") is None
