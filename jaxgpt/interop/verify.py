"""A Hugging Face folder as transformers reads it, compared with jaxgpt: logits, cache, text, ids.

The only module that knows transformers and PyTorch. Both compute in float32 on the CPU, where the
order of sums is all that may differ. Nothing is fetched and no code of a folder is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError, DataError, NumericsError, one_line
from jaxgpt.interop import tokenizers
from jaxgpt.interop.stored import host_device
from jaxgpt.interop.tokenizer_folder import SMALL
from jaxgpt.interop.weights import read_json
from jaxgpt.model import gpt
from jaxgpt.model.params import Params
from jaxgpt.tokenization.tokenizer import Tokenizer
from jaxgpt.tokenization.tokenizer_training import available_memory

TOLERANCE = 2e-5  # of a logit, as a share of the largest; measured: under 4e-6
SMALL_MODEL = 1 << 22  # parameters
ROW, PROMPTS, NEW = 48, (4, 9), 20  # tokens of a row and of prompts, and how many follow them
SAMPLE = (
    "The king went to the sea, and in 1789 he said: \u201cna\u00efve caf\u00e9s \u2013 "
    "\u4e2d\u6587 \u3042\u308a\u304c\u3068\u3046, \u043f\u0440\u0438\u0432\u0435\u0442, "
    "\u0645\u0631\u062d\u0628\u0627!\u201d\n\n"
    "def f(x):\n    if x > 0:\n\t\treturn {'a': [1, 2.5e-3]}  # \U0001f680\r\n"
)


def require() -> None:
    """Raise ConfigError unless transformers and PyTorch are installed."""
    missing = [name for name in ("transformers", "torch") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"hf export: {' and '.join(missing)} not installed, to compare with: install them with "
            "`pip install 'jaxgpt[hf]' torch`, or write unverified with --verify none"
        )


def fits(cfg: ModelConfig, num_parameters: int) -> bool:
    """Tell whether half of the memory holds the model twice, ours and theirs, in float32."""
    logits = 4 * 4 * 2 * ROW * cfg.vocab_size
    return 2 * 4 * num_parameters + logits < available_memory() / 2


def rows(cfg: ModelConfig, tok: Tokenizer | None) -> np.ndarray:
    """Return what models are compared on, int32 [2, T]: random ids, and a text if there can be."""
    length = min(cfg.seq_len, ROW)
    out = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, length)).astype(np.int32)
    if tok is not None:
        text = [tok.start_id, *tok.encode(SAMPLE)]
        out[1] = (text * length)[:length]
    return out


def compare_model(
    directory: Path, cfg: ModelConfig, params: Params, tokens: np.ndarray, what: str
) -> float:
    """Compare the model in a folder with `params` [float32]; return the largest difference.

    `tokens` [2, T]. Compared are logits of whole rows, the same id by id with transformers' cache,
    and greedy continuations. Differences are relative to the largest logit. NumericsError names the
    first place that differs by more than TOLERANCE, DataError what transformers cannot load.
    """
    import torch

    leaves = jax.tree.leaves(params)
    apply = jax.jit(gpt.apply, static_argnums=0)
    with jax.default_device(host_device()), jax.default_matmul_precision("highest"):

        def logits(ids: np.ndarray) -> np.ndarray:
            return np.asarray(apply(cfg, params, ids))  # [2, T, V]

        ours = logits(tokens)
        model = _load(directory, what)
        with torch.no_grad(), _threads(1 if sum(p.size for p in leaves) < SMALL_MODEL else 0):
            whole = model(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.numpy()
            worst = _agree(ours, whole, what)
            worst = max(worst, _agree(ours, _cached(model, tokens), f"{what}, with a cache"))
            _compare_greedy(model, logits, tokens, what)
    return worst


def compare_tokenizer(directory: Path, tok: Tokenizer, carried: bool = False) -> tuple[str, ...]:
    """Compare the tokenizer that transformers makes of a folder with `tok`; return notes.

    DataError names the first text with other ids, or that does not come back. If the files are
    `carried`, as they came in, awkward texts are only noted: version 5 reads some, as those of
    Llama 2, by rules of its own, and gives another id where a text begins with a space. So are
    files that it cannot load.
    """
    try:
        theirs = _tokenizer(directory)
    except DataError as error:
        if not carried:
            raise
        return (f"{error}; its files are as they came in",)
    where = f"{type(theirs).__name__} of transformers{_instead(directory, theirs)}"
    notes: tuple[str, ...] = ()
    if (end := theirs.eos_token_id) not in tok.stop_ids:
        notes += (f"{where}: has eos_token_id {end}; generation here stops at {tok.stop_ids}",)
    front = [] if tok.start_id == tok.eos_id else [tok.start_id]
    right = [*front, *tok.encode("a b")]
    if (found := theirs.encode("a b"))[: len(right)] != right:
        notes += (f"{where}: 'a b' with special symbols is {found}; generation here: {right}",)

    def encode(text: str) -> list[int]:
        return theirs.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(ids: list[int]) -> str:
        return theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    notes += tokenizers.compare(tok, [SAMPLE], encode, decode, where)
    try:
        return notes + tokenizers.compare(tok, tokenizers.texts(tok), encode, decode, where)
    except DataError as error:
        if not carried:
            raise
        return (*notes, str(error))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads inside the block; 0: as many as it wants.

    On a busy machine its threads wait for one another: 0.2 s a token of a tiny model, not 0.02.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(directory: Path, what: str) -> Any:
    """Return the model that transformers makes of a folder, all weights from its files."""
    import torch
    import transformers

    _quiet()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",  # the only one with every option of the families
            output_loading_info=True,
        )
    except Exception as error:  # of many types, by the field that it dislikes
        raise DataError(f"{what}: transformers cannot load it: {one_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[problem])):
            raise DataError(f"{what}: transformers has {problem}: {', '.join(names[:8])}")
    if hasattr(model, "set_experts_implementation"):  # of transformers 5
        model.set_experts_implementation("eager")  # the usual one takes widths of 16 bytes alone
    return model.eval()


def _tokenizer(directory: Path) -> Any:
    import transformers

    _quiet()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many types, by the file that is wrong
        raise DataError(f"transformers cannot load the tokenizer: {one_line(error)}") from error


def _instead(directory: Path, theirs: Any) -> str:
    """Return a remark where transformers took another class than the folder asks for.

    Version 5 reads every tokenizer of some model types, such as qwen2, as those of their makers.
    """
    path = directory / "tokenizer_config.json"
    asked = read_json(path, SMALL).get("tokenizer_class") if path.is_file() else None
    general = ("TokenizersBackend", str(asked).removesuffix("Fast"))
    if asked is None or type(theirs).__name__.removesuffix("Fast") in general:
        return ""
    return (
        f" (which it takes for this model type, though {path.name} says {asked}; --verify none "
        "exports it all the same)"
    )


def _quiet() -> None:
    """Keep the library's advice and progress bars off the terminal."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _cached(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return logits [2, T, V] of rows that go in id by id."""
    import torch
    import transformers

    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5
    cache = {name: transformers.DynamicCache(config=model.config)}
    ids = torch.tensor(tokens, dtype=torch.long)
    steps = [
        model(ids[:, at : at + 1], use_cache=True, **cache).logits[:, 0].numpy()
        for at in range(ids.shape[1])
    ]
    return np.stack(steps, axis=1)


def _agree(ours: np.ndarray, theirs: np.ndarray, what: str) -> float:
    """Return the largest difference as a share of the largest logit; raises NumericsError."""
    if ours.shape != theirs.shape:
        raise NumericsError(f"{what}: logits {list(theirs.shape)} in transformers, {ours.shape}")
    difference = np.abs(ours - theirs) / np.abs(ours).max()
    if not difference.max() <= TOLERANCE:  # also for NaN
        at = ~(difference <= TOLERANCE)
        row, position = min(zip(*np.nonzero(at.any(-1)), strict=True), key=lambda found: found[1])
        token = int(np.argmax(np.where(at, difference, 0)[row, position]))
        raise NumericsError(
            f"{what}: other logits in transformers, first at row {row}, position {position}: of id "
            f"{token} {theirs[row, position, token]:.6g} instead of "
            f"{ours[row, position, token]:.6g}; the largest difference is "
            f"{difference.max():.1e} of the largest logit, allowed is {TOLERANCE:.0e}"
        )
    return float(difference.max())


def _compare_greedy(model: Any, logits: Any, tokens: np.ndarray, what: str) -> None:
    """Compare the most likely continuations of the starts of both rows, NEW ids if there is room.

    A row is not followed further once its two best logits are closer than TOLERANCE.
    """
    import torch
    import transformers

    for row, prompt in enumerate(PROMPTS):
        prompt = min(prompt, tokens.shape[1] - 1)
        new = min(NEW, tokens.shape[1] - prompt)
        greedy = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0
        )
        ids = torch.tensor(tokens[row : row + 1, :prompt], dtype=torch.long)
        model.generation_config = greedy  # not that of the folder, which may filter or penalise
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids))[0].numpy()
        ours = logits(_padded(tokens, theirs))[0]  # [T, V], a causal model ignores what follows
        for at in range(prompt, prompt + new):
            second, best = np.sort(ours[at - 1])[-2:]
            if best - second <= TOLERANCE * np.abs(ours).max():
                break
            if (right := int(np.argmax(ours[at - 1]))) != theirs[at]:
                raise NumericsError(
                    f"{what}: after {at} ids of row {row} transformers goes on with "
                    f"{theirs[at]}, not {right}"
                )


def _padded(tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return rows of the shape of `tokens` that begin with `ids`."""
    out = np.zeros_like(tokens)
    out[:, : len(ids)] = ids
    return out
