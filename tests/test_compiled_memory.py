"""What the compiled step of a Llama over fsdp holds and exchanges: bounds by arithmetic.

All its layers, other sizes scaled down, for TPU v5p and H100; compiled where their compilers are
installed.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest

from jaxgpt import config
from jaxgpt.planning import compile as compiling
from jaxgpt.planning.hardware import parse

L, D, N, H, F, V, T = 32, 1024, 8, 128, 2816, 4096, 1024
MATRICES = 7  # of a block: q, k, v, o, gate, up, down
BLOCK = 4 * D * D + 3 * D * F  # their parameters
MIB = 2**20

# (machine, devices, rows of each, package of its compiler)
TWINS = [
    ("v5p-8", 4, 1, "libtpu"),
    ("h100x8", 8, 1, "jax_cuda13_plugin"),
]


@functools.lru_cache(maxsize=len(TWINS))
def compiled(machine: str, devices: int, rows: int, package: str) -> compiling.Compiled | None:
    """Return the step, compiled once for all tests; None where the compiler is not installed."""
    return compile_for(machine, devices, rows, package)


def compile_for(
    machine: str, devices: int, rows: int, package: str, **sizes: int
) -> compiling.Compiled | None:
    if importlib.util.find_spec(package) is None:
        print(f"{package} is not installed: nothing is compiled for {machine}")
        return None
    kind = {
        "num_layers": L, "embed_dim": D, "num_heads": N, "head_dim": H, "mlp_dim": F,
        "vocab_size": V, "seq_len": T, "positions": "rope", "norm": "rmsnorm",
        "norm_bias": "false", "mlp": "swiglu", "tie_embeddings": "false", "stacked": "true",
        "remat": "full",
    }  # fmt: skip
    settings = [f"model.{name}={value}" for name, value in (kind | sizes).items()]
    batch = devices * rows
    settings += [f"train.global_batch={batch}", f"train.micro_batch={batch}", "train.num_steps=10"]
    settings += ["mesh.data=1", "mesh.fsdp=-1", "data.document_mask=true"]
    return compiling.compile_step(config.load(None, settings), parse(machine))


def temporaries(devices: int, rows: int) -> int:
    """Return the most bytes that a step may need beside its arguments, on one device.

    The input of each block in bfloat16, and in turn: at the loss its head, gathered, the head's
    gradient twice (summed, and of a chunk), 6 bytes per logit and 4 activations; in the last block
    to be differentiated the gradient of each weight, by shards, in bfloat16 for those of blocks and
    in float32 for others, its gathered weights and their gradients, or the next block's weights,
    and of each token 8 activations and gradients of width D (input, q, k, v, attention, and what is
    between) and 6 of width F (gate, up, their product).
    Compilers leave gaps: an eighth more, and 8 MiB for tables. That is less than another copy of
    the blocks in bfloat16, by shards: of their weights, or of gradients in float32.
    """
    tokens, of_blocks = rows * T, 2 * L * BLOCK // devices
    inputs, others = 2 * L * tokens * D, 4 * 2 * V * D // devices
    loss = 2 * V * D + 2 * 4 * V * D + 6 * tokens * V + 4 * 2 * tokens * D
    block = 2 * 2 * BLOCK + 2 * tokens * (8 * D + 6 * F)
    return (inputs + max(loss, of_blocks + others + block)) * 9 // 8 + 8 * MIB


@pytest.mark.parametrize("twin", TWINS)
def test_temporaries_stay_below_what_arithmetic_allows(twin):
    if (done := compiled(*twin)) is not None:
        assert 2 * L * twin[2] * T * D < done.temp_bytes <= temporaries(*twin[1:3])


@pytest.mark.parametrize("twin", TWINS)
def test_every_byte_of_the_state_is_reused(twin):
    if (done := compiled(*twin)) is not None:
        assert done.alias_bytes >= done.state_bytes  # tiles pad
        assert done.output_bytes - done.alias_bytes < 16 * 1024  # metrics: scalars, and a table


@pytest.mark.parametrize("twin", TWINS)
def test_weights_are_gathered_layer_by_layer_in_the_compute_dtype(twin):
    if (done := compiled(*twin)) is not None:
        large = [one for one in done.collectives if one.whole_bytes >= 2 * D * D]
        gathers = [one for one in large if one.kind == "all-gather"]
        in_loop = [one for one in gathers if one.runs == L]
        assert {one.dtype for one in in_loop} == {"bf16"}
        # XLA for GPU joins the matrices of a block, never those of two.
        most = BLOCK if done.platform == "gpu" else D * F
        assert max(one.whole_bytes for one in in_loop) == 2 * most
        # Once forward, once where a block is computed again; those of attention XLA for TPU gathers
        # a third time, as its backward pass wants them in another layout.
        elements = sum(one.whole_bytes for one in in_loop) // 2
        assert 2 * BLOCK <= elements <= 2 * BLOCK + 4 * D * D
        outside = [one for one in gathers if one.runs != L]  # the head, once
        assert [(one.runs, sorted(one.shape)) for one in outside] == [(1, [D, V])]


@pytest.mark.parametrize("twin", TWINS)
def test_the_gradient_of_each_matrix_is_scattered_and_none_is_summed_whole(twin):
    if (done := compiled(*twin)) is not None:
        large = [one for one in done.collectives if one.whole_bytes >= 2 * D * D]
        assert "all-reduce" not in {one.kind for one in large}
        scattered = [one for one in large if one.kind == "reduce-scatter"]
        assert all(one.axes == ("fsdp",) for one in scattered)
        elements = sum(
            one.runs * one.whole_bytes // (2 if one.dtype == "bf16" else 4) for one in scattered
        )
        assert elements == L * BLOCK + V * D  # the table of embeddings gets its by all-to-all


def test_on_a_tpu_no_two_matrices_are_scattered_together():
    """So that the gradient of one is under way while that of the next is computed."""
    if (done := compiled(*TWINS[0])) is not None:
        scattered = [one for one in done.collectives if one.kind == "reduce-scatter"]
        runs = sum(one.runs for one in scattered if one.whole_bytes >= 2 * D * D)
        assert runs == MATRICES * L + 1


def test_on_a_tpu_the_backward_pass_of_a_wide_mlp_holds_half_of_its_width_at_a_time():
    sizes = {"num_layers": 2, "embed_dim": 512, "num_heads": 4, "vocab_size": 2048}
    rows, seq_len, mlp_dim = 4, 4096, 8192
    done = compile_for("v5p-8", 4, rows, "libtpu", **sizes, mlp_dim=mlp_dim, seq_len=seq_len)
    if done is not None:
        # Half of four of them (gate, up, the gradient of their product, the first of their own), 16
        # of width D, each a 16th; a tenth for gaps.
        wide = 2 * rows * seq_len * mlp_dim
        assert done.temp_bytes < 1.1 * (4 / 2 + 16 / 16) * wide


KEPT = [("v5p-8", 4, "libtpu", {}), ("h100x1", 1, "jax_cuda13_plugin", {"norm": "layernorm"})]


@pytest.mark.parametrize(("machine", "devices", "package", "other"), KEPT)
def test_a_scan_without_recomputation_keeps_no_float32_tensor(machine, devices, package, other):
    """What products and attention read, in bfloat16: 8 tensors of width D and 3 of F."""
    layers, rows, wide = 8, 8, 2048
    sizes = {"num_layers": layers, "mlp_dim": wide, "remat": "none"} | other
    done = compile_for(machine, devices, rows, package, **sizes)
    if done is not None:
        tokens = rows * T
        block = 2 * tokens * (8 * D + 3 * wide)
        # The stack, what one block computes, the gradients of that; each weight, and its gradient.
        weights = 2 * 2 * layers * (4 * D * D + 3 * D * wide) // devices
        assert layers * block < done.temp_bytes < (layers + 2) * block + weights + 2 * 4 * V * D
