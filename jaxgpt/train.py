"""The run, read from top to bottom: open, restore, step, log, evaluate, save, stop.

At any moment a run is its `TrainState` on the devices and two exact integers on the host: the step,
and the position, which counts the samples consumed. Everything else, the order of the data and all
randomness included, is a function of these and the configuration. So an interrupted run goes on as
if nothing had happened, and nothing that only watches (logging, evaluation, saving) changes it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxgpt import config, runtime
from jaxgpt.checkpoint import load
from jaxgpt.checkpoint.faults import fault
from jaxgpt.checkpoint.record import Record
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.checkpoint.store import Checkpointer, print_line
from jaxgpt.config import Config
from jaxgpt.data import blocks, pipeline, stream
from jaxgpt.data import history as histories
from jaxgpt.data.ledger import Ledger
from jaxgpt.data.store import Store
from jaxgpt.data.stream import Data
from jaxgpt.errors import ConfigError, DataError, Interrupted, NumericsError
from jaxgpt.evaluation.perplexity import (
    EvalResult,
    compressor_baselines,
    evaluate_sets,
    store_bytes,
    store_tokenizer,
)
from jaxgpt.evaluation.sets import eval_stores
from jaxgpt.model import gpt
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.parallel.agreement import check_agreement
from jaxgpt.run_folder import check_never_saved, claim_folder, write_run_files
from jaxgpt.tokenization.tokenizer import Tokenizer
from jaxgpt.training import metrics, optimizer, step
from jaxgpt.training import state as states
from jaxgpt.training.probe import Probe, probe_gradients
from jaxgpt.validation import num_steps


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the baselines are bits per byte of general-purpose compressors by set."""

    run_dir: str
    step: int
    position: int
    results: dict[str, EvalResult]
    baselines: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        results = {
            name: result.to_dict() | {"baselines": self.baselines.get(name, {})}
            for name, result in self.results.items()
        }
        return {**vars(self), "results": results}


def train(cfg: Config, say: Callable[[str], None] = print_line) -> Outcome:
    """Train the run of `cfg` to its last step, from its newest checkpoint if it has one.

    Raises Interrupted after a signal, when the state is durable; ConfigError, DataError and
    NothingRestorable before the first step; StorageError when saving keeps failing; NumericsError
    after `train.max_nonfinite` skipped steps in a row, or if the compiler gets gradients wrong;
    DisagreementError where processes were started differently.
    """
    run_dir = Path(cfg.run.dir)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(runtime.Stop())
        dog = stack.enter_context(runtime.Watchdog())

        # Open: data and devices decide what the configuration leaves open, or refuse it.
        with dog.phase("open", detail=blocks.reading):
            newest = None if cfg.run.overwrite else load.newest_record(run_dir)
            history = recorded_history(cfg, newest)
            data = stream.open_data(
                cfg.data,
                seq_len=cfg.model.seq_len,
                seed=cfg.run.seed,
                history=history,
                say=say,
            )
            eval_sets = eval_stores(cfg, history, say=say)
        for source in (*data.stores, *eval_sets.values()):
            stack.callback(source.close)
        cfg = complete(cfg, data)
        total = last_step(cfg, data, newest, say)
        tok = check_tokenizers(data, eval_sets)
        for line in runtime.start_jax(cfg).lines:
            say(line)
        check_agreement(
            {
                "data.store": data.mixture.names,
                "data, run.seed or model.seq_len": [data.digest],
                "eval.store": [source.digest for source in eval_sets.values()],
                "train.num_steps": [str(total)],
            }
        )
        mesh = meshes.make_mesh(cfg.mesh)
        meshes.check_batch(mesh, cfg.train.global_batch, cfg.train.micro_rows)
        model = parameters.specs(cfg.model)
        tx = optimizer.build(cfg.optim, total, parameters.abstract(model, cfg.train.param_dtype))
        placed = states.state_shardings(mesh, cfg, tx)
        if whole := sharding.describe_unsharded(mesh, model):
            say(whole)
        claim_folder(run_dir, cfg, say)

        # Restore: the newest verified checkpoint, or the initial state in a folder without a run.
        log: metrics.RunLog | None = None  # once open, messages go above its progress bar
        ckpt = Checkpointer(
            run_dir / "ckpt",
            keep=cfg.checkpoint.keep,
            keep_every=cfg.checkpoint.keep_every,
            identity=identity(cfg, data),
            config_dict=config.to_dict(cfg),
            log=lambda line: (log.note if log else say)(line),
        )
        stack.callback(ckpt.close)
        with dog.phase("compile"):
            restored = ckpt.restore_latest(
                states.abstract_state(cfg, tx, placed), allow=cfg.checkpoint.allow_change
            )
            if restored is None:
                check_never_saved(run_dir, cfg.checkpoint.every, say)
            state = restored.state if restored else states.create(cfg, tx, mesh)
        first = done = restored.record.step if restored else 0
        position = restored.record.position if restored else 0
        # Fewer, should this not be the newest checkpoint, and the batch have been another.
        total = min(total, done + max(0, data.end - position) // cfg.train.global_batch)
        write_run_files(run_dir, cfg, tok)
        if restored:
            say(f"{run_dir}: resuming at step {done} of {total}")
        if done >= total:
            say(
                f"{run_dir}: complete at step {done}; raise train.num_steps to go on, set "
                "run.overwrite=true to start again, or use another run.dir"
            )

        # Compile, after proving that the compiler settings keep the gradients of this model right.
        with dog.phase("compile"):
            if done < total:
                say(describe_probe(probe_gradients(cfg)))
            train_step = step.make_train_step(cfg, tx, mesh, placed)
        flops = gpt.flops_per_token(cfg.model, True), gpt.flops_per_token(cfg.model, False)
        peak = metrics.measure_matmul_peak(cfg.train.compute_dtype, mesh.devices.ravel().tolist())
        say(metrics.describe(cfg, parameters.count(model), flops, peak))
        ledger = Ledger(data, position, restored.record.meta.get("ledger") if restored else None)
        log = metrics.RunLog(
            run_dir if jax.process_index() == 0 else None,
            cfg,
            total,
            flops,
            peak,
            first,
            state=restored.record.meta if restored else None,
            ledger=ledger.row,
        )
        stack.callback(log.close)

        def save() -> None:
            ledger.advance(position)
            meta = log.state() | {"mixture": histories.record(data), "ledger": ledger.state()}
            ckpt.save(done, state, position=position, meta=meta)

        def evaluate(max_rows: int) -> dict[str, EvalResult]:
            with dog.phase("eval"), log.paused():
                results = evaluate_sets(cfg, state.params, eval_sets, max_rows=max_rows)
            for name, result in results.items():
                log.record_eval(done, name, result)
            return results

        # Step: data, update, and then whatever is due.
        saver = Saver(ckpt, cfg.checkpoint.every, done if restored else -1, save)
        batches = pipeline.batches(
            data,
            position=position,
            global_batch=cfg.train.global_batch,
            accum_steps=cfg.train.accum_steps,
            rows=sharding.rows_of_process(mesh, cfg.train.micro_rows),
            num_batches=max(0, total - done),
            prefetch=cfg.data.prefetch,
        )
        with batches:
            while done < total and not stop.reason:
                began = time.monotonic()
                with dog.phase("data", detail=blocks.reading):
                    batch = next(batches)
                waited = time.monotonic() - began
                with dog.phase("compile" if done == first else "step"):
                    state, scalars = train_step(state, sharding.to_global(mesh, batch))
                    done, position = done + 1, position + cfg.train.global_batch
                    log.push(done, scalars, position=position, data_wait=waited)
                check_numerics(cfg, log.last)
                fault("step")
                if cfg.eval.every and done % cfg.eval.every == 0 and done < total:
                    evaluate(cfg.eval.max_rows)
                saver.poll()
                if saver.due(done) or stop.save_now:
                    stop.save_now = False
                    with dog.phase("save"), log.paused():
                        saver.save(done)

        # Stop: the last step is durable before anything is said about it.
        log.flush()
        check_numerics(cfg, log.last)
        with dog.phase("save"):
            saver.finish(done)
        if stop.reason and done < total:
            raise Interrupted(
                f"{stop.reason}: step {done} of {total} is saved in {run_dir}; the same command "
                f"{'without run.overwrite ' if cfg.run.overwrite else ''}goes on from there"
            )
        results = evaluate(0)
        baselines = {
            name: compressor_baselines(store_bytes(source, tok))
            for name, source in eval_sets.items()
        }
        return Outcome(str(run_dir), done, position, results, baselines)


def recorded_history(cfg: Config, record: Record | None) -> histories.History | None:
    """Return what the commit record of a checkpoint says about the mixture; None without one."""
    if record is None or "mixture" not in record.meta:
        return None
    may_change = bool({"data", "mixture"} & set(cfg.checkpoint.allow_change))
    return histories.recall(record.meta["mixture"], record.position, may_change=may_change)


def last_step(cfg: Config, data: Data, record: Record | None, say: Callable[[str], None]) -> int:
    """Return the updates of the run: as configured, or as many whole batches as there is data.

    Those of its newest checkpoint, of which `record` is the commit record, may have consumed more
    or fewer rows each than are asked for now.
    """
    done, position = (record.step, record.position) if record else (0, 0)
    wanted, batch = num_steps(cfg, done, position), cfg.train.global_batch
    more, left = divmod(max(0, data.end - position), batch)
    there = done + more
    if not wanted or there < wanted:
        if there == 0:
            raise ConfigError(
                f"data.max_epochs = {cfg.data.max_epochs:g}: leaves {data.end} rows, fewer than "
                f"train.global_batch = {batch}"
            )
        over = f", {left} rows left over" if left else ""
        say(f"the data ends after {there} steps (data.max_epochs){over}")
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
    free = {"stacked", "remat", "dropout"}
    tree = config.to_dict(cfg)
    model = {key: value for key, value in tree["model"].items() if key not in free}
    return {
        "model": json.dumps(model, sort_keys=True),
        "tokenizer": data.tokenizer_digest,
        "data": data.layout,
        "seed": str(cfg.run.seed),
        "optim": json.dumps(tree["optim"], sort_keys=True),
    }


def check_numerics(cfg: Config, fetched: dict[str, float]) -> None:
    """Raise NumericsError when too many steps in a row had a non-finite loss or gradient."""
    in_row = int(fetched.get("skipped_in_row", 0))
    if in_row >= cfg.train.max_nonfinite:
        raise NumericsError(
            f"loss or gradient was not finite for {in_row} steps in a row (train.max_nonfinite), "
            "which changed nothing; lower optim.lr, or look at the data from the last checkpoint on"
        )


def describe_probe(probe: Probe) -> str:
    """Return what the gradient check found, in one line."""
    options = ", ".join(f"{name}={value}" for name, value in probe.options.items())
    return (
        f"gradients checked in {probe.compute_dtype} ({options or 'no compiler options'}): worst "
        f"leaf {probe.leaf} off by {probe.leaf_error:.1%}, rounding explains {probe.tolerance:.1%}"
    )
