"""What is settled before the first step of a run, and what is said about it.

The data decides what the configuration leaves open, or refuses it; the checkpoint tells what was
consumed before; several processes compare what they have found, compile and hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgpt import config, ramp
from jaxgpt.checkpoint.fingerprint import tree_fingerprints
from jaxgpt.checkpoint.inherit import Source
from jaxgpt.checkpoint.record import Record
from jaxgpt.config import Config
from jaxgpt.data import history as histories
from jaxgpt.data.packing import Batch
from jaxgpt.data.store import Store
from jaxgpt.data.stream import Data
from jaxgpt.errors import ConfigError, DataError, HangError
from jaxgpt.evaluation.perplexity import store_tokenizer
from jaxgpt.parallel.agreement import check_agreement, configuration, program_digest
from jaxgpt.parallel.mesh import in_words, platform
from jaxgpt.parallel.xla_options import compile_with
from jaxgpt.runtime import store
from jaxgpt.runtime.memory import give_back
from jaxgpt.runtime.processor import cores_key, cpu_key
from jaxgpt.runtime.watchdog import LIMITS
from jaxgpt.tokenization.tokenizer import Tokenizer
from jaxgpt.training import probe_memory
from jaxgpt.training.probe import Probe
from jaxgpt.training.state import TrainState
from jaxgpt.training.step import logits_dtype
from jaxgpt.validation import num_steps, schedule_problems


def recorded_history(cfg: Config, record: Record | None) -> histories.History | None:
    """Return what the commit record of a checkpoint says about the mixture; None without one."""
    if record is None or "mixture" not in record.meta:
        return None
    may_change = bool({"data", "mixture"} & set(cfg.checkpoint.allow_change))
    return histories.recall(record.meta["mixture"], record.position, may_change=may_change)


def last_step(cfg: Config, data: Data, record: Record | None, say: Callable[[str], None]) -> int:
    """Return the updates of the run: as configured, or as many whole batches as there is data.

    Those of its newest checkpoint, of which `record` is the commit record, may have consumed more
    or fewer rows each than are asked for now. Raises ConfigError where the data holds no batch, or
    fewer than the schedule needs.
    """
    done, position = (record.step, record.position) if record else (0, 0)
    wanted, spans = num_steps(cfg, done, position), ramp.spans(cfg, done, position)
    there = ramp.whole_steps(spans, data.end)
    left = max(0, data.end - ramp.position_after(spans, there))
    if not wanted or there < wanted:
        if there == 0:
            rows = spans[0].rows
            raise ConfigError(
                f"data.max_epochs = {cfg.data.max_epochs:g}: leaves {data.end} rows, fewer than "
                f"{ramp.batch_sizes(cfg.train)[rows]} = {rows}"
            )
        over = f", {left} rows left over" if left else ""
        say(f"the data ends after {there} steps (data.max_epochs){over}")
        length = f"data.max_epochs = {cfg.data.max_epochs:g} ({there} steps)"
        if problems := list(schedule_problems(cfg, there, length)):
            raise ConfigError(*problems)
    return min(wanted or there, there)


def complete(cfg: Config, data: Data) -> Config:
    """Return `cfg` with what the data decides; raises ConfigError for what it rules out."""
    if num_steps(cfg) == 0 and data.mixture.end is None:
        raise ConfigError(
            "train.num_steps and train.num_tokens are both 0: say how long to train, or set "
            "data.max_epochs"
        )
    if cfg.model.vocab_size == 0:
        origin = f"tokenizer of {', '.join(data.names)}"
        return config.with_values(cfg, origin, model={"vocab_size": data.vocab_size})
    if cfg.model.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {cfg.model.vocab_size}: the tokenizer of the data has "
            f"{data.vocab_size} ids; use at least that, or 0 to take it from there"
        )
    return cfg


def check_tokenizers(data: Data, eval_sets: dict[str, Store]) -> Tokenizer:
    """Return the tokenizer of all data; DataError where a store has another, or lost its own."""
    for name, source in eval_sets.items():
        if source.tokenizer_digest != data.tokenizer_digest:
            raise DataError(
                f"eval.store {name} ({source.directory}): made with tokenizer "
                f"{source.tokenizer_digest[:12]}, the training data with "
                f"{data.tokenizer_digest[:12]}; prepare it with the same tokenizer"
            )
    return store_tokenizer(data.stores[0])


def identity(cfg: Config, data: Data) -> dict[str, str]:
    """Return what must be the same when a run is resumed, by name; see checkpoint.allow_change.

    The layout of layers, recomputation, and all about hosts, devices, mesh and batch may change.
    """
    free = {"stacked", "remat", "remat_save", "remat_offload", "dropout"}
    tree = config.to_dict(cfg)
    model = {key: value for key, value in tree["model"].items() if key not in free}
    return {
        "model": json.dumps(model, sort_keys=True),
        "tokenizer": data.tokenizer_digest,
        "data": data.layout,
        "seed": str(cfg.run.seed),
        "optim": json.dumps(tree["optim"], sort_keys=True),
    }


def facts_of_data(
    data: Data,
    eval_sets: dict[str, Store],
    total: int,
    newest: Record | None,
    source: Source | None,
) -> dict[str, Any]:
    """Return what all processes must have found alike in their files, by what it belongs to."""
    return {
        "data.store": list(data.mixture.names),
        "data, run.seed or model.seq_len": data.digest,
        "tokenizer": data.tokenizer_digest,
        "eval.store": [one.digest for one in eval_sets.values()],
        "last step (train.num_steps, train.num_tokens, data.max_epochs)": total,
        "newest checkpoint in run.dir": newest.step if newest else None,
        "run.init_from": source.digest if source else None,
    }


def facts_of_save(cfg: Config, step: int, position: int) -> dict[str, Any]:
    """Return the little that is compared at every save."""
    text = json.dumps(configuration(cfg), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"step": step, "position": position, "configuration": digest}


def compare_copies(step: int, state: TrainState) -> str:
    """Return which processes hold another state than the others, in one line; empty if none does.

    What is not split over hosts is there once on each. Every host updates its own copy alike, so
    they differ only where memory or a device is faulty, or hosts are of different kinds; and then
    they stay so, each training on its own weights. With one process nothing is computed.
    """
    if store.num_processes() == 1:
        return ""
    numbers = json.dumps(list(tree_fingerprints(state).values()))
    digests = _of_all("copies", hashlib.sha256(numbers.encode()).hexdigest())
    common = max(digests, key=digests.count)
    others = [number for number, digest in enumerate(digests) if digest != common]
    if not others:
        return ""
    if len(others) < len(digests) / 2:
        who = f"{store.describe(others)} of {len(digests)} processes hold another copy of the state"
    else:
        who = f"{len(set(digests))} different copies of the state in {len(digests)} processes, and "
        who += "none that most hold, so it cannot be told which are wrong"
    return (
        f"WARNING: step {step}: {who}: a device or memory is faulty, or hosts differ in kind; a "
        "checkpoint holds the copy of process 0, and a restart makes all alike again"
    )


def describe_nonfinite(state: TrainState) -> str:
    """Return which processes hold a state that is not finite, in one line; empty if none does.

    No update did that, since one that is not finite changes nothing. All processes call it alike.
    """
    shards = (s.data for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
    floats = (data for data in shards if jnp.issubdtype(data.dtype, jnp.inexact))
    finite = all(bool(jnp.isfinite(data).all()) for data in floats)
    held = _of_all("finite", str(finite))
    others = [number for number, word in enumerate(held) if word == "False"]
    if not others:
        return ""
    where = f" in {store.describe(others)} of {len(held)}" if len(held) > 1 else ""
    return (
        f"the state{where} is not finite, which no update did: a device or memory is faulty; leave "
        "it out, and go on from the last checkpoint"
    )


class Ahead(NamedTuple):
    """The step while a thread compiles it, and the batch that it is for, as shapes."""

    batch: Batch
    compiled: Future[Any]


def compile_ahead(
    cfg: Config, train_step: Any, state: TrainState, mesh: Mesh, position: int
) -> Ahead | None:
    """Begin to compile `train_step` for the update at a position, beside what else a start does.

    `state` has shapes for leaves. It is traced here, under the settings of this thread. Returns
    None where compiling has to wait: of several processes none does before all have lowered the
    same, and the compiler for GPUs times kernels on a device that it must have to itself.
    """
    if store.num_processes() > 1 or platform(mesh) == "gpu":
        return None
    batch = _batch_shapes(cfg, ramp.batch_rows(cfg, position))
    lowered = train_step.lower(state, batch)
    threads = ThreadPoolExecutor(1, "compile")
    compiled = threads.submit(compile_with, lowered, cfg.train.xla_options)
    threads.shutdown(wait=False)
    return Ahead(batch, compiled)


def compile_step(
    cfg: Config, train_step: Any, state: TrainState, batch: Batch, ahead: Ahead | None = None
) -> Any:
    """Return `train_step` compiled for this batch size, after all processes lowered the same.

    What a thread has begun is waited for, if it is for this size. Raises DisagreementError, and
    ConfigError for an unknown option in `train.xla_options`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    if ahead and ahead.batch == shapes:
        compiled = ahead.compiled.result()
    else:
        lowered = train_step.lower(state, batch)

        def program() -> dict[str, str]:
            return {"program of the step": program_digest(lowered)}

        check_agreement("program", program, LIMITS["compile"])
        compiled = compile_with(lowered, cfg.train.xla_options)
    give_back()
    return compiled


def _batch_shapes(cfg: Config, rows: int) -> Batch:
    micro_rows = cfg.train.micro_batch or rows
    shape = (rows // micro_rows, micro_rows, cfg.model.seq_len)  # [A, B, T]
    ids, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    documents = ids if cfg.data.document_mask else None
    return Batch(ids, ids, weights, documents, documents)


def check_gradients(cfg: Config) -> str:
    """Return what the gradient check found, in one line; raises what `probe_gradients` does.

    Devices are the same everywhere by now, processors need not be: of several processes the first
    on each kind of processor checks, and the others compile meanwhile. What it finds ends them all.
    Where an earlier start has found the same program right, it is not computed again.
    """
    first = _of_all("kinds of processors", cpu_key()).index(cpu_key())
    if first != store.process_index():
        return f"gradients are checked by process {first}"
    probe, known = probe_memory.check(cfg, cpu_key())
    return describe_probe(probe) + (" (found at an earlier start)" if known else "")


def num_processors() -> int:
    """Return how many CPUs, or parts of one, the processes have between them."""
    return len(set(_of_all("processors", cores_key())))


def _of_all(name: str, value: str) -> list[str]:
    try:
        return store.decide(name, value, list, LIMITS["compile"])
    except (TimeoutError, ConnectionError) as error:
        raise HangError(str(error)) from None


def describe_devices(record: Record, mesh: Mesh) -> str:
    """Return how devices and processes have changed since a checkpoint, empty if they have not."""
    saved, now = dict(record.mesh), {**mesh.shape, "processes": store.num_processes()}
    if {name: n for name, n in saved.items() if n > 1} == {n: k for n, k in now.items() if k > 1}:
        return ""
    words = []
    for sizes in (saved, now):
        processes = sizes.pop("processes", 1)
        count, axes = math.prod(sizes.values()), in_words(sizes)
        words.append(f"{count} device(s) in {processes} process(es) ({axes})")
    return f"saved on {words[0]}, going on with {words[1]}"


def describe_probe(probe: Probe) -> str:
    """Return what the gradient check found, in one line."""
    options = ", ".join(f"{name}={value}" for name, value in probe.options.items())
    return (
        f"gradients checked in {probe.compute_dtype} ({options or 'no compiler options'}): worst "
        f"leaf {probe.leaf} off by {probe.leaf_error:.1%}, rounding explains {probe.tolerance:.1%}"
    )


def describe_dtypes(cfg: Config) -> str:
    """Return the number formats of the run, in one line."""
    t = cfg.train
    exact = t.param_dtype == "float32"
    summed = all(t.micro_batch and rows > t.micro_batch for rows in ramp.batch_sizes(t))
    formats = {
        "parameters": t.param_dtype if exact else f"{t.param_dtype} with float32 masters",
        "gradients": "float32" if exact or summed else t.param_dtype,
        "moments": cfg.optim.moment_dtype,
        "compute": t.compute_dtype,
        "logits": str(logits_dtype(cfg)),
        "loss and softmax": "float32",
    }
    return "dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in formats.items())
