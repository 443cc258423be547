"""Checkpoints out as Hugging Face folders: the same bits, the whole folder or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from corpora import LINES
from hf_folders import write_folder
from safetensors.numpy import load_file, save_file
from tiny import LLAMA, TINY, random_params
from verbs import text_of

from jaxgpt import cli, config
from jaxgpt.checkpoint.store import Checkpointer, load_params
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import ConfigError, DataError, NothingRestorable, NumericsError
from jaxgpt.interop import export, families, hf, stored, tensors, twin, verify
from jaxgpt.model.canonical import computed
from jaxgpt.model.params import Params, restack
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden" / "hf"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
GPT2 = dataclasses.replace(TINY, attn_bias=True, out_bias=True, mlp_bias=True)


def save(
    run: Path,
    cfg: ModelConfig,
    params: Params,
    average: Params | None = None,
    tok: Tokenizer | None = None,
    step: int = 3,
) -> Path:
    """Write a run with one checkpoint of these weights, as training does; return its folder."""
    state = {"params": params, "opt_state": {"ema": average} if average else {}}
    state = jax.tree.map(jnp.asarray, state)
    identity = {"tokenizer": tok.digest} if tok else {}
    contents = config.to_dict(Config(model=cfg))
    with_writer = Checkpointer(run / "ckpt", identity=identity, config_dict=contents)
    with_writer.save(step, state, position=0, meta={})
    with_writer.close()
    if tok:
        (run / "tokenizer.model").write_bytes(tok.raw)
    return run


@functools.cache
def own_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as root:
        return tokenizer.train(LINES, Path(root) / "own.model", vocab_size=312)


def exported(run: Path, out: Path, **options: object) -> tuple[dict, dict[str, np.ndarray], dict]:
    """Export without transformers; return the summary, the tensors and the config.json."""
    summary = export.export_run(run, out, check="none", say=lambda line: None, **options)
    files = sorted(out.glob("*.safetensors"))
    arrays = {name: array for path in files for name, array in load_file(path).items()}
    return summary, arrays, json.loads((out / "config.json").read_text())


def nothing_left(folder: Path, *expected: str) -> bool:
    return {path.name for path in folder.iterdir()} == set(expected)


def refused(run: Path, folder: Path, error: type[Exception], match: str, **options: object) -> None:
    """Check that an export is refused and leaves nothing beside what was in the folder."""
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(error, match=match):
        export.export_run(run, folder / "out", say=lambda line: None, **options)
    assert {path.name for path in folder.iterdir()} == before


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a llama with an average of its weights and a tokenizer."""
    cfg = dataclasses.replace(LLAMA, vocab_size=320)
    params = random_params(cfg)
    average = jax.tree.map(lambda leaf: leaf + np.float32(0.125), params)
    return save(tmp_path_factory.mktemp("llama") / "run", cfg, params, average, own_tokenizer())


# The tensors.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_came_in_goes_out_with_the_same_tensors_and_configuration(tmp_path, family):
    hf.import_run(GOLDEN / family, tmp_path / "run", say=lambda line: None)
    _, arrays, content = exported(tmp_path / "run", tmp_path / "out")
    source = {
        name: array
        for path in (GOLDEN / family).glob("*.safetensors")
        if path.name != "expected.safetensors"
        for name, array in load_file(path).items()
    }
    assert arrays.keys() == source.keys()
    for name, array in source.items():
        assert arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(arrays[name].view(np.uint8), array.view(np.uint8), name)
    there = families.read_config(json.loads((GOLDEN / family / "config.json").read_text()), "there")
    assert families.read_config(content, "here")[:2] == there[:2]
    assert (
        content["model_type"]
        == json.loads((GOLDEN / family / "config.json").read_text())["model_type"]
    )


def test_values_are_those_of_the_parameters_in_their_places(tmp_path):
    params = random_params(LLAMA)
    _, arrays, _ = exported(save(tmp_path / "run", LLAMA, params), tmp_path / "out")
    D = LLAMA.embed_dim
    layer = params.layers[1]
    for name, right in {
        "model.embed_tokens.weight": params.embed,
        "lm_head.weight": params.lm_head,
        "model.norm.weight": params.final_norm,
        "model.layers.1.input_layernorm.weight": layer.attn_norm,
        "model.layers.1.post_attention_layernorm.weight": layer.mlp_norm,
        "model.layers.1.self_attn.q_proj.weight": layer.wq.reshape(D, -1).T,
        "model.layers.1.self_attn.k_proj.weight": layer.wk.reshape(D, -1).T,
        "model.layers.1.self_attn.o_proj.weight": layer.wo.reshape(-1, D).T,
        "model.layers.1.mlp.gate_proj.weight": layer.w_gate.T,
        "model.layers.1.mlp.down_proj.weight": layer.w_down.T,
    }.items():
        np.testing.assert_array_equal(arrays[name], right, name)


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_both_layouts_give_the_same_files(tmp_path, cfg):
    params = random_params(cfg)
    save(tmp_path / "flat", cfg, params)
    stacked = jax.tree.map(np.asarray, restack(jax.tree.map(jnp.asarray, params), stacked=True))
    save(tmp_path / "deep", dataclasses.replace(cfg, stacked=True), stacked)
    _, flat, flat_config = exported(tmp_path / "flat", tmp_path / "flat_out")
    _, deep, deep_config = exported(tmp_path / "deep", tmp_path / "deep_out")
    assert flat.keys() == deep.keys() and flat_config == deep_config
    for name in flat:
        np.testing.assert_array_equal(flat[name], deep[name], name)


@pytest.mark.parametrize("stacked", [False, True])
def test_each_leaf_is_read_once_and_only_a_group_at_a_time(tmp_path, monkeypatch, stacked):
    cfg = dataclasses.replace(LLAMA, stacked=stacked)
    run = save(tmp_path / "run", cfg, random_params(cfg))
    monkeypatch.setattr(stored, "GROUP_BYTES", 1)
    plan = export.make_plan(run, None, "stored", "best")
    groups = list(plan.stored.groups(plan.entries))
    names = [name for group in groups for entry in group for name in entry.names]
    assert sorted(names) == sorted(n for e in plan.entries for n in e.names)
    read = [{plan.stored.place(n)[0] for e in group for n in e.leaves} for group in groups]
    assert all(len(leaves) == 1 for leaves in read)
    assert len(set.union(*read)) == len(read) == len(plan.stored.leaves)


def test_bfloat16_rounds_to_the_nearest_even_and_the_configuration_says_so(tmp_path, llama_run):
    options = {"weights": "last"}
    _, exact, _ = exported(llama_run, tmp_path / "exact", **options)
    summary, rounded, content = exported(llama_run, tmp_path / "r", dtype="bfloat16", **options)
    assert content["dtype"] == content["torch_dtype"] == summary["dtype"] == "bfloat16"
    for name, array in exact.items():
        bits = array.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # of float32 without NaN
        assert rounded[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(rounded[name].view(np.uint16), nearest, name)


def test_a_cast_is_said(tmp_path, llama_run, capsys):
    for number, (dtype, said) in enumerate({
        "stored": "that of the checkpoint\n",
        "bfloat16": "that of the checkpoint after a cast from float32\n",
    }.items()):  # fmt: skip
        out = str(tmp_path / str(number))
        assert "bit for bit, " + said in text_of(
            capsys, "hf", "export", str(llama_run), out, "--verify", "none", "--dtype", dtype
        )


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_keeps_the_name_that_it_had_in_the_file(tmp_path, name):
    folder = write_folder(tmp_path / "hf", "llama")
    content = json.loads((folder / "config.json").read_text())
    del content["dtype"], content["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(content | {name: "float32"}))
    hf.import_run(folder, tmp_path / "run", say=lambda line: None)
    summary, _, out = exported(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert {key: out[key] for key in out if "dtype" in key} == {name: "bfloat16"}
    assert (summary["dtype"], summary["dtype_saved"]) == ("bfloat16", "float32")


def test_the_average_of_the_weights_goes_out_unless_the_last_are_asked_for(tmp_path, llama_run):
    best, average, _ = exported(llama_run, tmp_path / "best")
    last, weights, _ = exported(llama_run, tmp_path / "last", weights="last")
    assert (best["weights"], last["weights"]) == ("ema", "last")
    for name in weights:
        np.testing.assert_array_equal(average[name], weights[name] + np.float32(0.125), name)


def test_a_missing_average_is_refused(tmp_path):
    run = save(tmp_path / "run", LLAMA, random_params(LLAMA))
    refused(run, tmp_path, ConfigError, "no moving average", weights="ema", check="none")


def test_large_models_go_into_several_files_with_an_index(tmp_path, llama_run):
    _, whole, _ = exported(llama_run, tmp_path / "whole")
    summary, parts, _ = exported(llama_run, tmp_path / "parts", shard_bytes=50_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole) == set(parts)
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / "parts" / file)[name], whole[name], name)
    assert set(summary["files"]) >= set(index["weight_map"].values())


def test_what_went_out_comes_in_again_as_the_same_model_and_ids(tmp_path, llama_run):
    exported(llama_run, tmp_path / "out", weights="last")
    hf.import_run(tmp_path / "out", tmp_path / "again", say=lambda line: None)
    (there, first), (here, second) = (load_params(r) for r in (llama_run, tmp_path / "again"))
    assert computed(here.model) == computed(there.model)
    for leaf, right in zip(jax.tree.leaves(second), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(leaf, right)
    ours, theirs = own_tokenizer(), tokenizer.load(tmp_path / "again" / "tokenizer.model")
    assert (theirs.start_id, theirs.stop_ids, theirs.lossless) == (2, (2,), True)
    for text in [*LINES[:50], "</s><0x41>\t  \u2581\U0001f680"]:
        assert theirs.encode(text) == ours.encode(text)


# Heads, vocabularies, special ids.


@pytest.mark.parametrize("tied", [False, True])
def test_there_is_a_head_if_and_only_if_the_configuration_says_untied(tmp_path, tied):
    cfg = dataclasses.replace(LLAMA, tie_embeddings=tied)
    _, arrays, content = exported(save(tmp_path / "run", cfg, random_params(cfg)), tmp_path / "out")
    assert ("lm_head.weight" in arrays) == (not tied)
    assert content["tie_word_embeddings"] is tied


def test_the_vocabulary_of_the_configuration_is_the_rows_though_the_tokenizer_has_fewer(
    tmp_path, llama_run
):
    _, arrays, content = exported(llama_run, tmp_path / "out")
    assert content["vocab_size"] == 320 == len(arrays["model.embed_tokens.weight"])
    assert len(arrays["lm_head.weight"]) == 320 and own_tokenizer().vocab_size == 312


def test_the_special_ids_are_those_of_the_tokenizer(tmp_path, llama_run):
    _, _, content = exported(llama_run, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    for found in (content, generation):
        ids = [found[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
        assert ids == [2, 2, 0]  # E stands before each text and ends it


def test_a_run_without_a_tokenizer_says_so(tmp_path):
    run = save(tmp_path / "run", LLAMA, random_params(LLAMA))
    summary, _, _ = exported(run, tmp_path / "out")
    assert any("has no tokenizer" in note for note in summary["notes"])
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


# Refused, and nothing left behind.


def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(tmp_path):
    cfg = dataclasses.replace(LLAMA, vocab_size=311)
    run = save(tmp_path / "run", cfg, random_params(cfg), tok=own_tokenizer())
    refused(run, tmp_path, DataError, "has 312 ids, the model only 311", check="none")


def test_a_folder_that_is_not_empty_is_refused(tmp_path, llama_run):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    refused(llama_run, tmp_path, ConfigError, "out: exists and is not empty", check="none")
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_an_empty_folder_is_used(tmp_path, llama_run):
    (tmp_path / "out").mkdir()
    exported(llama_run, tmp_path / "out")
    assert nothing_left(tmp_path, "out")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"positions": "sinusoidal"}, "model.positions"),
        ({"mlp": "relu2"}, "model.mlp"),
        ({"norm_placement": "post"}, "model.norm_placement"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused_with_its_fields(tmp_path, change, match):
    cfg = dataclasses.replace(LLAMA, **change)
    run = save(tmp_path / "run", cfg, random_params(cfg))
    refused(run, tmp_path, ConfigError, f"no family .* expresses this model.*{match}", check="none")


def test_missing_libraries_are_refused_at_once_with_what_to_install(
    tmp_path, llama_run, monkeypatch
):
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    match = r"transformers and torch not installed.*jaxgpt\[hf\].*--verify none"
    refused(llama_run, tmp_path, ConfigError, match)


def test_unverified_is_said(tmp_path, llama_run):
    summary, _, _ = exported(llama_run, tmp_path / "out")
    assert summary["verified"] == "none"
    assert any(note.startswith("UNVERIFIED") for note in summary["notes"])


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run = save(tmp_path / "run", LLAMA, random_params(LLAMA))
    data = max((run / "ckpt" / "3").rglob("*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    refused(
        run, tmp_path, NothingRestorable, "its content changed since it was saved", check="none"
    )


def test_a_step_that_is_not_there_is_refused(tmp_path, llama_run):
    refused(llama_run, tmp_path, NothingRestorable, "no checkpoint", step=4, check="none")


def tampering(monkeypatch, change) -> None:
    """Let `change(folder)` happen after the files are written and before they are compared."""
    right = export.write

    def write(plan, directory, shard_bytes):
        notes = right(plan, directory, shard_bytes)
        change(directory)
        return notes

    monkeypatch.setattr(export, "write", write)


def edit_tensors(change):
    def edit(directory: Path) -> None:
        arrays = {
            name: array.copy() for name, array in load_file(directory / "model.safetensors").items()
        }
        change(arrays)
        save_file(arrays, directory / "model.safetensors")

    return edit


def flip_a_bit(arrays):
    arrays["model.layers.1.mlp.up_proj.weight"].view(np.uint32)[5, 7] ^= 1


def swap_norms(arrays):
    one, other = (f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention"))
    arrays[one], arrays[other] = arrays[other], arrays[one]


def round_one(arrays):
    name = "model.norm.weight"
    arrays[name] = arrays[name].astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (flip_a_bit, r"model.layers.1.mlp.up_proj.weight: .* params.layers.1.w_up\[7, 5\] of"),
        (swap_norms, r"model.layers.0.input_layernorm.weight: .* params.layers.0.attn_norm\[0\]"),
        (
            round_one,
            r"model.norm.weight: bfloat16\[32\] in the files, params.final_norm .* float32",
        ),
    ],
)
def test_a_tensor_that_differs_from_the_checkpoint_is_named(
    tmp_path, llama_run, monkeypatch, change, match
):
    tampering(monkeypatch, edit_tensors(change))
    refused(llama_run, tmp_path, NumericsError, match, check="none")


def test_a_missing_tensor_is_named(tmp_path, llama_run, monkeypatch):
    tampering(monkeypatch, edit_tensors(lambda arrays: arrays.pop("lm_head.weight")))
    refused(llama_run, tmp_path, DataError, "missing: lm_head.weight", check="none")


def test_a_configuration_of_another_model_is_refused(tmp_path, llama_run, monkeypatch):
    def edit(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        for place in (content, content.get("rope_parameters") or {}):
            if "rope_theta" in place:
                place["rope_theta"] = 500_000.0
        (directory / "config.json").write_text(json.dumps(content))

    tampering(monkeypatch, edit)
    match = "config.json says model.rope_base = 500000.0, not 10000.0"
    refused(llama_run, tmp_path, NumericsError, match, check="none")


# The tiny model that stands for a big one.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_has_every_option_of_the_model_and_is_of_its_family(family):
    content = json.loads((GOLDEN / family / "config.json").read_text())
    source = families.read_config(content, family)
    small = twin.shrink(source.model)
    written = families.write_config(source.family, small, "float32", content)
    again = families.read_config(written, "twin")
    assert (again.family, computed(again.model)) == (source.family, computed(small))
    sizes = {
        "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "expert_dim",
        "num_experts", "vocab_size", "seq_len", "sliding_window", "global_every", "stacked",
        "rope_original_len", "attn_scale", *("init_std", "dropout"),
    }  # fmt: skip
    there, here = computed(source.model), computed(small)
    changed = {name for name in vars(here) if getattr(here, name) != getattr(there, name)}
    assert changed <= sizes
    windows = [{cfg.window(i) > 0 for i in range(cfg.num_layers)} for cfg in (small, source.model)]
    assert windows[0] == windows[1]


def test_the_twin_of_a_large_model_is_small():
    big = ModelConfig(
        num_layers=62, embed_dim=5376, num_heads=32, num_kv_heads=16, head_dim=128, mlp_dim=21504,
        vocab_size=262_208, seq_len=131_072, positions="rope", rope_base=1e6, rope_local_base=1e4,
        rope_scaling="linear", rope_factor=8.0, norm="rmsnorm", norm_plus_one=True, mlp="geglu",
        norm_placement="sandwich", qk_norm=True, sliding_window=1024, global_every=6,
        attn_scale=(5376 / 32) ** -0.5, embed_scale=True,
    )  # fmt: skip
    small = twin.shrink(big)
    assert sum(leaf.size for leaf in twin.random_leaves(small).values()) < 100_000
    assert small.num_heads // small.kv_heads == 2 and small.attn_scale == big.attn_scale
    assert families.family_of(small) == families.family_of(big) == "gemma3"
    assert tensors.table("gemma3", small)


@pytest.mark.parametrize("heads", [(14, 2), (5, 1), (9, 3), (32, 4)])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_the_width_of_the_twin_is_that_of_its_heads_only_where_the_model_is_so(heads, head_dim):
    # transformers refuses a width that is no multiple of the number of heads.
    cfg = ModelConfig(
        num_heads=heads[0], num_kv_heads=heads[1], embed_dim=16 * heads[0], head_dim=head_dim
    )
    small = twin.shrink(cfg)
    assert small.embed_dim % small.num_heads == 0
    assert (small.embed_dim == small.num_heads * small.head_dim) == (head_dim == 16)
    assert small.num_heads // small.kv_heads == heads[0] // heads[1]


# The command.


def test_the_command_prints_one_object_and_what_is_unverified(tmp_path, llama_run, capsys):
    words = ["hf", "export", str(llama_run), str(tmp_path / "out"), "--verify", "none", "--step"]
    assert cli.main([*words, "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["step"], found["weights"]) == ("llama", 3, "ema")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(found["files"])
    assert cli.main([*words, "3"]) == 64
    assert "exists and is not empty" in capsys.readouterr().err
    words[3] = str(tmp_path / "again")
    assert cli.main([*words, "3"]) == 0
    out = capsys.readouterr().out
    assert "llama, step 3, moving average of the weights in float32" in out
    assert "NOTE: UNVERIFIED" in out
