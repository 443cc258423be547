"""The presets load, have the published sizes, and open with what a reader must know."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxgpt import config
from jaxgpt.model import params

CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted(CONFIGS.glob("*.toml"))
# Of the released weights; the last two by hand from their shapes.
PUBLISHED_SIZES = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    # V D + 6 (4 D² attention + 2 D F + F + D MLP + 4 D norms), D 512, F 2048, V 37000
    "original": 37_000 * 512 + 6 * (4 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512),
    # V D + T D + 6 (12 D² + 2 D) + D, D 384, V 8192, T 256
    "bench_small": 8192 * 384 + 256 * 384 + 6 * (12 * 384**2 + 2 * 384) + 384,
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_a_preset_has_exactly_the_published_number_of_parameters(name):
    cfg = config.load(CONFIGS / f"{name}.toml")
    assert params.count(params.specs(cfg.model)) == PUBLISHED_SIZES[name]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_opens_with_hardware_tokens_expected_result_and_its_own_command(path):
    lines = path.read_text().splitlines()
    opening = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    words = [line.split()[1] for line in opening if len(line.split()) > 1]
    assert {"Hardware", "Tokens", "Expected", "Command"} <= set(words)
    assert f" configs/{path.name}" in "\n".join(opening)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_run_as_it_is(path):
    cfg = config.load(path)
    assert cfg.run.dir == f"runs/{path.stem}"
    assert cfg.data.store
    assert cfg.train.num_steps or cfg.train.num_tokens
    # The tokenizer that `prepare` trains has the ids that the model has rows for.
    assert cfg.tokenizer.vocab_size == cfg.model.vocab_size


@pytest.mark.parametrize("name", ["gpt2_355m", "gpt2_774m", "gpt2_1558m", "llama_1b", "llama_8b"])
def test_big_models_are_stacked_so_that_compile_time_does_not_grow_with_depth(name):
    assert config.load(CONFIGS / f"{name}.toml").model.stacked


@pytest.mark.parametrize(
    ("name", "factor"), [("llama_1b", 32.0), ("llama_8b", 8.0), ("llama_70b", 8.0)]
)
def test_llama_presets_have_the_rope_of_the_released_weights(name, factor):
    model = config.load(CONFIGS / f"{name}.toml").model
    found = (model.rope_base, model.rope_scaling, model.rope_factor, model.rope_original_len)
    assert found == (500_000.0, "llama3", factor, 8192)
    assert (model.rope_low_freq, model.rope_high_freq, model.norm_eps) == (1.0, 4.0, 1e-5)


def test_the_original_preset_peaks_where_the_schedule_of_the_paper_does():
    assert config.load(CONFIGS / "original.toml").optim.lr == pytest.approx(
        (512 * 4000) ** -0.5, rel=1e-3
    )
