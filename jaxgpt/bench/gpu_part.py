"""One part of `jaxgpt bench gpu`, in a process of its own: `python -m jaxgpt.bench.gpu_part KIND`.

`device` says what JAX has here, `gradients` compares a small model with a reference, `step` times
the train step with the whole loss at once, which no configuration asks for. Each prints one line of
JSON. What else is timed goes through `jaxgpt bench step`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any

from jaxgpt.bench import shapes
from jaxgpt.errors import JaxgptError
from jaxgpt.runtime.environment import prepare_environment
from jaxgpt.runtime.leaving import error_line

# A leaf's error as a share of its norm, see `training.probe`: there bfloat16, which keeps 8 bits of
# a number, has 0.1. Hopper multiplies float32 in TF32, which keeps 11: an eighth of it. A CPU has
# all 24, and only the order of sums differs.
TOLERANCE = {"bfloat16": 0.1, "tf32": 0.1 / 8, "float32": 1e-3}
CHUNKS = 4  # of the loss: more than one, or the scan over them is not tested


def main(argv: list[str] | None = None) -> int:
    """Run the part that the words ask for and print its figures; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxgpt.bench.gpu_part")
    parser.add_argument("kind", choices=("device", "gradients", "step"))
    parser.add_argument("--whole-loss", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)  # words of the configuration come last
    prepare_environment(argv)
    try:
        print(json.dumps(run(args)), flush=True)
    except JaxgptError as error:
        print(error_line(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a part."""
    from jaxgpt.runtime.devices import start_jax

    cfg = shapes.load("gpt2", "bf16", args.overrides)
    kind = start_jax(cfg).device_kind
    if args.kind == "device":
        return device()
    if args.kind == "gradients":
        return {"device": kind, **gradients(cfg, whole_loss=args.whole_loss)}
    with loss_at_once() if args.whole_loss else nullcontext():
        from jaxgpt.bench import step

        found = step.measure(cfg, steps=args.steps, warm_up=args.warm_up, say=say, check=False)
    return {"device": kind, **found}


def device() -> dict[str, Any]:
    """Return what JAX found, and the versions that figures depend on."""
    import jax
    import jaxlib

    first = jax.devices()[0]
    said = ("compute_capability", "core_count", "shared_memory_per_block_optin")
    return {
        "platform": first.platform,
        "device_kind": first.device_kind,
        "num_devices": len(jax.devices()),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform_version": " ".join(first.client.platform_version.split()),
        "torch": version("torch"),
        **{name: getattr(first, name) for name in said if hasattr(first, name)},
    }


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gradients(cfg: Any, *, whole_loss: bool) -> dict[str, Any]:
    """Return how far loss and gradients of a small twin of `cfg` are off on the first device.

    The reference is float32 at the highest precision, with the whole score matrix and the whole
    loss, computed by the CPU, which shares no kernel with a GPU. Keys: `loss_error`, `leaf_error`
    (of the worst, `leaf`), `tolerance`, all shares, and `right`.
    """
    import jax

    from jaxgpt.bench.step import random_batch
    from jaxgpt.data.packing import Batch
    from jaxgpt.model import gpt
    from jaxgpt.parallel.xla_options import of_dtype
    from jaxgpt.training import comparison, probe
    from jaxgpt.training import step as steps

    here = jax.local_devices()[0]
    small = probe.twin(cfg)
    # Longer than a block of accelerators, 512 rows.
    small = dataclasses.replace(
        small, model=dataclasses.replace(small.model, seq_len=min(cfg.model.seq_len, 1024))
    )
    batch = random_batch(small)
    if cfg.data.document_mask:
        import numpy as np

        documents = comparison.random_documents(np.random.default_rng(1), batch.tokens.shape)
        batch = Batch(batch.tokens, batch.targets, batch.weights, *documents)

    def of(cfg: Any, device: Any, chunk: int) -> tuple[Any, float]:
        options = of_dtype(cfg.train.compute_dtype, device.platform) | cfg.train.xla_options
        compute = functools.partial(steps.gradients, cfg, step=0, chunk=chunk)
        program = jax.jit(compute, compiler_options=options)
        grads, sums = jax.device_get(program(*jax.device_put((params, batch), device)))
        return grads, float(sums["total"])

    cpu = cpu_or(here)
    with jax.default_device(cpu):
        params = jax.jit(functools.partial(gpt.init, small.model))(jax.random.key(0))
        right = with_train(small, compute_dtype="float32", attention="reference", xla_options={})
        with jax.default_matmul_precision("highest"):
            right_grads, right_loss = of(right, cpu, 0)
    chunk = 0 if whole_loss else max(1, batch.tokens.size // CHUNKS)
    with jax.default_device(here):
        grads, loss = of(small, here, chunk)
    dtype = cfg.train.compute_dtype
    tolerance = TOLERANCE["tf32" if (dtype, here.platform) == ("float32", "gpu") else dtype]
    found = compared((grads, loss), (right_grads, right_loss), tolerance)
    return found | {"reference": f"float32 on {cpu.platform}"}


def compared(
    tested: tuple[Any, float], right: tuple[Any, float], tolerance: float
) -> dict[str, Any]:
    """Return how far (gradients, loss) are off, and whether that is within the tolerance."""
    from jaxgpt.training.comparison import leaf_errors, named_leaves, share

    errors = leaf_errors(named_leaves(tested[0]), named_leaves(right[0]))
    leaf = max(errors, key=errors.__getitem__)
    loss_error = share(abs(tested[1] - right[1]), abs(right[1]))
    return {
        "loss_error": loss_error,
        "leaf": leaf,
        "leaf_error": errors[leaf],
        "tolerance": tolerance,
        "right": max(loss_error, errors[leaf]) <= tolerance,
    }


def cpu_or(other: Any) -> Any:
    """Return the CPU as a device of JAX, or `other` where JAX_PLATFORMS leaves it out."""
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return other


def with_train(cfg: Any, **values: Any) -> Any:
    """Return a configuration with other values of its section [train]."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **values))


@contextmanager
def loss_at_once() -> Iterator[None]:
    """Make train steps that are built inside hold all logits at once, by plain differentiation."""
    from jaxgpt.training import step as steps

    chunked = steps.gradients
    steps.gradients = functools.partial(chunked, chunk=0)
    try:
        yield
    finally:
        steps.gradients = chunked


def say(line: str) -> None:
    """Print one line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
