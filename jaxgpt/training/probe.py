"""Does this compiler, with the options of this run, compute right gradients? Asked before training.

A wrong kernel can leave the loss right and the gradients wrong (XLA:CPU's oneDNN matmuls did, in
float32), and such a run looks healthy for hours. So a small twin of the very model is
differentiated twice, as it will be trained and in float32 without options, and all leaves compared.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.packing import Batch
from jaxgpt.errors import NumericsError
from jaxgpt.model import params as parameters
from jaxgpt.parallel.xla_options import compile_with, of_dtype, preset, trusted
from jaxgpt.training.comparison import HASTY, leaf_errors, named_leaves, random_documents, share
from jaxgpt.training.loss import chunk_tokens
from jaxgpt.training.step import gradients

ROWS, LENGTH, VOCAB = 2, 256, 512  # two attention blocks of 128, two loss chunks of 256 tokens
WINDOW = 130  # a sliding window that crosses a block
# All of them are chosen: of 2 among 4, rounding sent some tokens to others than in float32, and the
# router's gradient was off by 7 %.
EXPERTS = 2
# Share of a leaf's norm. In bfloat16 (8 bits) the twin's worst leaf is off by 1 to 3 %, and by 7 to
# 9 % after ReLUs, whose kinks flip; the fault this was made for is off by 60 to 120 %.
TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}


@dataclass(frozen=True)
class Probe:
    """What was compared; errors are shares of the reference."""

    compute_dtype: str
    options: dict[str, Any]
    loss_error: float
    leaf: str  # the worst
    leaf_error: float
    tolerance: float


def probe_gradients(cfg: Config, options: dict[str, Any] | None = None) -> Probe:
    """Compare loss and gradients of a twin of `cfg` with a float32 reference without options.

    `options`: XLA options under test; None: those of this run on one device. Runs on one local
    device. Raises NumericsError naming the worst leaf when any error exceeds the tolerance.
    """
    device = jax.local_devices()[0]
    dtype = cfg.train.compute_dtype
    if options is None:
        options = of_dtype(dtype, device.platform)
        options |= preset(device.platform, device.device_kind, 1) | cfg.train.xla_options
    # Accelerators multiply float32 in shorter formats by default, by choice and not by fault.
    tolerance = TOLERANCE[dtype if device.platform == "cpu" else "bfloat16"]
    small = twin(cfg)
    with jax.default_device(device):
        params = parameters.on_host(parameters.specs(small.model), np.random.default_rng(0))
        batch = _batch(small)
        build = functools.partial(compile_with, more=cfg.train.xla_options)
        with ThreadPoolExecutor() as pool:  # a compiler does not keep two cores busy
            tested = pool.submit(build, _lower(cfg, small, dtype, options, params, batch))
            with jax.default_matmul_precision("highest"):
                alone = trusted(device.platform) | (HASTY if device.platform == "cpu" else {})
                reference = build(_lower(cfg, small, "float32", alone, params, batch))
            programs = tested.result(), reference
        found = [jax.device_get(program(params, batch)) for program in programs]
    (grads, _), (right_grads, _) = found
    loss, right_loss = (float(sums["total"]) for _, sums in found)
    loss_error = share(abs(loss - right_loss), abs(right_loss))
    errors = leaf_errors(named_leaves(grads), named_leaves(right_grads))
    leaf = max(errors, key=errors.__getitem__)
    probe = Probe(dtype, options, loss_error, leaf, errors[leaf], tolerance)
    if max(loss_error, errors[leaf]) > tolerance:
        wrong = sum(error > tolerance for error in errors.values())
        raise NumericsError(
            f"gradients of {leaf} are off by {errors[leaf]:.1%} ({wrong} of {len(errors)} leaves "
            f"by more than {tolerance:.1%}, the loss by {loss_error:.1%}) in {dtype} on "
            f"{device.device_kind}, JAX {jax.__version__}, compiler options {options}, XLA_FLAGS "
            f"{os.environ.get('XLA_FLAGS', '')!r}: training would be wrong; remove flags or use "
            "another train.compute_dtype"
        )
    return probe


def in_chunks(cfg: Config) -> bool:
    """Tell whether the run computes its loss in chunks, and so the twin its own."""
    tokens = cfg.train.micro_rows * cfg.model.seq_len
    return tokens > chunk_tokens(cfg.model.vocab_size, jax.default_backend())


def twin(cfg: Config) -> Config:
    """Return a small configuration with the same kinds of everything: heads, norms, taps, scans.

    Its weights start larger than the run's: where attention is nearly uniform, as in a new model,
    the gradients of queries and keys are too small to be compared.
    """
    m = cfg.model
    # Unrolled layers are all compiled alike, so one will do; a scan, a tap, and blocks with and
    # without a window need two. More would only add rounding: 9 % in bfloat16 with four.
    pattern = m.sliding_window and m.global_every > 1
    layers = min(m.num_layers, 2 if m.stacked or m.aux_layers or pattern else 1)
    heads = min(m.num_heads, 2)
    width = heads * m.head_width + heads * m.head_width % 2  # even, for sinusoids
    model = dataclasses.replace(
        m,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if m.kv_heads == m.num_heads else 1,
        head_dim=m.head_width,
        embed_dim=width,
        mlp_dim=2 * width,
        init="kaiming",
        init_std=width**-0.5,
        init_depth_scale=False,
        vocab_size=min(m.vocab_size, VOCAB),
        seq_len=min(m.seq_len, LENGTH),
        sliding_window=min(m.sliding_window, WINDOW),
        global_every=min(m.global_every, 2),
        num_experts=min(m.num_experts, EXPERTS),
        experts_per_token=min(m.num_experts, EXPERTS) or m.experts_per_token,
        expert_dim=width,
        shared_dim=width if m.shared_dim else 0,
        aux_layers=(1,) if m.aux_layers else (),
    )
    accumulates = cfg.train.accum_steps > 1
    train = dataclasses.replace(
        cfg.train, global_batch=ROWS, micro_batch=1 if accumulates else ROWS, param_dtype="float32"
    )
    return dataclasses.replace(cfg, model=model, train=train)


def _lower(
    cfg: Config, small: Config, dtype: str, options: dict[str, Any], params: Any, batch: Batch
) -> jax.stages.Lowered:
    """Return the program of (gradients, sums), to be compiled with `options`."""
    train = dataclasses.replace(small.train, compute_dtype=dtype)
    if (dtype, train.attention) == ("float32", "cudnn"):  # which has no float32
        train = dataclasses.replace(train, attention="auto")
    small = dataclasses.replace(small, train=train)
    chunk = batch.tokens[0].size // 2 if in_chunks(cfg) else None
    run = jax.jit(
        functools.partial(gradients, small, step=0, chunk=chunk), compiler_options=options
    )
    return run.lower(params, batch)


def _batch(small: Config) -> Batch:
    """Return random rows [A, B, T]: a padded end, and documents if the run masks them."""
    rng = np.random.default_rng(0)
    A, B, T = small.train.accum_steps, small.train.micro_rows, small.model.seq_len
    tokens, targets = rng.integers(0, small.model.vocab_size, (2, A, B, T)).astype(np.int32)
    weights = np.ones((A, B, T), np.float32)
    weights[..., T - T // 8 :] = 0
    if not small.data.document_mask:
        return Batch(tokens, targets, weights)
    return Batch(tokens, targets, weights, *random_documents(rng, (A, B, T)))
