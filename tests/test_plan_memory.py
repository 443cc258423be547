"""Bytes by cause, against hand arithmetic and against what XLA says of the compiled step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from tiny import LLAMA

from jaxgpt import config
from jaxgpt.chips import Chip
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.planning.child import memory
from jaxgpt.planning.hardware import Target, parse
from jaxgpt.planning.layout import layout, state_sizes, with_vocabulary
from jaxgpt.planning.memory import estimate, state_bytes
from jaxgpt.planning.tensors import kept, tensors

# 2 blocks, D 32, N 4, K 2, H 8, F 128, V 64, T 16, untied: per block 32 (4 + 2 + 2) 8 + 32 32 +
# 3 32 128 + 2 32 = 15,424 weights; 2 64 32 + 32 outside.
PER_BLOCK, OUTSIDE = 15_424, 4_128
CPUS = Target(
    "8 CPUs",
    Chip("cpu", "cpu", ("cpu",), 1e12, 1e10, 1e10, 1e10, 1e10, 1e10, 1e10, 1e10, 8),
    1,
    (8,),
)
H100 = parse("h100x8")


def make(model: dict | None = None, **sections: dict) -> Config:
    sections = {"train": {"global_batch": 16, "micro_batch": 8, "num_steps": 3}} | sections
    cfg = config.with_values(Config(model=LLAMA), "test", **sections)
    return config.with_values(cfg, "test", model=model or {})


def parts(cfg: Config, target: Target = H100) -> dict[str, int]:
    return {part.cause: part.bytes for part in estimate(layout(cfg, target)).parts}


def test_state_and_gradients_on_one_replica_each():
    found, weights = parts(make()), 2 * PER_BLOCK + OUTSIDE
    assert found["parameters"] == 4 * weights and found["moments"] == 8 * weights + 4
    assert found["gradients"] == found["accumulated gradients"] == 4 * weights


def test_gradients_of_stacked_layers_are_as_narrow_as_the_products_of_one_micro_batch():
    whole, vectors = {"global_batch": 8}, 2 * 2 * 32  # the scales of two norms in each block
    stacked = make({"stacked": True}, train=whole)
    matrices = 2 * PER_BLOCK - vectors
    assert parts(stacked)["gradients"] == 2 * matrices + 4 * (vectors + OUTSIDE)
    for wide in (
        parts(make({"stacked": False}, train=whole)),
        parts(stacked, CPUS),
        parts(make({"stacked": True}, train=whole | {"compute_dtype": "float32"})),
    ):
        assert wide["gradients"] == 4 * (matrices + vectors + OUTSIDE)


def test_fsdp_splits_the_state_but_not_vectors():
    found = parts(make(mesh={"data": 1, "fsdp": 8}))
    norms = 32 * 5
    assert found["parameters"] == 4 * ((2 * PER_BLOCK + OUTSIDE - norms) // 8 + norms)


def test_bfloat16_weights_keep_masters():
    cfg = make(train={"param_dtype": "bfloat16", "global_batch": 8})
    found, weights = parts(cfg), 2 * PER_BLOCK + OUTSIDE
    assert (found["parameters"], found["master weights"]) == (2 * weights, 4 * weights)
    assert found["gradients"] == 2 * weights and "accumulated gradients" not in found


def test_moments_in_bfloat16_and_a_moving_average():
    found = parts(make(optim={"moment_dtype": "bfloat16", "ema_decay": 0.9}))
    weights = 2 * PER_BLOCK + OUTSIDE
    assert (found["moments"], found["moving average"]) == (4 * weights + 4, 4 * weights)


def test_factored_moments_are_whole_on_each_device():
    cfg = make(optim={"name": "adafactor"}, mesh={"data": 1, "fsdp": 8})
    assert parts(cfg)["moments"] < 4 * (2 * PER_BLOCK + OUTSIDE)  # those below 128 are not factored


def test_llama_3_8b_has_twelve_bytes_a_weight():
    cfg = config.load("configs/llama3_8b.toml")
    at = layout(cfg, parse("v5p-128"))
    assert sum(weight.count for weight in at.weights) == 8_030_261_248  # published
    whole = sum(w.count * sum(w.state.values()) for w in at.weights)
    assert whole == 12 * 8_030_261_248
    # All but the 65 norms of 4,096 are split over 64 devices.
    norms = 65 * 4096
    assert sum(state_bytes(at).values()) == 12 * ((8_030_261_248 - norms) // 64 + norms) + 24


def test_full_recomputation_keeps_the_input_of_each_block():
    found = parts(make({"remat": "full"}))
    assert found["saved block_in"] == 2 * 16 * 32 * 2  # blocks, tokens, width, bfloat16
    assert not any(name.startswith("saved") for name in found if name != "saved block_in")


def test_named_tensors_are_kept_and_offloaded():
    cfg = make({"remat": "full", "remat_save": ("q", "up"), "remat_offload": ("block_in", "attn")})
    device, host = kept(layout(cfg, H100))
    assert device == {"q": 16 * 4 * 8 * 2, "up": 16 * 128 * 2, "lse": 16 * 4 * 4}
    assert host == {"block_in": 16 * 32 * 2, "attn": 16 * 32 * 2}
    assert estimate(layout(cfg, H100)).host == 2 * sum(host.values())


def test_tensor_and_context_split_activations():
    whole = tensors(layout(make(mesh={"data": 8}), H100))
    part = tensors(layout(make(mesh={"data": 1, "fsdp": 1, "tensor": 2, "context": 4}), H100))
    # 8 rows of 16 tokens against one: as many tokens over 4, and heads over 2.
    assert part["q"].elements == 8 * whole["q"].elements // (4 * 2)
    assert part["block_in"].elements == 8 * whole["block_in"].elements // 4


def test_exchanged_slots_have_room_for_half_as_many_again_as_an_even_choice():
    experts = dict(num_experts=4, experts_per_token=2, expert_dim=24, remat="full")
    cfg = make(experts, mesh={"data": 1, "fsdp": 2, "expert": 4})
    on_gpu, on_tpu = parts(cfg), parts(cfg, parse("v5p-16"))
    # 16 tokens a device choose two: 1.5 x 32 places of (5 x 32 + 3 x 24) in bfloat16.
    assert on_gpu["slots of experts"] == on_tpu["slots of experts"] == 2 * 64 * (5 * 32 + 3 * 24)
    # Float32: what the turns add up to and its gradient, and the device's own expert.
    assert on_gpu["sums of the experts' turns"] == 8 * 16 * 32 + 4 * 3 * 32 * 24


def test_documents_are_a_mask_for_cudnn_alone():
    found = parts(make({"head_dim": 8}, data={"document_mask": True}))
    assert found["mask of documents"] == 2 * 1 * 16 * 16
    assert "mask of documents" not in parts(make())


def test_experts_get_as_many_tokens_as_choose_them():
    experts = dict(num_experts=4, experts_per_token=2, expert_dim=24, shared_dim=16)
    found = tensors(layout(make(experts), H100))
    assert found["up"].elements == 16 * (2 * 24 + 16)


def test_smaller_micro_batches_need_less_and_accumulate():
    # One micro-batch of 8 rows a device against 8 of one row.
    def train(micro: int) -> dict:
        return {"global_batch": 64, "micro_batch": micro, "num_steps": 1}

    model = {"seq_len": 512, "embed_dim": 256}
    v5p = parse("v5p-16")
    large, small = (estimate(layout(make(model, train=train(n)), v5p)) for n in (64, 8))
    assert small.of("saved") * 8 == large.of("saved")
    assert small.device < large.device
    sums = {p.cause for p in small.parts} - {p.cause for p in large.parts}
    assert "accumulated gradients" in sums


def test_the_logits_of_a_chunk_are_counted_and_no_more():
    cfg = config.load("configs/gpt2_124m.toml")
    found = parts(cfg)
    # 32 rows of 1,024 on a device; logits of 5,341 tokens fit 1 GiB in float32, so 8 equal chunks.
    assert found["logits"] == 4_096 * 50_257 * (4 + 2)
    assert found["gradient of the head"] == 4 * 50_257 * 768


def piped(**model: object) -> Config:
    """Return four layers in two stages, of which each has two rows of 16 tokens."""
    sizes = {"remat": "full", "stacked": True, "num_layers": 4} | model
    return make(sizes, mesh={"data": 1, "fsdp": 4, "stage": 2})


def test_a_pipeline_keeps_the_inputs_of_a_stage_in_all_its_turns():
    at, found = layout(piped(), H100), parts(piped())
    assert (at.layers, at.ticks, at.at_once) == (2, 3, 2)
    assert found["inputs of a stage"] == 3 * (2 * 16) * 32 * 2
    assert not any(name.startswith("saved") for name in found)


def test_a_pipeline_keeps_named_tensors_of_all_its_blocks_in_all_its_turns():
    found = parts(piped(remat_save=("up",)))
    assert found["saved up"] == 3 * 2 * (2 * 16) * 128 * 2


def test_a_pipeline_has_a_belt_for_each_auxiliary_loss_and_no_masks():
    found = parts(piped(aux_layers=(1, 2)))
    # Two micro-batches over two stages: one place of two rows; the belt, its gradient, the norm.
    assert found["belts of auxiliary losses"] == 2 * 3 * (2 * 16) * 32 * 2
    assert not any("masks" in cause for cause in found)


def test_a_pipeline_has_one_float32_gradient_and_casts_its_layers_once():
    found = parts(piped())
    # Matrices of 15,360 weights a block over stages and fsdp, norms of 2 x 32 over stages; 4,096
    # outside over fsdp, and a norm of 32.
    blocks = 4 * 15_360 // 8 + 4 * 2 * 32 // 2
    assert found["weights as multiplied"] == 2 * blocks
    assert found["gradients"] == 4 * (blocks + 4_096 // 4 + 32)
    assert "accumulated gradients" not in found


def test_what_the_mesh_cannot_divide_is_refused_in_one_go():
    with pytest.raises(ConfigError) as refused:
        layout(
            make(
                mesh={"data": 1, "fsdp": 4, "stage": 2},
                train={"global_batch": 12, "micro_batch": 6},
            ),
            H100,
        )
    assert len(refused.value.problems) == 2


def test_the_vocabulary_of_no_store_is_the_tokenizers_and_said():
    cfg, line = with_vocabulary(Config())
    assert cfg.model.vocab_size == 8192 and "tokenizer.vocab_size = 8,192" in line
    assert with_vocabulary(make())[1] == ""


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd", "adafactor"])
def test_every_optimiser_is_counted_as_its_state_is(name):
    from jaxgpt.model import params
    from jaxgpt.training import optimizer, state

    cfg = make({"stacked": True}, optim={"name": name})
    built = optimizer.build(cfg, 3, params.abstract(params.specs(cfg.model)))
    leaves = jax.tree.leaves(state.abstract_state(cfg, built))
    known = state_sizes(cfg)
    counted = sum(w.count * sum(w.state.values()) for w in known.weights)
    assert counted + sum(known.replicated.values()) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in leaves
    )


def test_xla_agrees_on_a_step_of_eight_simulated_devices():
    """XLA's own sizes: state and batch to the byte, and all of it within a quarter."""
    from jaxgpt.data.packing import Batch
    from jaxgpt.model import params
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.parallel.sharding import batch_sharding
    from jaxgpt.training import optimizer, state, step

    A, B, T = 4, 16, 128
    train = {"global_batch": A * B, "micro_batch": B, "num_steps": 3, "compute_dtype": "float32"}
    model = {"seq_len": T, "embed_dim": 128, "remat": "full", "stacked": True}
    cfg = make(model, mesh={"data": 1, "fsdp": 8}, train=train)
    mesh = make_mesh(cfg.mesh)
    built = optimizer.build(cfg, 3, params.abstract(params.specs(cfg.model)))
    shardings = state.state_shardings(mesh, cfg, built)
    where = batch_sharding(mesh)
    ids, floats = (jax.ShapeDtypeStruct((A, B, T), d, sharding=where) for d in ("int32", "float32"))
    compiled = (
        step.make_train_step(cfg, built, mesh, shardings)
        .lower(state.abstract_state(cfg, built, mesh), Batch(ids, ids, floats))
        .compile()
    )
    at, found = layout(cfg, CPUS), compiled.memory_analysis()
    batch = 3 * 4 * A * (B // 8) * T
    assert found.argument_size_in_bytes == sum(state_bytes(at).values()) + batch
    total = found.argument_size_in_bytes + found.output_size_in_bytes
    total += found.temp_size_in_bytes - found.alias_size_in_bytes
    assert estimate(at).device == pytest.approx(total, rel=0.25)


# XLA's and libtpu's `peak_memory_in_bytes` of a step compiled ahead of time, in GB: what is in use
# at once (JAX 0.12.0.1, libtpu 0.0.50). Layers, where fewer than the preset has.
SHORT = ("train.global_batch=32", "train.micro_batch=16")
ROWS = ("train.global_batch=128", "train.micro_batch=64")
STAGES = ("mesh.data=2", "mesh.stage=4", "model.stacked=true", "train.micro_batch=64")
HALF = ("mesh.data=1", "train.micro_batch=32", "train.global_batch=256")
NONE = ("model.remat=none",)
EXPERTS = "mesh.expert=8"
COMPILED = [
    ("llama3_8b", "v5p-64", 32, (), 33.414),
    ("llama3_8b", "v6e-256", 2, (), 5.772),
    ("llama3_8b", "h100x8", 32, ("train.micro_batch=64",), 51.061),
    ("llama3_8b", "h100x8", 4, (*NONE, "train.micro_batch=8"), 14.684),
    ("llama3_8b", "h100x8", 4, (*NONE, "model.stacked=false", "train.micro_batch=8"), 16.211),
    ("llama3_8b", "v5p-8", 4, (*NONE, "train.micro_batch=4"), 17.653),
    ("gpt2_124m", "h200x1", 12, ("train.micro_batch=256",), 84.076),
    ("gpt2_124m", "v5p-8", 4, ("train.micro_batch=512",), 17.222),
    ("gpt2_355m", "h200x1", 8, (*NONE, "train.micro_batch=64"), 23.993),
    ("gpt2_355m", "v5p-8", 8, (*NONE, "train.micro_batch=128"), 16.689),
    ("gpt2_124m", "h100x8", 12, (*STAGES, "model.remat=full"), 3.827),
    ("gpt2_124m", "h100x8", 12, STAGES, 28.075),
    ("gpt2_124m", "v5p-8", 12, (*STAGES, *HALF, "model.remat=full"), 3.569),
    ("mixtral_8x7b", "h100x64", 2, (), 46.007),
    ("qwen3_30b_a3b", "h100x64", 2, (), 12.190),
    ("mixtral_8x7b", "h100x8", 2, (*SHORT, EXPERTS), 58.774),
    ("mixtral_8x7b", "v5p-16", 2, (*SHORT, EXPERTS), 41.254),
    ("qwen3_30b_a3b", "h100x8", 2, (*ROWS, EXPERTS), 19.773),
    ("qwen3_30b_a3b", "v5p-16", 2, (*ROWS, EXPERTS), 17.925),
]


@pytest.mark.parametrize(("name", "target", "layers", "settings", "gigabytes"), COMPILED)
def test_the_sum_by_cause_is_what_the_compiler_has_in_use_at_once(
    name, target, layers, settings, gigabytes
):
    words = [f"model.num_layers={layers}", *settings]
    cfg = config.load(f"configs/{name}.toml", overrides=words)
    found = estimate(layout(cfg, parse(target)))
    assert found.device == pytest.approx(gigabytes * 1e9, rel=0.1)


def test_of_what_libtpu_says_of_temporaries_what_it_reserves_counts():
    """Figures of 0.0.50 for Llama-2 7B over four v5p with four rows each; bytes."""
    always, reserved = 20_217_959_648, 11_087_216_672
    said = SimpleNamespace(
        argument_size_in_bytes=20_217_842_688,
        output_size_in_bytes=20_217_650_912,
        alias_size_in_bytes=20_217_646_080,
        temp_size_in_bytes=17_744_734_912,
        generated_code_size_in_bytes=34_963_456,
        host_argument_size_in_bytes=0,
        host_output_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        indefinite_allocations=always,
        total_allocation_bytes=always + reserved,
        peak_memory_in_bytes=30_746_501_344,
    )
    found = memory(said)
    assert found["temp_bytes"] == reserved
    assert found["peak_bytes"] == 20_217_842_688 + (20_217_650_912 - 20_217_646_080) + reserved


def test_layouts_share_what_does_not_depend_on_the_mesh():
    known = state_sizes(make())
    assert layout(make(), H100, known).weights is known.weights
    assert dataclasses.replace(layout(make(), H100, known), cfg=make()).weights is known.weights
