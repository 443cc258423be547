"""The stream is frozen: another release, library or Python may not change what a position holds.

Where one of these digests must change, raise the version it depends on (`order.VERSION`,
`best_fit.VERSION`, `stream.STREAM_VERSION`, `blocks.VERSION`): runs and stores made before are
then refused instead of going on with other data. `python tests/test_stream_golden.py FOLDER` makes
new ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from stores import write_store

from jaxgpt.config import DataConfig
from jaxgpt.data.pipeline import sample_rows
from jaxgpt.data.stream import open_data

GOLDEN = Path(__file__).parent / "golden" / "stream.json"
T = 16
CASES = list(product(("concat", "best_fit", "best_fit_whole"), ("global", "block", "sequential")))


def documents(number: int) -> list[list[list[int]]]:
    """Return shards of documents whose lengths and ids follow from arithmetic alone."""
    lengths = [1 + (7 * i * i + 13 * number) % 41 for i in range(30)]
    found = [[3 + (5 * i + 11 * j + number) % 61 for j in range(n)] for i, n in enumerate(lengths)]
    return [found[:11], found[11:12], found[12:]]


def digests(folder: Path) -> dict[str, str]:
    """Return the identity of two stores, and what positions hold by packing and order."""
    found = {name: write_store(folder / name, documents(n)) for n, name in enumerate("ab")}
    names = [str(folder / name) for name in "ab"]
    for packing, order in CASES:
        cfg = DataConfig(
            store={names[0]: 0.7, names[1]: 0.3},
            stages={"100": {names[0]: 1.0, names[1]: 2.0}},
            packing=packing,
            order=order,
            document_mask=True,
        )
        data = open_data(cfg, seq_len=T, seed=5)
        positions = [*range(300), *(2**k + 1 for k in range(31, 61, 7))]
        batch = sample_rows(data, np.array(positions))
        leaves = (batch.tokens, batch.targets, batch.weights, batch.segment_ids, batch.positions)
        content = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)
        found[f"{packing} {order}"] = hashlib.sha256(content).hexdigest()
        found[f"{packing} {order} identity"] = data.digest
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    return digests(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else ())
def test_the_stream_is_what_it_always_was(found, case):
    assert found[case] == json.loads(GOLDEN.read_text())[case]


def test_every_packing_and_order_is_frozen(found):
    assert found.keys() == json.loads(GOLDEN.read_text()).keys()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(digests(Path(sys.argv[1])), indent=1) + "\n")
