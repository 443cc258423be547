"""What a block keeps for its backward pass, and what it computes again: by names of tensors.

With `model.remat = "full"` the backward pass of a block starts from its input alone. Tensors named
in `model.remat_save` are kept as well, those in `model.remat_offload` in the host's memory, which
is larger and slower: for a 7B model of 4,096 tokens a row, one named tensor of width D is 32 MiB a
row and layer in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.config import ModelConfig

Array = jax.Array

# Where the copy goes and comes from, in XLA's names of memories.
DEVICE, HOST = "device", "pinned_host"


def named(x: Array, name: str) -> Array:
    """Return x under a name of `validation.SAVED`, or `block_in`."""
    return checkpoint_name(x, name)


def again(cfg: ModelConfig, f: Callable[..., Array]) -> Callable[..., Array]:
    """Return f, which the backward pass computes again from its inputs and keeps nothing of."""
    # Where all layers are in one scan, XLA sees one pass at a time, and finds nothing done twice;
    # a barrier would hold f and its readers apart: on a v5p a tenth of a block's backward pass.
    apart = cfg.stacked and not cfg.aux_layers and not (cfg.sliding_window and cfg.global_every)
    return jax.checkpoint(f, prevent_cse=not (apart and cfg.remat == "none"))


def cheap(cfg: ModelConfig, platform: str, f: Callable[..., Array]) -> Callable[..., Array]:
    """Return f, computed again where its float32 intermediates would wait in its inputs' place.

    They would where blocks keep what they compute: in a scan over layers, which keeps what JAX
    saves (of 8 layers of GPT-2 355M on an H200 a third of all memory), and on CPU (of a small GPT a
    quarter). XLA for GPU and TPU sees both passes of unrolled layers, and does as well by itself.
    """
    kept = cfg.remat == "none" and (cfg.stacked or platform == "cpu")
    return again(cfg, f) if kept else f


def policy(cfg: ModelConfig, platform: str) -> Callable[..., Any] | None:
    """Return what `jax.checkpoint` keeps of a block; None: only its input.

    A CPU has no other memory to move tensors to: there they are kept where they are.
    """
    save, offload = list(cfg.remat_save), list(cfg.remat_offload)
    if platform == "cpu":
        save, offload = save + offload, []
    if not save and not offload:
        return None
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=offload,
        offload_src=DEVICE,
        offload_dst=HOST,
    )
