"""The run, read from top to bottom: open, restore, step, log, evaluate, save, stop.

At any moment a run is its `TrainState` on the devices and two exact integers on the host: the step,
and the position, which counts the samples consumed. Everything else, the order of the data and all
randomness included, is a function of these and the configuration. So an interrupted run goes on as
if nothing had happened, and nothing that only watches (logging, evaluation, saving) changes it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxgpt import config, ramp, start
from jaxgpt.checkpoint import inherit, load
from jaxgpt.checkpoint.faults import fault
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.checkpoint.store import Checkpointer, print_line
from jaxgpt.config import Config
from jaxgpt.data import blocks, pipeline, stream
from jaxgpt.data import history as histories
from jaxgpt.data.ledger import Ledger
from jaxgpt.errors import Interrupted, NumericsError
from jaxgpt.evaluation.perplexity import (
    EvalResult,
    compressor_baselines,
    evaluate_sets,
    store_bytes,
)
from jaxgpt.evaluation.sets import eval_stores
from jaxgpt.model import attention, gpt, turns
from jaxgpt.model import params as parameters
from jaxgpt.parallel import mesh as meshes
from jaxgpt.parallel import sharding
from jaxgpt.parallel.agreement import check_agreement, facts_of_devices, facts_of_start
from jaxgpt.run_folder import check_never_saved, claim_folder, copy_kept, write_run_files
from jaxgpt.runtime.devices import start_jax
from jaxgpt.runtime.hosts import START_TIMEOUT
from jaxgpt.runtime.memory import resume_collector
from jaxgpt.runtime.peers import Peers
from jaxgpt.runtime.signals import Stop
from jaxgpt.runtime.stopping import SharedStop
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
from jaxgpt.training import metrics, optimizer, step
from jaxgpt.training import state as states


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
    DisagreementError where processes were started differently. A stuck or lost process ends all.
    """
    run_dir = Path(cfg.run.dir)
    log: metrics.RunLog | None = None  # once open, messages go above its progress bar

    def note(line: str) -> None:
        (log.note if log else say)(line)

    with (
        Stop() as signals,
        Watchdog() as dog,
        Peers(dog, note) as peers,
        SharedStop(signals, dog, note) as stop,
        contextlib.ExitStack() as stack,
        peers.telling(),
    ):
        # Open: data and devices decide what the configuration leaves open, or refuse it.
        with dog.phase("open", detail=blocks.reading):
            check_agreement("start", lambda: facts_of_start(cfg), START_TIMEOUT)
            newest = None if cfg.run.overwrite else load.newest_record(run_dir)
            history = start.recorded_history(cfg, newest)
            data = stream.open_data(
                cfg.data,
                seq_len=cfg.model.seq_len,
                seed=cfg.run.seed,
                history=history,
                say=say,
            )
            eval_sets = eval_stores(cfg, history, say=say)
        for store in (*data.stores, *eval_sets.values()):
            stack.callback(store.close)
        cfg = start.complete(cfg, data)
        total = start.last_step(cfg, data, newest, say)
        tok = start.check_tokenizers(data, eval_sets)
        source = None if newest else inherit.find_source(cfg, data.tokenizer_digest)
        for line in start_jax(cfg).lines:
            say(line)
        say(start.describe_dtypes(cfg))

        def found() -> dict[str, Any]:
            facts = start.facts_of_data(data, eval_sets, total, newest, source)
            return facts | facts_of_devices()

        with dog.phase("open"):
            check_agreement("data", found, LIMITS["open"])
        mesh = meshes.make_mesh(cfg.mesh)
        model = parameters.specs(cfg.model)
        tx = optimizer.build(cfg, total, parameters.abstract(model, cfg.train.param_dtype))
        shapes = states.abstract_state(cfg, tx, mesh)
        placed = states.shardings(shapes)
        train_step = step.make_train_step(cfg, tx, mesh, placed)  # refuses what does not divide
        if mesh.size > 1:
            say(f"mesh: {meshes.in_words(mesh.shape)}")
        say(attention.describe(cfg, meshes.platform(mesh), mesh.shape["context"]))
        if whole := sharding.describe_unsharded(mesh, model):
            say(whole)
        if (stages := mesh.shape["stage"]) > 1:
            say(turns.describe(cfg.train.accum_steps, stages, cfg.mesh.rounds))
        claim_folder(run_dir, cfg, say)

        # Compile: the step, beside all that has to be done before it.
        measure_peak = functools.partial(
            metrics.measure_matmul_peak,
            cfg.train.compute_dtype,
            mesh.devices.ravel().tolist(),
            start.num_processors(),
        )
        ahead = None
        with dog.phase("compile"):
            peak = measure_peak(again=False)  # first, while nothing else computes
            if newest is None or newest.step < total:
                position = newest.position if newest else 0
                ahead = start.compile_ahead(cfg, train_step, shapes, mesh, position)

        # Restore: the newest verified checkpoint, or the initial state in a folder without a run.
        ckpt = Checkpointer(
            run_dir / "ckpt",
            keep=cfg.checkpoint.keep,
            keep_every=cfg.checkpoint.keep_every,
            identity=start.identity(cfg, data),
            config_dict=config.to_dict(cfg),
            log=note,
        )
        stack.callback(ckpt.close)
        with dog.phase("compile"):
            restored = ckpt.restore_latest(shapes, allow=cfg.checkpoint.allow_change)
            if restored is None:
                check_never_saved(run_dir, cfg.checkpoint.every, say)
            if restored:
                state = restored.state
            else:
                state = inherit.start_state(cfg, tx, mesh, source, say, placed)
            if source and not restored:
                copy_kept(source.run_dir, run_dir)
        first = done = restored.record.step if restored else 0
        position = restored.record.position if restored else 0
        # Fewer, should this not be the newest checkpoint, and the batch have been another.
        spans = ramp.spans(cfg, done, position)
        total = min(total, ramp.whole_steps(spans, data.end))
        write_run_files(run_dir, cfg, tok)
        if restored:
            say(f"{run_dir}: resuming at step {done} of {total}")
            if changed := start.describe_devices(restored.record, mesh):
                say(changed)
        if cfg.optim.ema_decay:
            say(f"evaluations use the moving average of the weights, decay {cfg.optim.ema_decay:g}")
        if done >= total:
            say(
                f"{run_dir}: complete at step {done}; raise train.num_steps to go on, set "
                "run.overwrite=true to start again, or use another run.dir"
            )

        # No step before the compiler settings are proved to keep the gradients of this model right.
        if done < total:
            with dog.phase("compile"):
                say(start.check_gradients(cfg))
        flops = gpt.flops_per_token(cfg.model, True), gpt.flops_per_token(cfg.model, False)
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
            facts = functools.partial(start.facts_of_save, cfg, done, position)
            check_agreement("save", facts, LIMITS["save"])
            if unlike := start.compare_copies(done, state):
                log.note(unlike)
            ledger.advance(position)
            meta = log.state() | {"mixture": histories.record(data), "ledger": ledger.state()}
            ckpt.save(done, state, position=position, meta=meta)

        def evaluate(max_rows: int) -> dict[str, EvalResult]:
            weights = state.params if state.opt_state.ema is None else state.opt_state.ema
            with dog.phase("eval"), log.paused():
                results = evaluate_sets(cfg, weights, eval_sets, max_rows=max_rows)
            for name, result in results.items():
                log.record_eval(done, name, result)
            return results

        # Step: data, update, and then whatever is due.
        saver = Saver(ckpt, cfg.checkpoint.every, done if restored else -1, save)
        batches = pipeline.batches_of_spans(
            data,
            ramp.cut(spans, total),
            micro_batch=cfg.train.micro_batch,
            rows=lambda micro_rows: sharding.rows_of_process(mesh, micro_rows),
            prefetch=cfg.data.prefetch,
        )
        compiled_for = 0  # rows of an update
        with contextlib.closing(batches):
            while done < total and not stop.reached(done):
                dog.begin(done + 1)
                rows = ramp.batch_rows(cfg, position)
                compiles = rows != compiled_for
                with dog.phase("compile" if compiles else "step"):
                    # A change of batch opens another pipeline and compiles: neither is training.
                    with log.paused() if compiles else contextlib.nullcontext():
                        if compiles and compiled_for:
                            change = f"from step {done + 1} on {rows} rows per update"
                            log.note(f"{change} (train.batch_ramp)")
                        began = time.monotonic()
                        with dog.phase("data", detail=blocks.reading):
                            local = next(batches)
                        waited = 0.0 if compiles else time.monotonic() - began
                        batch = sharding.to_global(mesh, local)
                        if compiles:
                            update = start.compile_step(cfg, train_step, state, batch, ahead)
                            ahead = None  # holds a program
                        state, scalars = update(state, batch)
                        if compiles:
                            resume_collector()  # the start is over
                    done, position, compiled_for = done + 1, position + rows, rows
                    with dog.phase("wait"):
                        log.push(done, scalars, position=position, data_wait=waited)
                check_numerics(cfg, log.last, state)
                fault("step")
                if cfg.eval.every and done % cfg.eval.every == 0 and done < total:
                    evaluate(cfg.eval.max_rows)
                if saver.poll():
                    stop.ask_to_save()
                if stop.save_due(done) or saver.due(done):
                    with dog.phase("save"), log.paused():
                        saver.save(done)

        # Stop: the last step is durable before anything is said about it.
        resume_collector()
        with dog.phase("wait"):
            log.flush()
        check_numerics(cfg, log.last, state)
        with dog.phase("save"):
            saver.finish(done)
        # Nor does the evaluation of everything begin, which may take longer than there is time.
        if stop.reached(done, more=False):
            raise Interrupted(
                f"{stop.reason}: step {done} of {total} is saved in {run_dir}; the same command "
                f"{'without run.overwrite ' if cfg.run.overwrite else ''}"
                f"{'goes on from there' if done < total else 'evaluates it'}"
            )
        results = evaluate(0)
        baselines = {
            name: compressor_baselines(store_bytes(store, tok)) for name, store in eval_sets.items()
        }
        measure_peak()  # for the next run: the machine may have been busy when this one began
        return Outcome(str(run_dir), done, position, results, baselines)


def check_numerics(cfg: Config, fetched: dict[str, float], state: states.TrainState) -> None:
    """Raise NumericsError when too many steps in a row had a non-finite loss or gradient."""
    in_row = int(fetched.get("skipped_in_row", 0))
    if in_row >= cfg.train.max_nonfinite:
        advice = "lower optim.lr, or look at the data from the last checkpoint on"
        raise NumericsError(
            f"loss or gradient was not finite for {in_row} steps in a row (train.max_nonfinite), "
            f"which changed nothing; {start.describe_nonfinite(state) or advice}"
        )
