"""`bench step`: the shapes that are compared, and figures of a step without data and TensorFlow."""

from __future__ import annotations

import itertools
import json
import math
import os
from types import SimpleNamespace

import jax
import pytest
from programs import outcome, python

from jaxgpt.bench import shapes, step
from jaxgpt.bench.step import random_batch
from jaxgpt.model import params as parameters

# As published for the PyTorch model of the same shape: no biases, head tied.
PARAMETERS = {"small": 13_865_856, "gpt2": 123_980_544}
B, T, V, D, N = 2, 16, 64, 32, 2
TINY = (
    f"train.global_batch={B}", f"model.seq_len={T}", f"model.vocab_size={V}",
    f"model.embed_dim={D}", f"model.num_heads={N}", "model.num_layers=1", "optim.lr=0.03",
    "optim.schedule=constant", "train.xla_options={xla_backend_optimization_level=0}",
)  # fmt: skip
RUN = """
import json, os, sys
from jaxgpt import cli
words = ["--json", "--dtype=f32", "--steps=4", "--warm-up=2", *sys.argv[1:]]
code = cli.main(["bench", "step", *words])
libraries = [name for name in ("tensorflow", "orbax", "sentencepiece") if name in sys.modules]
print(json.dumps({"code": code, "libraries": libraries, "files": os.listdir()}))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[dict, dict]:
    """What `jaxgpt bench step --json` of a tiny model printed, and what is said of its process."""
    env = {"JAX_NUM_CPU_DEVICES": "1"}
    env["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    child = python(RUN, *TINY, env=env, cwd=tmp_path_factory.mktemp("step"))
    status, out, err = outcome(child, timeout=120)
    assert status == 0, err
    figures, process = out.splitlines()  # one line: one object
    return json.loads(figures), json.loads(process)


@pytest.fixture
def figures(ran) -> dict:
    return ran[0]


@pytest.mark.parametrize("shape", shapes.SIZES)
def test_a_shape_has_the_parameters_that_its_peers_have(shape):
    cfg = shapes.load(shape, "bf16")
    assert parameters.count(parameters.specs(cfg.model)) == PARAMETERS[shape]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("small", (6, 384, 6, 256, 8192, 16)), ("gpt2", (12, 768, 12, 512, 50304, 2))],
)
def test_a_shape_has_the_layers_width_heads_context_vocabulary_and_rows(shape, sizes):
    cfg = shapes.load(shape, "bf16")
    m = cfg.model
    found = m.num_layers, m.embed_dim, m.num_heads, m.seq_len, m.vocab_size, cfg.train.global_batch
    assert found == sizes


@pytest.mark.parametrize("shape", shapes.SIZES)
def test_a_shape_is_gpt_2_without_biases(shape):
    m = shapes.load(shape, "bf16").model
    kind = m.positions, m.norm, m.norm_bias, m.mlp, m.tie_embeddings
    assert kind == ("learned", "layernorm", False, "gelu_tanh", True)


def test_products_are_in_the_format_asked_for():
    assert shapes.load("small", "bf16").train.compute_dtype == "bfloat16"
    assert shapes.load("small", "f32").train.compute_dtype == "float32"


def test_an_override_wins_over_the_shape():
    assert shapes.load("small", "bf16", ["model.num_layers=2"]).model.num_layers == 2


def test_rows_have_documents_where_the_run_keeps_them_apart():
    batch = random_batch(shapes.load("small", "f32", ["data.document_mask=true"]))
    assert batch.tokens.shape == batch.segment_ids.shape == batch.positions.shape == (1, 16, 256)
    assert batch.segment_ids.max() > 1


def test_rows_are_whole_where_it_does_not():
    assert random_batch(shapes.load("small", "f32")).segment_ids is None


def test_ids_are_those_of_the_vocabulary():
    batch = random_batch(shapes.load("small", "f32", ["model.vocab_size=7"]))
    for ids in (batch.tokens, batch.targets):
        assert set(ids.ravel().tolist()) == set(range(7))


def test_the_step_is_measured_without_tensorflow_and_without_a_store(ran):
    assert ran[1] == {"code": 0, "libraries": [], "files": []}


def test_both_rates_are_printed_and_the_best_is_no_slower(figures):
    assert figures["tokens_per_sec_best"] >= figures["tokens_per_sec_median"] > 0


def test_a_rate_is_that_of_all_tokens_of_a_step(figures):
    assert figures["tokens_per_step"] == B * T
    rate = B * T / figures["seconds_median"]
    assert figures["tokens_per_sec_median"] == pytest.approx(rate, abs=0.1)


def test_as_many_steps_are_timed_as_asked_for(figures):
    assert figures["repeats"] == 4


def test_more_steps_are_timed_until_they_have_taken_as_long_as_asked_for(monkeypatch):
    ticks = itertools.count()  # seconds: each step takes one
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    cfg, devices = shapes.load("small", "f32", [*TINY, "mesh.data=1"]), jax.devices()[:1]
    counts = {"steps": 2, "warm_up": 1, "devices": devices, "check": False}
    for least, right in ((0.0, 2), (2.0, 2), (4.5, 5)):
        found = step.measure(cfg, **counts, least_seconds=least, say=lambda line: None)
        assert (found["repeats"], found["seconds_median"]) == (right, 1.0)


def test_updates_are_made(figures):
    # On the same random tokens each time: at first log V, and less with every update.
    assert figures["loss"] < math.log(V) - 0.3


def test_the_parameters_are_counted(figures):
    assert figures["parameters"] == V * D + T * D + 12 * D * D + 2 * D + D


def test_operations_are_six_per_parameter_and_those_of_attention(figures):
    products = figures["parameters"] - T * D
    assert figures["flops_per_token_full"] == 6 * products + 12 * D * T
    assert figures["flops_per_token"] == 6 * products + 12 * D * T / 2


def test_utilisation_is_the_rate_times_the_operations_over_the_peak(figures):
    for name, count in (("mfu", "flops_per_token"), ("mfu_full", "flops_per_token_full")):
        right = B * T / figures["seconds_median"] * figures[count] / figures["peak_flops"]
        assert figures[name] == pytest.approx(right, abs=1e-4)


def test_memory_is_at_least_that_of_python_and_jax(figures):
    assert 50e6 < figures["peak_rss_bytes"] < 50e9


def test_the_time_to_the_first_step_has_that_of_compiling_in_it(figures):
    assert 0 < figures["compile_seconds"] < figures["seconds_to_first_step"]


def test_what_a_figure_depends_on_is_printed(figures):
    assert {"framework", "python", "device", "devices", "processor", "cores"} <= set(figures)
