"""A Hugging Face folder becomes a run: every tensor accounted for, verified, within memory."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import MODELS, ROTARY, random_tensors, write_folder
from runs import make_store, overrides
from safetensors.numpy import save_file
from tiny import random_params
from verbs import ask, refused, text_of

from jaxgpt import cli, config
from jaxgpt.checkpoint import commit, inherit, load, lock
from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.checkpoint.record import Damaged
from jaxgpt.data.store import open_store
from jaxgpt.errors import ConfigError, DataError
from jaxgpt.interop import families, hf, tensors
from jaxgpt.model import gpt

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
BF16 = ml_dtypes.bfloat16


def quiet(line: str) -> None:
    pass


def importing(folder: Path, out: Path, param_dtype: str = "stored") -> dict:
    return hf.import_run(folder, out, param_dtype=param_dtype, say=quiet)


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        hf.check(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# Loading.


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_loaded_with_the_values_of_its_files(tmp_path, name):
    model, params = hf.load(write_folder(tmp_path, name))
    assert model == families.canonical(MODELS[name])
    same(params, random_params(MODELS[name]))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_dtypes_are_those_of_the_files_or_the_one_asked_for(tmp_path):
    for dtype in (np.float16, BF16):
        write_folder(tmp_path, "llama", random_tensors("llama", dtype))
        assert {leaf.dtype for leaf in jax.tree.leaves(hf.load(tmp_path)[1])} == {np.dtype(dtype)}
    _, params = hf.load(tmp_path, np.float32)
    assert params.embed.dtype == np.float32
    np.testing.assert_array_equal(params.embed, random_tensors("llama", BF16)[EMBED])


def test_a_file_without_prefix_and_with_buffers_is_that_of_gpt2_on_the_hub(tmp_path):
    bare = {n.removeprefix("transformer."): a for n, a in random_tensors("gpt2").items()}
    buffers = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.uint8)) for i in range(2)}
    buffers |= {f"h.{i}.attn.masked_bias": np.array(-1e4, np.float32) for i in range(2)}
    write_folder(tmp_path, "gpt2", bare | buffers)
    same(hf.load(tmp_path)[1], random_params(MODELS["gpt2"]))
    assert len(hf.check(tmp_path).unused) == 4


# Every tensor is accounted for.


def test_a_missing_tensor_is_refused_by_name(tmp_path):
    weights = random_tensors("llama")
    del weights["model.layers.1.mlp.up_proj.weight"]
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in refusal(
        write_folder(tmp_path, "llama", weights)
    )


def test_a_tensor_that_no_weight_needs_is_refused_by_name(tmp_path):
    weights = random_tensors("mistral") | {
        "model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)
    }
    message = refusal(write_folder(tmp_path, "mistral", weights))
    assert "1 not part of this model: model.layers.0.self_attn.q_proj.bias" in message


def test_a_wrong_shape_or_dtype_is_refused_with_the_right_one(tmp_path):
    weights = random_tensors("llama")
    weights["model.norm.weight"] = np.zeros(31, np.float32)
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((40, 32), np.int8)
    message = refusal(write_folder(tmp_path, "llama", weights))
    assert "1 of the wrong shape: model.norm.weight [31] instead of [32]" in message
    assert "1 of a dtype that is not read: model.layers.0.mlp.up_proj.weight I8" in message


def test_many_problems_are_listed_first_eight_and_a_count(tmp_path):
    weights = {n: a for n, a in random_tensors("qwen3_moe").items() if ".experts." not in n}
    weights |= {f"extra.{i}": np.zeros(1, np.float32) for i in range(20)}
    message = refusal(write_folder(tmp_path, "qwen3_moe", weights))
    assert "18 missing: model.layers.0.mlp.experts.0.down_proj.weight" in message
    assert "and 10 more; 20 not part of this model: model.extra.0" in message
    assert len(message) < 2000


def test_the_same_weight_under_two_names_is_refused(tmp_path):
    weights = random_tensors("llama")
    weights["norm.weight"] = weights["model.norm.weight"]
    assert "norm.weight, which are the same weight" in refusal(
        write_folder(tmp_path, "llama", weights)
    )


def test_a_config_of_more_layers_than_the_files_can_hold_is_refused_at_once(tmp_path):
    many = dict(num_hidden_layers=2_000_000_000)
    assert "num_hidden_layers = 2000000000" in refusal(
        write_folder(tmp_path / "a", "llama", **many)
    )
    many = dict(num_local_experts=2_000_000_000)
    assert "experts: 2000000000" in refusal(write_folder(tmp_path / "b", "mixtral", **many))


def test_a_tied_model_without_head_and_one_with_an_equal_head_are_the_same(tmp_path):
    tied = random_tensors("llama")
    del tied[HEAD]
    one = hf.load(write_folder(tmp_path / "a", "llama", tied, tie_word_embeddings=True))
    equal = tied | {HEAD: tied[EMBED]}
    other = hf.load(write_folder(tmp_path / "b", "llama", equal, tie_word_embeddings=True))
    assert one[0] == other[0] and one[0].tie_embeddings and one[1].lm_head is None
    same(one[1], other[1])


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    weights = random_tensors("llama")
    weights[HEAD] = weights[EMBED].copy()
    weights[HEAD][-1, -1] += 1
    message = refusal(write_folder(tmp_path, "llama", weights, tie_word_embeddings=True))
    assert f"{HEAD} is not {EMBED}, but tie_word_embeddings is true" in message
    weights[HEAD] = weights[HEAD][:-1]
    assert f"{HEAD} is not {EMBED}" in refusal(
        write_folder(tmp_path, "llama", weights, tie_word_embeddings=True)
    )


def test_an_untied_model_without_head_is_refused(tmp_path):
    weights = random_tensors("llama")
    del weights[HEAD]
    message = refusal(write_folder(tmp_path, "llama", weights))
    assert f"1 missing: {HEAD}; tie_word_embeddings is false" in message


def test_the_output_of_an_untied_model_uses_the_head(tmp_path):
    model, params = hf.load(write_folder(tmp_path, "llama"))
    hidden = np.random.default_rng(0).normal(size=(1, 3, 32)).astype(np.float32)
    logits = gpt.logits(model, params, hidden)
    wanted = np.float64(hidden) @ np.float64(random_tensors("llama")[HEAD]).T
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


# A run.


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3_moe"])
def test_an_imported_run_holds_the_values_of_the_files(tmp_path, name):
    importing(write_folder(tmp_path / "hf", name), tmp_path / "run")
    cfg, params = load.load_params(tmp_path / "run")
    assert cfg.model == families.canonical(MODELS[name])
    same(params, random_params(MODELS[name]))
    assert config.load(tmp_path / "run/config.toml").model == cfg.model
    assert not (tmp_path / "run.importing").exists()


@pytest.mark.parametrize(
    ("stored", "asked", "written"),
    [
        (BF16, "stored", BF16),
        (np.float32, "bfloat16", BF16),
        (BF16, "float32", np.float32),
    ],
)
def test_weights_are_written_in_the_dtype_asked_for(tmp_path, stored, asked, written):
    weights = random_tensors("llama", stored)
    summary = importing(write_folder(tmp_path / "hf", "llama", weights), tmp_path / "run", asked)
    _, params = load.load_params(tmp_path / "run")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(written)}
    np.testing.assert_array_equal(params.embed, weights[EMBED].astype(written))
    assert summary["dtypes_stored"] == {str(np.dtype(stored)): 21}
    assert summary["dtype_written"] == str(np.dtype(written))


def test_tensors_of_different_dtypes_stay_what_they_are(tmp_path):
    weights = random_tensors("llama", BF16)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float32)
    summary = importing(write_folder(tmp_path / "hf", "llama", weights), tmp_path / "run")
    _, params = load.load_params(tmp_path / "run")
    assert (params.embed.dtype, params.final_norm.dtype) == (BF16, np.float32)
    assert summary["dtype_written"] == "bfloat16, float32"


@pytest.mark.parametrize(
    ("value", "written"), [(np.nan, "stored"), (np.inf, "stored"), (3.4e38, "bfloat16")]
)
def test_weights_that_no_verb_would_use_are_refused_by_name(tmp_path, value, written):
    # 3.4e38 is a float32; the largest bfloat16 is 3.39e38, so it is rounded to infinity.
    weights = random_tensors("llama")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    folder = write_folder(tmp_path / "hf", "llama", weights)
    with pytest.raises(DataError, match="hf: model.layers.1.mlp.up_proj.weight: NaN or infinity"):
        importing(folder, tmp_path / "run", written)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_files_it_came_from_are_kept_for_export(tmp_path):
    folder = write_folder(tmp_path / "hf", "llama", surprise=1)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    importing(folder, tmp_path / "run")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "run/hf" / name).read_bytes() == (folder / name).read_bytes()


def test_the_summary_says_what_was_imported(tmp_path):
    folder = write_folder(
        tmp_path / "hf", "llama", surprise=1, rope_theta=500_000.0, rope_parameters=None,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )  # fmt: skip
    summary = importing(folder, tmp_path / "run")
    D, F, V, heads = 32, 40, 64, (4 + 2 + 2 + 4) * 6
    assert summary == {
        "run_dir": str(tmp_path / "run"), "family": "llama",
        "parameters": 2 * V * D + 2 * (D * heads + 3 * D * F + 2 * D) + D,
        "dtypes_stored": {"float32": 21}, "dtype_written": "float32", "positions": "rope",
        "rope_base": 500_000.0, "rope_local_base": 0.0, "rope_scaling": "linear",
        "rope_factor": 2.0, "rope_layout": "half-split", "seq_len": 16, "tied": False,
        "tensors_read": 21, "tensors_unused": [], "ignored": ["surprise"], "tokenizer": None,
    }  # fmt: skip


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path):
    folder = write_folder(tmp_path / "hf", "llama")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/precious").write_text("x")
    with pytest.raises(ConfigError, match="run: exists and is not empty"):
        importing(folder, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]
    (tmp_path / "run/precious").unlink()
    importing(folder, tmp_path / "run")


def test_damaged_values_are_found_when_they_are_loaded(tmp_path):
    importing(write_folder(tmp_path / "hf", "llama"), tmp_path / "run")
    step = tmp_path / "run/ckpt/0"
    largest = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with pytest.raises(Damaged, match="changed since"):
        load.load_params(step)


def test_a_part_that_is_gone_is_found_before_anything_is_read(tmp_path):
    importing(write_folder(tmp_path / "hf", "llama"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/ckpt/0/parts/layers.1")
    with pytest.raises(Damaged, match="layers.1/.*: the file is missing"):
        load.load_params(tmp_path / "run/ckpt/0")


@pytest.mark.parametrize("point", ["layer", "publish", "rename"])
def test_an_interrupted_import_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch, point):
    folder = write_folder(tmp_path / "hf", "llama")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if point == "layer":
            read, calls = hf.read_entry, []
            patch.setattr(hf, "read_entry", lambda *a: fail() if len(calls) > 12 else
                          (calls.append(1), read(*a))[1])  # fmt: skip
        elif point == "publish":
            patch.setattr(commit, "publish", fail)
        else:
            patch.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            importing(folder, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    importing(folder, tmp_path / "run")
    same(load.load_params(tmp_path / "run")[1], random_params(MODELS["llama"]))


def test_what_a_killed_import_left_is_replaced(tmp_path):
    folder = write_folder(tmp_path / "hf", "llama")
    left = tmp_path / "run.importing"
    (left / "ckpt/0/parts/embed").mkdir(parents=True)
    (left / "stray").write_text("x")
    importing(folder, tmp_path / "run")
    assert not left.exists() and not (tmp_path / "run/stray").exists()


def test_two_imports_into_one_folder_at_a_time_are_refused(tmp_path):
    folder = write_folder(tmp_path / "hf", "llama")
    (tmp_path / "run.importing").mkdir()
    with lock.claim(tmp_path / "run.importing"), pytest.raises(ConfigError, match="in use by"):
        importing(folder, tmp_path / "run")


# Memory.


def write_sparse(folder: Path, cfg) -> int:
    """Write a model of zeros that takes no room on disk; return its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(families.write_config("llama", cfg, "float32")))
    header, end = {}, 0
    for entry in tensors.table("llama", cfg):
        for name, shape in zip(entry.names, entry.shapes, strict=True):
            size = 4 * int(np.prod(shape))
            spans = {"data_offsets": [end, end + size]}
            header[name] = {"dtype": "F32", "shape": list(shape)} | spans
            end += size
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return end


def rise(verb: str, small: Path, large: Path, out: Path) -> float:
    """Return by how many MiB the large model raised the peak of a process that had the small."""
    child = Path(__file__).parent / "import_child.py"
    result = subprocess.run(
        [sys.executable, child, verb, *map(str, (small, large, out))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


def test_imports_and_exports_take_memory_for_a_few_layers_and_not_for_the_model(tmp_path):
    sizes = dict(embed_dim=512, head_dim=128, mlp_dim=2048)  # 4 (3 x 512 x 2048 + ...) = 16 MiB
    large = dataclasses.replace(ROTARY, num_layers=25, **sizes)
    size = write_sparse(tmp_path / "large", large) / 2**20
    write_sparse(tmp_path / "small", dataclasses.replace(large, num_layers=1))
    assert size > 370
    assert rise("import", tmp_path / "small", tmp_path / "large", tmp_path / "runs") < 100
    # An export holds groups of 64 MiB.
    runs = tmp_path / "runs"
    assert rise("export", runs / "small", runs / "large", tmp_path / "out") < 250


# With the other verbs.


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A store, and a run imported from a folder with the tokenizer of that store."""
    root = tmp_path_factory.mktemp("imported")
    make_store(root)
    cfg = dataclasses.replace(ROTARY, vocab_size=320)
    leaves = named_leaves(random_params(cfg))
    weights = {
        name: np.ascontiguousarray(array)
        for entry in tensors.table("llama", cfg)
        for name, array in zip(entry.names, entry.to_hf([leaves[n] for n in entry.leaves]),
                               strict=True)
    }  # fmt: skip
    folder = root / "hf"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(families.write_config("llama", cfg, "float32")))
    shutil.copy(root / "store/tokenizer.model", folder / "tokenizer.model")
    assert cli.main(["hf", "import", str(folder), str(root / "run")]) == 0
    return root


def test_the_verb_prints_a_summary_or_one_object(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", "gemma3", surprise=1)
    text = text_of(capsys, "hf", "import", str(folder), str(tmp_path / "run"))
    for words in (
        "gemma3", "tied head", "float32 (28 tensors)", "RoPE base 10,000, 100 with a window",
        "half-split", "ignored in config.json: surprise",
    ):  # fmt: skip
        assert words in text
    summary = ask(capsys, "hf", "import", str(folder), str(tmp_path / "again"))
    assert (summary["family"], summary["ignored"]) == ("gemma3", ["surprise"])


def test_a_bad_folder_ends_the_verb_with_one_line(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", "llama", hidden_act="mish")
    line = refused(capsys, 65, "hf", "import", str(folder), str(tmp_path / "run"))
    assert 'hidden_act = "mish"' in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_an_imported_run_is_evaluated_and_writes_text(root, capsys):
    result = ask(capsys, "eval", str(root / "run"), "--data", str(root / "store"))
    assert next(iter(result.values()))["tokens"] > 0
    words = ("--prompt", "the king", "--max-new-tokens", "3", "--ignore-eos")
    (sample,) = ask(capsys, "generate", str(root / "run"), *words)["samples"]
    assert sample["prompt"] == "the king"


def training(root: Path, run: str, *more: str) -> list[str]:
    same_model = [
        f"model.{key}={json.dumps(getattr(config.load(root / 'run/config.toml').model, key))}"
        for key in ("positions", "norm", "norm_eps", "mlp", "num_kv_heads", "head_dim", "mlp_dim",
                    "tie_embeddings", "vocab_size")
    ]  # fmt: skip
    return ["train", *overrides(root, run, train__num_steps=5), *same_model, *more]


def test_an_imported_run_cannot_be_continued_and_the_line_says_how_to_start_from_it(root, capsys):
    line = refused(capsys, 64, *training(root, "run"))
    assert "holds weights alone" in line and f"run.init_from={root / 'run'}" in line


def test_a_run_may_start_from_an_imported_one_of_its_model_and_tokenizer(root):
    cfg = config.load(None, training(root, "tuned", f"run.init_from={root / 'run'}")[1:])
    digest = open_store(root / "store").tokenizer_digest
    source = inherit.find_source(cfg, digest)
    assert source.directory == root / "run/ckpt/0" and source.record.step == 0
    with pytest.raises(DataError, match="tokenizer"):
        inherit.find_source(cfg, "another")
