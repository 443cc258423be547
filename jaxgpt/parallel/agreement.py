"""Whether all processes of a run were started alike, found out before they compute together.

Processes that read different data, stop at different steps or compile different programs would not
fail: they would exchange garbage, train on a mixture of both, or wait for each other for ever. They
are compared through the key-value store, not by a collective, for that is what goes wrong then.
With one process nothing happens.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgpt import __version__, config
from jaxgpt.config import Config
from jaxgpt.errors import DisagreementError
from jaxgpt.runtime import peers, store

# What may differ between hosts: where files lie on each (what is in them is compared by digest),
# and how far ahead it reads.
PER_HOST = {
    "data.data_dir", "data.prefetch", "data.sources", "data.stages", "data.store", "eval.store",
    "run.init_from", "tokenizer.path",
}  # fmt: skip
LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
# Settings of JAX, by environment or configuration, that change what a program is.
JAX_SETTINGS = (
    "jax_cpu_collectives_implementation", "jax_debug_infs", "jax_debug_nans",
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit",
    "jax_disable_most_optimizations", "jax_enable_pgle", "jax_enable_x64",
    "jax_numpy_dtype_promotion", "jax_optimization_level", "jax_platforms",
    "jax_random_seed_offset", "jax_threefry_partitionable", "jax_use_shardy_partitioner",
)  # fmt: skip
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that hold many settings
DEVICES = "devices of a process"
# What to do about a difference of these keys; of all others it is COMMAND.
ADVICE = {
    DEVICES: "look for a device that is missing there, or hidden by a variable or the launcher"
}
COMMAND = "start all with the same command, on the same code and files"
LINES = 8  # keys that are named one by one
DIGEST, WORD = 12, 80  # characters that are shown of a digest, and of another value


def check_agreement(name: str, facts: Callable[[], Mapping[str, Any]], timeout: float) -> None:
    """Raise DisagreementError on every process unless all of them have the same facts.

    `facts` gives JSON values by what they belong to, a configuration key for example; it is asked
    only where there is somebody to agree with. The message has a line for each that differs: the
    key, a process that has another than most, one of these, and both. All processes call it in the
    same order; one that has not after `timeout` seconds is named.
    """
    if store.num_processes() == 1:
        return
    mine = {"host": socket.gethostname(), "facts": {k: _words(v) for k, v in facts().items()}}
    try:
        lines = store.decide(f"agree/{name}", mine, differences, timeout)
    except TimeoutError as error:
        raise DisagreementError(f"{error}; start all with the same command") from None
    if lines:
        raise DisagreementError("\n".join(lines))


def differences(everyone: list[dict[str, Any]]) -> list[str]:
    """Return a line for each key whose words are not alike, at most 8 and a count.

    Each of `everyone` has its `host` and `facts`, words by key; in the order of processes. It is
    the odd one that is named first: whoever has other words than most, or than process 0.
    """
    lines = []
    for key in {key: None for each in everyone for key in each["facts"]}:
        words = [each["facts"].get(key) for each in everyone]
        # Of words that are equally common, those of the first process come first.
        (usual, _), *others = Counter(words).most_common()
        if others:
            odd = [number for number, word in enumerate(words) if word != usual]
            theirs, rest = (
                f"process {n} ({everyone[n]['host']}) has {_shown(words[n])}"
                for n in (odd[0], words.index(usual))
            )
            more = f" ({len(odd) - 1} more differ)" if len(odd) > 1 else ""
            lines.append(f"{key}: {theirs}, {rest}{more}; {ADVICE.get(key, COMMAND)}")
    if len(lines) > LINES:
        lines[LINES - 1 :] = [f"{len(lines) - LINES + 1} more keys differ"]
    return lines


def configuration(cfg: Config) -> dict[str, Any]:
    """Return every value by its key, without those that may differ between hosts."""
    tree = config.to_dict(cfg)
    values = {f"{section}.{key}": tree[section][key] for section in tree for key in tree[section]}
    return {key: value for key, value in values.items() if key not in PER_HOST}


def facts_of_start(cfg: Config) -> dict[str, Any]:
    """Return what is known before any file is read: configuration, code, libraries, settings."""
    facts = configuration(cfg)
    facts["jaxgpt"] = __version__
    facts["source of jaxgpt"] = source_digest()
    facts["Python"] = "{}.{}".format(*sys.version_info)
    for name in LIBRARIES:
        try:
            facts[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts |= {name: str(jax.config.values.get(name)) for name in JAX_SETTINGS}
    facts["JAXGPT_PEER_SECONDS"] = peers.times(os.environ).silent
    for variable in FLAGS:
        for flag in os.environ.get(variable, "").split():
            name, _, value = flag.partition("=")
            facts[f"{variable} {name}"] = value or "set"
    return facts


def facts_of_devices() -> dict[str, Any]:
    """Return which devices this process has, and how many of them."""
    kinds = [device.device_kind for device in jax.local_devices()]
    return {DEVICES: f"{len(kinds)} x {', '.join(sorted(set(kinds)))}"}


def program_digest(lowered: Any) -> str:
    """Return the SHA-256 of a lowered program's text (StableHLO)."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 of all source files of this package, by their paths in it."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    return "none" if value is None else str(value)


def _shown(words: str | None) -> str:
    if words is None:
        return "none"
    parts = words.split(", ")
    digests = all(len(part) == 64 and set(part) <= set("0123456789abcdef") for part in parts)
    return ", ".join(p[:DIGEST] for p in parts) if digests else words[:WORD]
