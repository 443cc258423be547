"""Whether all processes of a run were started alike, found out before they compute together.

Processes that read different data, or stop at different steps, would not fail: they would train on
a mixture of both, or wait for each other for ever. With one process nothing happens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgpt.errors import DisagreementError

SHOWN = 12  # characters of a digest


def check_agreement(facts: Mapping[str, Sequence[str]]) -> None:
    """Raise DisagreementError on every process unless all of them have the same facts.

    `facts` are words or digests by what they belong to, a configuration key for example; the
    message names the first that differs, a process that has another than process 0, and both.
    """
    if jax.process_count() == 1:
        return
    mine = {key: list(values) for key, values in facts.items()}
    everyone = [json.loads(text) for text in _gather(json.dumps(mine))]
    first = everyone[0]
    for number, theirs in enumerate(everyone):
        for key in (*first, *theirs):
            if theirs.get(key) != first.get(key):
                raise DisagreementError(
                    f"{key}: process {number} has {_words(theirs.get(key))}, process 0 has "
                    f"{_words(first.get(key))}; start all with the same configuration, on the "
                    "same files"
                )


def _words(values: list[str] | None) -> str:
    return ", ".join(value[:SHOWN] for value in values or ()) or "none"


def _gather(text: str) -> list[str]:
    """Return the texts of all processes, in their order; they may differ in length."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.pad(data, (0, int(sizes.max()) - data.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes.tolist(), strict=True)]
