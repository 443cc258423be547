"""A train step in PyTorch to stand beside ours: same sizes, same FLOPs, what a good user would do.

`python -m jaxgpt.bench.torch_step --layers 12 ...` prints one line of JSON: torch.compile, fused
scaled_dot_product_attention, bfloat16 autocast over float32 weights, fused AdamW, clipping by the
global norm. The model is that of `bench.shapes`: learned positions, LayerNorm and products without
biases, tanh GELU, the head tied to the embedding. JAX is not imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from jaxgpt.bench import timing

BETAS, DECAY, RATE, CLIP, STD = (0.9, 0.95), 0.1, 1e-3, 1.0, 0.02
MISSING = "PyTorch is not installed for this python; the comparison is left out"


def main(argv: list[str] | None = None) -> int:
    """Measure what the words ask for and print it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxgpt.bench.torch_step")
    for name in ("layers", "width", "heads", "context", "vocab", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args(argv)
    try:
        import torch
    except ImportError:
        print(json.dumps({"missing": MISSING}))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"missing": f"PyTorch {torch.__version__} finds no GPU"}))
        return 0
    print(json.dumps(measure(args)), flush=True)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return rates and memory of `args.steps` updates, with the keys of `bench.step`.

    One update is on its way while the one before is waited for, as with ours.
    """
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in float32
    weights = make_weights(args)
    flat = [w for block in weights["blocks"] for w in block.values()]
    flat += [weights[name] for name in ("tokens", "positions", "norm")]
    fused = torch.optim.AdamW(flat, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    compute = loss_of if args.eager else torch.compile(loss_of)
    shape = (args.rows, args.context)
    ids, targets = (torch.randint(0, args.vocab, shape, device=args.device) for _ in range(2))
    bf16 = args.dtype == "bf16"

    def update() -> Any:
        with torch.autocast(args.device, torch.bfloat16, enabled=bf16):
            loss = compute(weights, ids, targets, args.heads)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flat, CLIP)
        fused.step()
        fused.zero_grad(set_to_none=True)
        return loss.detach(), mark(args.device)

    began = time.perf_counter()
    loss, pending = update()
    wait(pending)
    compile_seconds = time.perf_counter() - began
    ends = []
    loss, pending = update()
    for _ in range(args.warm_up + args.steps):
        last = pending
        loss, pending = update()
        wait(last)
        ends.append(time.perf_counter())
    wait(pending)
    timed = ends[-args.steps - 1 :]
    seconds = [end - start for start, end in zip(timed[:-1], timed[1:], strict=True)]
    found = {
        **timing.rates(args.rows * args.context, seconds),
        "tokens_per_step": args.rows * args.context,
        "parameters": sum(w.numel() for w in flat),
        "loss": round(float(loss), 4),
        "compile_seconds": round(compile_seconds, 2),
        "mode": "eager" if args.eager else "compile",
        "framework": f"torch {torch.__version__}",
    }
    if args.device == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        found["device"] = torch.cuda.get_device_name()
    return found


def make_weights(args: argparse.Namespace) -> dict[str, Any]:
    """Return float32 weights, normal with deviation 0.02; those of norms are 1."""
    import torch

    def matrix(rows: int, columns: int) -> Any:
        w = torch.empty(rows, columns, device=args.device).normal_(std=STD)
        return w.requires_grad_()

    def ones() -> Any:
        return torch.ones(args.width, device=args.device, requires_grad=True)

    D = args.width
    blocks = [
        {
            "norm1": ones(), "qkv": matrix(3 * D, D), "out": matrix(D, D),
            "norm2": ones(), "up": matrix(4 * D, D), "down": matrix(D, 4 * D),
        }
        for _ in range(args.layers)
    ]  # fmt: skip
    return {
        "tokens": matrix(args.vocab, D),
        "positions": matrix(args.context, D),
        "blocks": blocks,
        "norm": ones(),
    }


def loss_of(weights: dict[str, Any], ids: Any, targets: Any, heads: int) -> Any:
    """Return the mean cross-entropy, nats, of targets [B, T] after ids [B, T]."""
    from torch.nn import functional as F

    B, T = ids.shape
    x = F.embedding(ids, weights["tokens"]) + weights["positions"]  # [B, T, D]
    D = x.shape[-1]
    for w in weights["blocks"]:
        qkv = F.linear(F.layer_norm(x, (D,), w["norm1"]), w["qkv"])
        q, k, v = qkv.view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)  # [B, N, T, H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(B, T, D), w["out"])
        up = F.linear(F.layer_norm(x, (D,), w["norm2"]), w["up"])
        x = x + F.linear(F.gelu(up, approximate="tanh"), w["down"])
    logits = F.linear(F.layer_norm(x, (D,), weights["norm"]), weights["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def mark(device: str) -> Any:
    """Return an event behind all work that a GPU has been given; None: a CPU has done it."""
    if device == "cpu":
        return None
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def wait(event: Any) -> None:
    """Wait for an event of `mark`."""
    if event is not None:
        event.synchronize()


if __name__ == "__main__":
    sys.exit(main())
