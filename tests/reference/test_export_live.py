"""Exports as transformers loads them: accepted when they are right, refused when they are not."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from corpora import LINES
from foreign_models import byte_level, llama_style, rank_file
from test_interop_export import (
    FAMILIES,
    GOLDEN,
    edit_tensors,
    nothing_left,
    refused,
    save,
    swap_norms,
    tampering,
)
from test_interop_tokenizers import described
from tiny import LLAMA, TINY, random_params

from jaxgpt.errors import DataError, NumericsError
from jaxgpt.interop import export, hf, tokenizers, verify
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.tiktoken_engine import CL100K
from jaxgpt.tokenization.tokenizer import Tokenizer

# Ours, as families of transformers express them; each with what its exports may be mistaken in.
OWN = {
    "llama": dataclasses.replace(LLAMA, vocab_size=320, seq_len=64),
    "gpt2": dataclasses.replace(
        TINY, vocab_size=320, seq_len=64, attn_bias=True, out_bias=True, mlp_bias=True
    ),
}


@functools.cache
def own_tokenizer(kind: str = "bpe", vocab_size: int = 312) -> Tokenizer:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "own.model"
        return tokenizer.train(LINES, path, kind=kind, vocab_size=vocab_size)


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("llama") / "run"
    return save(run, OWN["llama"], random_params(OWN["llama"]), tok=own_tokenizer())


def quietly(line: str) -> None:
    pass


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_agrees_with_every_family_that_came_in_and_goes_out(tmp_path, family):
    hf.import_run(GOLDEN / family, tmp_path / "run", say=quietly)
    found = export.export_run(tmp_path / "run", tmp_path / "out", say=quietly)
    assert found["verified"] == "full"
    assert max(found["difference"], found["twin_difference"]) < verify.TOLERANCE
    assert nothing_left(tmp_path, "run", "out")


@pytest.mark.parametrize("family", OWN)
def test_transformers_agrees_with_a_run_of_our_own_and_its_tokenizer(tmp_path, family):
    run = save(tmp_path / "run", OWN[family], random_params(OWN[family]), tok=own_tokenizer())
    found = export.export_run(run, tmp_path / "out", say=quietly)
    assert (found["family"], found["verified"], found["notes"]) == (family, "full", [])
    assert found["tokenizer_agrees"] is True
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "the king </s> of\n\t\U0001f680  rain"
    ids = theirs(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == own_tokenizer().encode(text)
    assert theirs.decode(ids[0]) == text
    # By default generation begins with what stood before texts in training, and knows their end.
    assert model.generation_config.bos_token_id == model.generation_config.eos_token_id == 2
    with torch.no_grad():
        assert model(ids).logits.shape == (1, ids.shape[1], 320)


def test_a_model_too_big_for_the_memory_is_verified_by_a_tiny_one_and_that_is_said(
    tmp_path, llama_run, monkeypatch
):
    monkeypatch.setattr(verify, "available_memory", lambda: 1 << 20)
    found = export.export_run(llama_run, tmp_path / "out", say=quietly)
    assert found["verified"] == "twin" and "difference" not in found
    assert any("no memory for" in note for note in found["notes"])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_a_width_that_the_fast_products_of_transformers_refuse_are_compared(
    tmp_path, family
):
    changes = dict(num_experts=3, expert_dim=14, vocab_size=320)  # 14 float32 are 56 bytes
    if family == "qwen3_moe":
        changes |= dict(qk_norm=True, router_norm=False)
    cfg = dataclasses.replace(LLAMA, **changes)
    run = save(tmp_path / "run", cfg, random_params(cfg), tok=own_tokenizer())
    found = export.export_run(run, tmp_path / "out", say=quietly)
    assert (found["family"], found["verified"]) == (family, "full")


def test_a_model_that_transformers_refuses_is_one_line(tmp_path):
    cfg = dataclasses.replace(LLAMA, embed_dim=30, num_heads=4, head_dim=8)
    run = save(tmp_path / "run", cfg, random_params(cfg))
    match = "the model: transformers cannot load it: .*not a multiple"
    refused(run, tmp_path, DataError, match)


# Tokenizers.


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("made", ["bpe", "unigram", "tiktoken"])
def test_transformers_gives_our_ids_for_every_kind_of_model(tmp_path, kind, made):
    if made == "tiktoken":
        tok = tokenizer.load(rank_file(tmp_path / "ranks"), eos="<|endoftext|>", pattern=CL100K)
    else:
        tok = own_tokenizer(made)
    out = tmp_path / "out"
    described(out.mkdir() or out, config={"model_type": kind, "vocab_size": 512})
    tokenizers.carry_out(tok, tmp_path / "none", out, 64)
    assert verify.compare_tokenizer(out, tok) == ()


def test_a_model_type_whose_tokenizer_transformers_does_not_take_is_refused(tmp_path):
    described(tmp_path, config={"model_type": "qwen2", "vocab_size": 512})
    tokenizers.carry_out(own_tokenizer(), tmp_path / "none", tmp_path, 64)
    with pytest.raises(DataError, match="Qwen2Tokenizer .*which it takes for this model type"):
        verify.compare_tokenizer(tmp_path, own_tokenizer())


def test_an_imported_tokenizer_goes_out_as_it_came_and_is_read_alike(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    byte_level(source / "tokenizer.json")
    config = {"model_type": "gpt2", "vocab_size": 512, "eos_token_id": 0}
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}
    described(source, settings, config)
    tok = tokenizers.carry_in(source, tmp_path / "run")
    described(out, config=config)
    found = tokenizers.carry_out(tok, tmp_path / "run", out, 64)
    assert found.carried and verify.compare_tokenizer(out, tok, found.carried) == ()


def test_what_transformers_reads_otherwise_in_files_that_came_in_is_noted(tmp_path):
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "unk_token": "<unk>"}
    llama_style(tmp_path / "tokenizer.json")
    described(tmp_path, settings, {"model_type": "llama", "vocab_size": 512, "eos_token_id": 2})
    tok = tokenizers.carry_in(tmp_path, tmp_path / "run")
    notes = verify.compare_tokenizer(tmp_path, tok, carried=True)
    assert any("the text ' a' becomes other ids" in note for note in notes)
    with pytest.raises(DataError, match="the text ' a' becomes other ids"):
        verify.compare_tokenizer(tmp_path, tok)


def test_files_that_came_in_and_transformers_cannot_load_are_noted(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    described(tmp_path, config={"model_type": "gpt2", "vocab_size": 512, "eos_token_id": 0})
    tok = tokenizers.carry_in(tmp_path, tmp_path / "run")
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["type"] = "of a later version"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (note,) = verify.compare_tokenizer(tmp_path, tok, carried=True)
    assert "cannot load the tokenizer" in note and "as they came in" in note
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        verify.compare_tokenizer(tmp_path, tok)


# Broken exports. Files and checkpoint agree in all of them: only transformers can tell.


def blind(monkeypatch) -> None:
    monkeypatch.setattr(export, "compare_files", lambda plan, directory: None)


def test_two_norms_that_are_swapped_are_refused(tmp_path, llama_run, monkeypatch):
    blind(monkeypatch)
    tampering(monkeypatch, edit_tensors(swap_norms))
    match = "the model: other logits in transformers, first at row 0, position 0"
    refused(llama_run, tmp_path, NumericsError, match)


def test_a_wrong_rope_base_is_refused(tmp_path, llama_run, monkeypatch):
    def edit(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        for place in (content, content.get("rope_parameters") or {}):
            if "rope_theta" in place:
                place["rope_theta"] = 11_000.0
        (directory / "config.json").write_text(json.dumps(content))

    blind(monkeypatch)
    tampering(monkeypatch, edit)
    # Position 0 is not rotated, so that the first difference is at 1.
    match = "the model: other logits in transformers, first at row [01], position 1"
    refused(llama_run, tmp_path, NumericsError, match)


def test_a_wrong_table_of_names_is_refused_on_the_tiny_model(tmp_path, llama_run, monkeypatch):
    right = export.tensors.table

    def table(family, cfg):
        swap = {"self_attn.q_proj": "self_attn.o_proj", "self_attn.o_proj": "self_attn.q_proj"}

        def renamed(name: str) -> str:
            part = next((part for part in swap if part in name), None)
            return name.replace(part, swap[part]) if part else name

        return tuple(e._replace(names=tuple(map(renamed, e.names))) for e in right(family, cfg))

    monkeypatch.setattr(export.tensors, "table", table)  # import and export agree with each other
    refused(llama_run, tmp_path, NumericsError, "a tiny model like it: other logits")


def test_a_tensor_that_transformers_misses_is_refused(tmp_path, llama_run, monkeypatch):
    blind(monkeypatch)
    tampering(monkeypatch, edit_tensors(lambda arrays: arrays.pop("lm_head.weight")))
    refused(llama_run, tmp_path, DataError, "transformers has missing_keys: lm_head.weight")


def test_another_tokenizer_is_refused(tmp_path, llama_run, monkeypatch):
    def replace(directory: Path) -> None:
        other = own_tokenizer("bpe", 311)
        for path in directory.glob("*token*.json"):
            path.unlink()
        tokenizers.carry_out(other, tmp_path / "none", directory, 64)

    tampering(monkeypatch, replace)
    refused(llama_run, tmp_path, DataError, "of transformers: the text .* becomes other ids")


def test_a_tokenizer_that_drops_spaces_is_refused(tmp_path, llama_run, monkeypatch):
    def strip(directory: Path) -> None:
        spec = json.loads((directory / "tokenizer.json").read_text())
        spec["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
        (directory / "tokenizer.json").write_text(json.dumps(spec))

    tampering(monkeypatch, strip)
    refused(llama_run, tmp_path, DataError, "becomes other ids than in training")
