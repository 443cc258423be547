"""The ledger of consumed rows: equal to counting them, whole or with an interruption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stores import random_documents, write_store

from jaxgpt.config import DataConfig
from jaxgpt.data import ledger as ledgers
from jaxgpt.data.ledger import Ledger
from jaxgpt.data.pipeline import sample_rows
from jaxgpt.data.stream import Data, locate, open_data

T = 16


@pytest.fixture(params=["concat", "best_fit", "best_fit_whole"])
def data(tmp_path, request) -> Data:
    write_store(tmp_path / "a/train", [random_documents([7, 30, 1, 55, 12, 40], n) for n in (1, 2)])
    write_store(tmp_path / "b/train", [random_documents([25, 60, 3], 9)])
    table = {str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0}
    return open_data(DataConfig(store=table, packing=request.param), seq_len=T, seed=0)


def counted(data: Data, position: int) -> dict[str, float]:
    """Return the metrics of a position from the rows themselves."""
    source, _, _ = locate(data, np.arange(position))
    batch = sample_rows(data, np.arange(position))
    table = {}
    for number, name in enumerate(data.names):
        mine = source == number
        seen = int(batch.weights[mine].sum())
        rows = int(mine.sum())
        table |= {
            f"epoch/{name}": rows / data.sources[number].num_rows,
            f"seen/{name}": seen,
            f"padded/{name}": rows * T - seen,
            f"masked/{name}": 0,
        }
    return table


def test_the_ledger_is_what_counting_the_rows_gives(data, monkeypatch):
    monkeypatch.setattr(ledgers, "AT_ONCE", 10)
    ledger = Ledger(data, 0)
    for position in (1, 8, 33, 100):
        assert ledger.row(position) == counted(data, position)


def test_a_ledger_goes_on_from_a_checkpoint(data):
    first = Ledger(data, 0)
    first.advance(40)
    state = json.loads(json.dumps(first.state()))
    assert Ledger(data, 40, state).row(90) == counted(data, 90)


def test_a_single_source_needs_no_name(tmp_path):
    write_store(tmp_path, [random_documents([20])])
    data = open_data(DataConfig(store=str(tmp_path)), seq_len=T, seed=0)
    right = {"epoch": 2.0, "seen": 42, "padded": 22, "masked": 0}
    assert Ledger(data, 0).row(4) == right  # 2 rows of 16 and 5 tokens, twice
