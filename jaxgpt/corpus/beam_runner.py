"""The partitions of `prepare` as an Apache Beam pipeline, for more work than one machine can do.

Create -> Reshuffle -> Map: a partition is prepared wherever Beam puts it, and writes its shards
into a folder of this attempt below the store, which all workers must see under the same path, as
they must the sources. Beam may retry a partition or do it twice: an attempt ends by renaming one
small JSON result into place, and of several complete ones any will do, for their bytes are the
same. The options (runner, workers, machines) are Beam's own and passed on untouched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxgpt import errors
from jaxgpt.corpus.workers import SPLITS, Task, prepare_partition, raise_all
from jaxgpt.durable import write_atomic
from jaxgpt.errors import ConfigError, DataError, JaxgptError

RESULTS = "results"
POLL = 0.2  # seconds between looks for new results
LATEST = 90.0  # seconds in which a network file system must show what a worker has written


def require_beam() -> None:
    """Raise ConfigError when Apache Beam is not installed."""
    if importlib.util.find_spec("apache_beam") is None:
        raise ConfigError("runner beam needs Apache Beam: pip install jaxgpt[beam]")


def run_tasks(
    tasks: list[Task], workers: int, *, options: Sequence[str] = ()
) -> Iterator[tuple[Task, dict]]:
    """Yield each task with its result as `workers.run_tasks` does, its shards under task.folder.

    How many workers there are is Beam's affair and in `options`, so `workers` is not used. A
    partition that cannot be prepared does not stop the others; all problems are raised at the end,
    as one error. Closing the iterator cancels the pipeline.
    """
    if not tasks:
        return
    folder = Path(tasks[0].folder)
    (folder / RESULTS).mkdir(exist_ok=True)
    job = _Job()
    pipeline = threading.Thread(target=_run_pipeline, args=(tasks, options, job), daemon=True)
    pipeline.start()
    waiting = {_result_name(task.index): task for task in tasks}
    problems: list[JaxgptError] = []
    latest = None
    try:
        while waiting:
            over = not pipeline.is_alive()  # asked before looking, so that nothing is overlooked
            for name in sorted(waiting.keys() & set(os.listdir(folder / RESULTS))):
                task, found = waiting.pop(name), json.loads((folder / RESULTS / name).read_bytes())
                if "problem" in found:
                    problems.append(getattr(errors, found["kind"])(found["problem"]))
                    continue
                for split in SPLITS:
                    for shard in found["result"][split]:
                        written = folder / found["attempt"] / split / shard["name"]
                        os.replace(written, folder / split / shard["name"])
                yield task, found["result"]
            latest = latest or (time.monotonic() + LATEST if over else None)
            if waiting and over and (job.error or time.monotonic() > latest):
                break
            if waiting:
                time.sleep(POLL)
        pipeline.join(LATEST)  # nothing of it may still be at work when its folder goes
    finally:
        if waiting and job.running:
            with contextlib.suppress(Exception):
                job.running.cancel()
    _raise(problems)
    if isinstance(job.error, SystemExit):
        raise ConfigError(f"Beam refuses the runner options {' '.join(options)}") from job.error
    if job.error:
        raise job.error
    if waiting:
        raise DataError(
            f"{len(waiting)} of {len(tasks)} partitions left no result in {folder}: all workers of "
            "the Beam runner must see this folder under this path"
        )


@dataclass
class _Job:
    """What the thread of a pipeline tells: the pipeline as it runs, and how it failed."""

    running: Any = None
    error: BaseException | None = None


def _raise(problems: list[JaxgptError]) -> None:
    for problem in problems:
        if not isinstance(problem, DataError):
            raise problem
    raise_all(problems)


def _run_pipeline(tasks: list[Task], options: Sequence[str], job: _Job) -> None:
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        pipeline = beam.Pipeline(options=PipelineOptions(list(options)))
        created = pipeline | "partitions" >> beam.Create(tasks) | beam.Reshuffle()
        created | "prepare" >> beam.Map(prepare_attempt)
        job.running = pipeline.run()  # the local runner returns when it is done, others at once
        job.running.wait_until_finish()
    except BaseException as error:  # also SystemExit, for an option that Beam cannot parse
        job.error = error


def prepare_attempt(task: Task) -> int:
    """Prepare a partition in a folder of its own, and name this attempt as one that is complete.

    What the user can mend is a result, too; anything else is raised, so that Beam tries again.
    """
    folder = Path(task.folder)
    attempt = f"attempt-{task.index:06}-{uuid.uuid4().hex[:12]}"
    (folder / attempt).mkdir()  # fails when the run was ended and its folder is gone
    for split in SPLITS:
        (folder / attempt / split).mkdir()
    try:
        found = {"result": prepare_partition(replace(task, folder=str(folder / attempt)))}
    except JaxgptError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)]
        found = {"kind": kinds[0], "problem": str(error)}
    name = _result_name(task.index)
    write_atomic(folder / attempt / name, json.dumps(found | {"attempt": attempt}).encode())
    os.replace(folder / attempt / name, folder / RESULTS / name)
    return task.index


def _result_name(index: int) -> str:
    return f"{index:06}.json"
