"""Every family of transformers: the files of tiny models, and what transformers computed with them.

The files and numbers come from `golden/make_hf.py`; `reference/test_families_live.py` repeats the
comparison with other weights.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import against_hf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.digests import digest
from safetensors.numpy import load_file

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import ModelConfig
from jaxgpt.interop import families, hf
from jaxgpt.interop.weights import write_weights
from jaxgpt.model.params import Params

GOLDEN = Path(__file__).parent / "golden" / "hf"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir())
SHARDED, BFLOAT16 = "llama", "mistral"
# Fields of config.json on which the logits of these models do not depend.
SAY_NOTHING = {
    "transformers_version", "use_cache", "pretraining_tp", "reorder_and_upcast_attn",
    "output_router_logits", "router_jitter_noise", "router_aux_loss_coef",
    "max_window_layers",  # no windows in Qwen
    "intermediate_size",  # no dense layers in qwen3_moe; the experts' width is another field
    "_sliding_window_pattern",  # layer_types says it
    "add_cross_attention", "scale_attn_by_inverse_layer_idx", "use_bidirectional_attention",  # off
}  # fmt: skip
SCANNED = ("gpt2", "qwen3", "gemma2", "gemma3", "mixtral")  # all ways in which layers differ


class Model(NamedTuple):
    """A golden folder in float32."""

    family: str
    cfg: ModelConfig
    params: Params
    expected: dict[str, np.ndarray]


@functools.cache
def model(name: str) -> Model:
    cfg, params = hf.load(GOLDEN / name, jnp.float32)
    family = "llama" if name == "llama3" else name
    return Model(family, cfg, params, load_file(GOLDEN / name / "expected.safetensors"))


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder, as the safetensors library reads them."""
    files = [file for file in folder.glob("*.safetensors") if file.name != "expected.safetensors"]
    return {name: array for file in files for name, array in load_file(file).items()}


def test_there_is_a_golden_folder_for_every_family():
    assert set(families.FAMILIES) == {model(name).family for name in FOLDERS}
    assert len(list((GOLDEN / SHARDED).glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_those_of_transformers(name):
    _, cfg, params, expected = model(name)
    logits = against_hf.apply(cfg, params, expected["ids"])
    assert against_hf.relative_error(logits, expected["logits"]) < 2e-5


@pytest.mark.parametrize(
    "name, stacked", [(name, False) for name in FOLDERS] + [(name, True) for name in SCANNED]
)
def test_loss_and_the_gradient_of_every_tensor_equal_those_of_transformers(name, stacked):
    family, cfg, params, expected = model(name)
    remat = "full" if stacked else "none"
    loss, grads = against_hf.loss_and_gradients(
        cfg, params, expected["ids"], stacked=stacked, remat=remat
    )
    assert loss == pytest.approx(float(expected["loss"][0]), rel=2e-5)
    tensors = against_hf.by_tensor(family, cfg, named_leaves(grads))
    assert {f"grad.{name}" for name in tensors} == {n for n in expected if n.startswith("grad.")}
    total = math.sqrt(sum(digest(tensor)[0] ** 2 for tensor in tensors.values()))
    assert total == pytest.approx(float(expected["grad_norm"][0]), rel=2e-5)
    for tensor, gradient in tensors.items():
        right = expected[f"grad.{tensor}"]
        np.testing.assert_allclose(digest(gradient), right, atol=1e-4 * right[0], err_msg=tensor)


@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_text_equals_that_of_transformers_with_and_without_a_cache(name):
    _, cfg, params, expected = model(name)
    prompts, texts = zip(*against_hf.prompts_and_texts(expected), strict=True)
    assert against_hf.greedy(cfg, params, prompts, len(texts[0])) == list(texts)
    rows = [p + t for p, t in zip(prompts, texts, strict=True)]
    likely = against_hf.most_likely(cfg, params, rows, expected["ids"].shape[1])
    for after, prompt, text in zip(likely, prompts, texts, strict=True):
        assert after[len(prompt) - 1 :][: len(text)].tolist() == text


@pytest.mark.parametrize("name", FOLDERS)
def test_documents_in_one_row_equal_themselves_alone_and_do_not_see_each_other(name):
    _, cfg, params, expected = model(name)
    ids, segments = expected["packed_ids"], expected["segments"]
    logits = np.asarray(against_hf.apply(cfg, params, ids, segment_ids=segments))
    real = segments > 0
    assert against_hf.relative_error(logits[real], expected["packed_logits"][real]) < 1e-5
    other = ids.copy()
    other[0, 2] = (other[0, 2] + 1) % cfg.vocab_size  # of the first document
    changed = np.asarray(against_hf.apply(cfg, params, other, segment_ids=segments))
    np.testing.assert_array_equal(changed[segments != 1], logits[segments != 1])
    first = (segments == 1)[0].sum()
    assert np.abs(changed - logits)[0, 2:first].max() > 1e-2


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_come_back_byte_for_byte_in_the_dtype_they_are_stored_in(name, tmp_path):
    cfg, params = hf.load(GOLDEN / name)
    tensors = against_hf.by_tensor(model(name).family, cfg, named_leaves(params))
    write_weights(tmp_path, tensors.items())
    back, right = stored(tmp_path), stored(GOLDEN / name)
    assert back.keys() == right.keys()
    dtype = ml_dtypes.bfloat16 if name == BFLOAT16 else np.float32
    for tensor, array in right.items():
        assert back[tensor].dtype == array.dtype == dtype
        assert back[tensor].shape == array.shape and back[tensor].tobytes() == array.tobytes()


def test_bfloat16_files_load_as_float32_without_any_change_of_value():
    _, low = hf.load(GOLDEN / BFLOAT16)
    for path, leaf in named_leaves(model(BFLOAT16).params).items():
        assert leaf.dtype == jnp.float32 and named_leaves(low)[path].dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, np.float32(named_leaves(low)[path]))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_configuration_comes_back_with_all_that_it_says_of_the_model(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    source = families.read_config(config, name)
    assert source.family == model(name).family and source.ignored == ()
    written = families.write_config(source.family, source.model, source.dtype)
    assert families.read_config(written, name).model == source.model
    lost = {key for key in config if key not in written or written[key] != config[key]}
    assert {key for key in lost if not key.startswith("summary_")} <= SAY_NOTHING
    assert families.family_of(source.model) == source.family
    # With the file it came from, nothing is changed at all.
    assert families.write_config(source.family, source.model, source.dtype, config) == config
