"""Generation against a plain loop without cache or batch, and models whose text is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_models import sentencepiece_file

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError, DataError, NumericsError
from jaxgpt.evaluation.generate import _open_rows, generate
from jaxgpt.evaluation.sampling import Sampling
from jaxgpt.model import gpt
from jaxgpt.model.params import Params, ParamSpec, specs
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.frame import with_frame
from jaxgpt.tokenization.tokenizer import Tokenizer

V, T, E = 64, 32, 2
GREEDY = Sampling(temperature=0)
# Weights this large make the text depend on the whole context, not on the last token alone.
TINY = ModelConfig(
    num_layers=2, embed_dim=32, num_heads=4, vocab_size=V, seq_len=T, init_std=0.4,
    init_depth_scale=False, tie_embeddings=False, attn_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
KINDS = {
    "gpt2": TINY,
    "llama": replace(
        TINY, positions="rope", norm="rmsnorm", mlp="swiglu", num_kv_heads=2, stacked=True
    ),
    "sinusoidal": replace(TINY, positions="sinusoidal", embed_scale=True),
    "none": replace(TINY, positions="none", sliding_window=5, logit_softcap=10.0),
}
PROMPTS = ["a", "hello", "hello world"]  # 1, 5 and 11 tokens behind E


@dataclass(frozen=True)
class Letters:
    """A tokenizer of single characters: ids from 3 on are "a", "b", ..."""

    vocab_size: int = V
    eos_id: int = E
    bos_id: int | None = None
    other_stops: tuple[int, ...] = ()

    @property
    def start_id(self) -> int:
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self.eos_id, *self.other_stops)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 3 if letter != " " else V - 1 for letter in text]

    def decode(self, ids: list[int], *, continues: bool = False) -> str:
        return "".join(chr(token + ord("a") - 3) for token in ids)

    def stream_decoder(self, *, continues: bool = False) -> LettersStream:
        return LettersStream()


class LettersStream:
    """Holds each character back until the next one is known."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, token: int) -> str:
        certain, self.held = self.held, Letters().decode([token])
        return certain

    def flush(self) -> str:
        return self.held


TOK = Letters()
APPLY = jax.jit(gpt.apply, static_argnums=0)


def drawn(cfg: ModelConfig, seed: int) -> Params:
    """Parameters from NumPy, which has nothing to compile."""
    rng = np.random.default_rng(seed)

    def leaf(spec: ParamSpec) -> jax.Array:
        kind, scale = spec.init
        noise = rng.normal(0, scale, spec.shape)
        values = noise if kind == "normal" else np.full(spec.shape, scale)
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(leaf, specs(cfg))


def by_hand(cfg: ModelConfig, params: Params, prompt: str, count: int) -> list[int]:
    """Greedy ids of one prompt: the whole context through `apply` for each, cut as documented."""
    context, new = [E, *TOK.encode(prompt)], []
    while len(new) < count:
        if len(context) > cfg.seq_len:
            context = context[-(cfg.seq_len // 2) :]
        # What follows cannot influence a causal model.
        padded = np.array([context + [0] * (cfg.seq_len - len(context))])
        new.append(int(jnp.argmax(APPLY(cfg, params, padded)[0, len(context) - 1])))
        context.append(new[-1])
    return new


def ids_of(*args, **options) -> list[list[int]]:
    return [list(row.ids) for row in generate(*args, **options)]


def counting_model() -> tuple[ModelConfig, Params]:
    """A model without attention or MLP that says the next letter: after id i comes i + 1."""
    cfg = replace(TINY, num_layers=1, embed_dim=V, positions="none", norm="rmsnorm", norm_eps=0.0)
    params = drawn(cfg, 0)
    silent = tuple(
        layer.replace(wo=layer.wo * 0, w_down=layer.w_down * 0) for layer in params.layers
    )
    one_hot = jnp.eye(V)
    return cfg, params.replace(embed=one_hot, layers=silent, lm_head=jnp.roll(one_hot, 1, axis=0))


@pytest.mark.parametrize("kind", KINDS)
def test_batched_single_cached_and_uncached_ids_equal_the_plain_loop(kind):
    cfg = KINDS[kind]
    params = drawn(cfg, 1)
    right = [by_hand(cfg, params, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(row) for row in right}) == 3 and len(set(right[2])) > 3  # not one id for ever
    options = {"max_new_tokens": 12, "stop_at_eos": False}
    assert ids_of(cfg, params, TOK, PROMPTS, GREEDY, **options) == right
    assert ids_of(cfg, params, TOK, PROMPTS, GREEDY, use_cache=False, **options) == right
    single = [ids_of(cfg, params, TOK, [prompt], GREEDY, **options)[0] for prompt in PROMPTS]
    assert single == right


def test_an_empty_prompt_is_the_end_of_text_id_alone():
    params = drawn(TINY, 1)
    right = by_hand(TINY, params, "", 5)
    assert ids_of(TINY, params, TOK, [""], max_new_tokens=5, stop_at_eos=False) == [right]


def test_no_prompts_give_no_text():
    assert generate(TINY, drawn(TINY, 1), TOK, []) == []


def test_each_row_stops_at_its_own_end_of_text():
    cfg, params = counting_model()
    tok = replace(TOK, eos_id=10)  # "h": one step after "g" (9), six after "b" (4)
    short, long = generate(cfg, params, tok, ["g", "b"], GREEDY, max_new_tokens=20)
    assert (list(short.ids), short.text, short.finished_reason) == ([10], "", "eos")
    assert (list(long.ids), long.text) == ([5, 6, 7, 8, 9, 10], "cdefg")
    assert (len(short.logprobs), len(long.logprobs)) == (1, 6)


def test_a_row_stops_at_any_id_that_ends_texts():
    cfg, params = counting_model()
    tok = replace(TOK, eos_id=40, other_stops=(10, 30))
    first, second = generate(cfg, params, tok, ["g", "z"], GREEDY, max_new_tokens=20)
    assert (list(first.ids), first.text, first.finished_reason) == ([10], "", "eos")
    assert (list(second.ids), second.finished_reason) == ([29, 30], "eos")


def test_the_begin_of_text_stands_once_before_the_prompt_where_the_model_wants_one():
    cfg, params = KINDS["gpt2"], drawn(KINDS["gpt2"], 1)
    right = {}
    for start in (E, 1):
        context = [start, *TOK.encode("hello")]
        padded = np.array([context + [0] * (T - len(context))])
        logits = np.float64(APPLY(cfg, params, padded)[0, len(context) - 1])
        right[start] = logits.max() - np.log(np.exp(logits).sum())
    assert abs(right[E] - right[1]) > 0.1  # what stands in front is seen
    for tok, start in ((TOK, E), (replace(TOK, bos_id=1), 1)):
        (row,) = generate(cfg, params, tok, ["hello"], max_new_tokens=1)
        np.testing.assert_allclose(row.logprobs, [right[start]], atol=1e-4)


def test_a_prompt_that_renders_the_begin_of_text_does_not_double_it(tmp_path):
    path = sentencepiece_file(tmp_path / "sp.model", user_defined_symbols=["<|user|>"])
    tok = with_frame(tokenizer.load(path), 1, [])  # <s>
    assert tok.decode([1]) == "" and tok.specials["<s>"] == 1
    cfg = replace(TINY, num_layers=1, vocab_size=tok.vocab_size)
    (row,) = _open_rows(cfg, tok, ["<s><|user|> hi"], 1, window=False)
    assert row.ids.count(1) == 1 and row.ids[0] == 1


def test_a_row_without_end_of_text_stops_at_its_length():
    cfg, params = counting_model()
    (row,) = generate(cfg, params, TOK, ["a"], GREEDY, max_new_tokens=3)
    assert (row.text, row.finished_reason) == ("bcd", "length")


def test_generation_goes_past_end_of_text_when_told_to():
    cfg, params = counting_model()
    tok = replace(TOK, eos_id=5)
    options = {"max_new_tokens": 4, "stop_at_eos": False}
    assert ids_of(cfg, params, tok, ["a"], GREEDY, **options) == [[4, 5, 6, 7]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=4.0, top_k=9)])
def test_log_probabilities_are_those_of_the_model_itself(sampling):
    cfg, params = counting_model()
    # RMS normalisation of a one-hot vector of 64 makes its 1 an 8: the logits are 8 for the next
    # letter and 0 for the other 63, whatever temperature and top-k then do to them.
    (row,) = generate(cfg, params, TOK, ["a"], sampling, max_new_tokens=9, stop_at_eos=False)
    previous = [3, *row.ids[:-1]]
    steps = [new == old + 1 for old, new in zip(previous, row.ids, strict=True)]
    assert all(steps) == (sampling is GREEDY)  # so that both probabilities occur
    right = [8 * step - math.log(math.exp(8) + 63) for step in steps]
    np.testing.assert_allclose(row.logprobs, right, rtol=1e-4)


def test_streamed_pieces_add_up_to_the_text_of_each_row():
    cfg, params = counting_model()
    tok, pieces = replace(TOK, eos_id=10), {0: "", 1: ""}

    def on_text(row: int, piece: str) -> None:
        pieces[row] += piece

    rows = generate(cfg, params, tok, ["d", "n"], GREEDY, max_new_tokens=5, on_text=on_text)
    assert pieces == {0: "efg", 1: "opqrs"} == {i: row.text for i, row in enumerate(rows)}


def scripted_model(script: list[int], vocab_size: int) -> tuple[ModelConfig, Params]:
    """A model that looks only at the position: after position i comes script[i]."""
    cfg = replace(TINY, num_layers=1, embed_dim=T, vocab_size=vocab_size)
    params = drawn(cfg, 0)
    silent = tuple(
        layer.replace(wo=layer.wo * 0, w_down=layer.w_down * 0) for layer in params.layers
    )
    lm_head = jnp.zeros((vocab_size, T)).at[jnp.array(script), jnp.arange(len(script))].set(1.0)
    return cfg, params.replace(
        embed=params.embed * 0, pos_embed=jnp.eye(T), layers=silent, lm_head=lm_head
    )


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tok") / "tokenizer.model"
    return tokenizer.train(["the king went to the sea"] * 3, path, vocab_size=285)


def test_streaming_keeps_spaces_and_never_shows_half_a_character(subwords):
    text, pieces = "the king 🚀 went", []
    script = [*subwords.encode(text), subwords.eos_id]
    assert len(script) > 6  # the rocket alone is four bytes, each an id
    (row,) = generate(
        *scripted_model(script, subwords.vocab_size), subwords, [""], GREEDY, max_new_tokens=20,
        on_text=lambda _, piece: pieces.append(piece),
    )  # fmt: skip
    assert row.ids == tuple(script)
    assert row.text == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(("prompt", "text"), [("the", " king went"), ("", "the king went")])
def test_a_space_that_sentencepiece_puts_before_texts_is_no_space_of_a_continuation(
    tmp_path, prompt, text
):
    tok = tokenizer.load(sentencepiece_file(tmp_path / "sp.model", add_dummy_prefix=True))
    script, pieces = tok.encode("the king went"), []
    (row,) = generate(
        *scripted_model(script, tok.vocab_size), tok, [prompt], GREEDY,
        max_new_tokens=len(script) - len(tok.encode(prompt)),
        on_text=lambda _, piece: pieces.append(piece),
    )  # fmt: skip
    assert row.text == "".join(pieces) == text


def test_streaming_and_text_agree_where_the_length_cuts_a_character(subwords):
    script, pieces = subwords.encode("go 🚀"), []
    cut = len(script) - 2
    (row,) = generate(
        *scripted_model(script, subwords.vocab_size), subwords, [""], GREEDY, max_new_tokens=cut,
        on_text=lambda _, piece: pieces.append(piece),
    )  # fmt: skip
    assert row.text == "".join(pieces) == "go \ufffd"


def test_a_sampled_row_does_not_depend_on_the_batch_around_it():
    params = drawn(TINY, 1)
    sampling = Sampling(temperature=2.0, top_p=0.95)
    options = {"max_new_tokens": 12, "seed": 3, "stop_at_eos": False}
    together = ids_of(TINY, params, TOK, ["a", "hello", "a"], sampling, **options)
    alone = ids_of(TINY, params, TOK, ["a"], sampling, indices=[2], **options)
    assert alone == [together[2]]
    assert together[0] != together[2]  # the same prompt under another index is another sample


def test_another_seed_gives_another_text_and_the_same_seed_the_same():
    params = drawn(TINY, 1)
    options = {"max_new_tokens": 12, "stop_at_eos": False}
    first, again, other = (
        ids_of(TINY, params, TOK, ["a"], Sampling(temperature=2.0), seed=seed, **options)
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_padding_of_the_vocabulary_is_never_sampled():
    cfg = replace(TINY, init_std=1e-6)  # all ids are about equally likely
    tok = replace(TOK, vocab_size=5)
    rows = ids_of(
        cfg, drawn(cfg, 0), tok, [""] * 40, Sampling(temperature=2.0),
        max_new_tokens=20, stop_at_eos=False,
    )  # fmt: skip
    assert {token for row in rows for token in row} == {0, 1, 2, 3, 4}


def test_repetition_penalty_counts_prompt_and_new_ids_but_not_the_opening_end_of_text():
    cfg, params = counting_model()
    # Whatever comes before, the logits of ids 0, 1, ... are these.
    ranks = jnp.zeros(V).at[:8].set(jnp.array([1.5, 1.2, 1.0, 6.0, 5.0, 4.0, 3.0, 2.0]))
    params = params.replace(
        embed=jnp.ones((V, V)), lm_head=jnp.broadcast_to(ranks[:, None] / V, (V, V))
    )
    tok = replace(TOK, vocab_size=8)
    options = {"max_new_tokens": 8, "stop_at_eos": False}
    # "a" is id 3. With a penalty of 100 each id is said once, in order of rank, E like any other.
    sampling = replace(GREEDY, repetition_penalty=100.0)
    (row,) = ids_of(cfg, params, tok, ["a"], sampling, **options)
    assert row == [4, 5, 6, 7, 0, 1, E, 3]
    assert ids_of(cfg, params, tok, ["a"], GREEDY, **options) == [[3] * 8]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_past_the_context_a_row_goes_on_from_its_last_half(kind):
    cfg = replace(KINDS[kind], seq_len=16)
    params = drawn(cfg, 1)
    right = [by_hand(cfg, params, prompt, 24) for prompt in PROMPTS]
    options = {"max_new_tokens": 24, "stop_at_eos": False, "window": True}
    assert ids_of(cfg, params, TOK, PROMPTS, GREEDY, **options) == right
    if kind == "gpt2":
        assert ids_of(cfg, params, TOK, PROMPTS, GREEDY, use_cache=False, **options) == right


def test_a_prompt_longer_than_the_context_is_cut_at_the_front_with_the_window():
    params = drawn(TINY, 1)
    prompt = "abcdefghij" * 5
    right = by_hand(TINY, params, prompt, 3)
    options = {"max_new_tokens": 3, "stop_at_eos": False, "window": True}
    assert ids_of(TINY, params, TOK, [prompt], GREEDY, **options) == [right]


def test_a_prompt_in_several_chunks_gives_the_same_ids(monkeypatch):
    monkeypatch.setattr("jaxgpt.evaluation.generate.CHUNK", 8)
    params = drawn(TINY, 1)
    prompts = ["a", "abcdefgh", "hello hello hello"]  # ending in the first, second and third chunk
    right = [by_hand(TINY, params, prompt, 6) for prompt in prompts]
    options = {"max_new_tokens": 6, "stop_at_eos": False}
    assert ids_of(TINY, params, TOK, prompts, GREEDY, **options) == right


def test_lengths_that_cross_a_bucket_give_the_same_ids():
    # 32, 64 and 128 positions: the uncached contexts pass through all three.
    cfg = replace(TINY, num_layers=1, seq_len=128)
    params, prompt = drawn(cfg, 1), "abcdefghij" * 3
    right = by_hand(cfg, params, prompt, 40)
    for use_cache in (True, False):
        options = {"max_new_tokens": 40, "stop_at_eos": False, "use_cache": use_cache}
        assert ids_of(cfg, params, TOK, [prompt], GREEDY, **options) == [right]


@pytest.mark.parametrize("compute, stored", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_cache_and_compute_dtypes_may_differ(compute, stored):
    cfg, params = counting_model()
    text = generate(
        cfg, params, TOK, ["ab", "c"], GREEDY, max_new_tokens=4, dtype=jnp.dtype(compute),
        cache_dtype=jnp.dtype(stored),
    )  # fmt: skip
    assert [row.text for row in text] == ["cdef", "defg"]


def test_a_bfloat16_cache_changes_no_greedy_id_of_a_clear_choice():
    params = drawn(TINY, 12)
    context = [E, *TOK.encode("hello world"), *by_hand(TINY, params, "hello world", 12)]
    logits = APPLY(TINY, params, np.array([context + [0] * (T - len(context))]))[0, 11:23]
    first, second = jax.lax.top_k(logits, 2)[0].T
    assert (first - second).min() > 0.15  # of a standard deviation of 2; keys are rounded to 1/256
    options = {"max_new_tokens": 12, "stop_at_eos": False, "cache_dtype": jnp.bfloat16}
    assert ids_of(TINY, params, TOK, ["hello world"], GREEDY, **options) == [context[12:]]


def test_one_row_in_bfloat16_equals_the_same_row_in_a_batch():
    params = drawn(TINY, 1)
    options = {"max_new_tokens": 6, "stop_at_eos": False, "dtype": "bfloat16"}
    alone = ids_of(TINY, params, TOK, ["hello"], GREEDY, **options)
    assert alone == ids_of(TINY, params, TOK, ["hello", "a"], GREEDY, **options)[:1]


def test_more_than_the_context_is_refused_with_the_numbers():
    params = drawn(TINY, 0)
    with pytest.raises(ConfigError) as caught:
        generate(TINY, params, TOK, ["a", "hello"], max_new_tokens=27)
    (line,) = caught.value.problems
    assert "\n" not in line
    # E and five letters are 6, and 27 more make 33; 26 would fit.
    assert all(number in line for number in ("prompt 1", " 6 ", " 27 ", " 33", "32", "26"))
    assert len(ids_of(TINY, params, TOK, ["hello"], max_new_tokens=26, stop_at_eos=False)[0]) == 26


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(ConfigError, match="shorter prompt"):
        generate(TINY, drawn(TINY, 0), TOK, ["a" * 40], max_new_tokens=1)


def test_no_new_tokens_are_refused():
    with pytest.raises(ConfigError, match="max_new_tokens = 0"):
        generate(TINY, drawn(TINY, 0), TOK, ["a"], max_new_tokens=0)


def test_an_id_outside_of_the_vocabulary_is_refused():
    with pytest.raises(DataError, match=r"prompt 1 has id 90"):
        generate(TINY, drawn(TINY, 0), TOK, ["a", chr(184)], max_new_tokens=2)


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(DataError, match="100 ids"):
        generate(TINY, drawn(TINY, 0), replace(TOK, vocab_size=100), ["a"])


def test_logits_that_are_not_finite_are_an_error_and_no_text():
    params = drawn(TINY, 0)
    broken = params.replace(lm_head=params.lm_head.at[7, 3].set(jnp.nan))
    with pytest.raises(NumericsError, match="prompt 0"):
        generate(TINY, broken, TOK, ["a"], Sampling(), max_new_tokens=2)
