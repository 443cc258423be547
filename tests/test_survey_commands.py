"""The verbs that count and verify stores: results, text for people, and exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from verbs import B, T, ask, make_two_stores, open_both, text_of, words

from jaxgpt import cli
from jaxgpt.data import stream
from jaxgpt.data.store import open_store


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_two_stores(tmp_path_factory.mktemp("verbs"))


def test_stats_of_a_store_are_one_object_and_a_few_tables(capsys, root):
    facts = ask(capsys, "data", "stats", str(root / "store"))
    assert facts["splits"]["train"]["documents"] == open_store(root / "store").num_docs
    text = text_of(capsys, "data", "stats", str(root / "store"))
    assert f"{facts['splits']['train']['tokens']:,}" in text and "single bytes" in text


def test_stats_of_a_configuration_say_how_the_run_uses_its_stores(capsys, root):
    data = open_both(root, data__packing="best_fit")
    usage = ask(capsys, "data", "stats", *words(root, data__packing="best_fit"))["run"]
    assert (usage["steps"], usage["data_ends_after_step"]) == (30, None)
    source, _, _ = stream.locate(data, np.arange(30 * B))
    for number, name in enumerate(data.names):
        rows = data.sources[number]
        (found,) = [s for s in usage["stores"] if s["store"] == name]
        assert found["rows_per_epoch"] == rows.num_rows
        assert found["epochs"] == pytest.approx((source == number).sum() / rows.num_rows)
        padding = rows.num_rows * T - rows.store.stream_len
        assert found["padding_share"] == pytest.approx(padding / (rows.num_rows * T))
        assert found["truncated_tokens"] == 0 and found["runs_out_in_step"] is None


def test_stats_say_where_each_store_runs_out(capsys, root):
    changes = {"data__max_epochs": 2.0, "data__run_out": "drop", "train__num_steps": 0}
    usage = ask(capsys, "data", "stats", *words(root, **changes))["run"]
    data = open_both(root, **changes)
    source, _, _ = stream.locate(data, np.arange(data.end))
    assert usage["steps"] == usage["data_ends_after_step"] == data.end // B
    for number, name in enumerate(data.names):
        (found,) = [s for s in usage["stores"] if s["store"] == name]
        last = int(np.flatnonzero(source == number)[-1])
        assert found["runs_out_at_position"] == last + 1
        assert found["runs_out_in_step"] == last // B + 1
    assert usage["rows_left_over"] == data.end % B
    text = text_of(capsys, "data", "stats", *words(root, **changes))
    assert f"ends after step {data.end // B}" in text


def test_verify_exits_with_65_and_names_each_damaged_file(capsys, root, tmp_path):
    store = Path(shutil.copytree(root / "store", tmp_path / "store"))
    assert ask(capsys, "data", "verify", str(store))["damaged"] == 0
    damaged = [next(store.glob("train/*.shard")), next(store.glob("valid/*.shard"))]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert cli.main(["data", "verify", str(root / "second"), str(store)]) == 65
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("jaxgpt: error: ")]
    assert len(lines) == 2 and all(str(p) in line for p, line in zip(damaged, lines, strict=True))
    assert "2 wrong" in captured.out and "nothing wrong" in captured.out
    found = ask(capsys, "data", "verify", str(root / "second"), str(store))
    assert (found["damaged"], found["exit_code"]) == (2, 65)
    assert [len(s["problems"]) for s in found["stores"]] == [0, 2]


def test_stats_of_several_stores_are_those_of_each(capsys, root):
    names = [str(root / "store"), str(root / "second")]
    facts = ask(capsys, "data", "stats", *names)["stores"]
    assert facts == {name: ask(capsys, "data", "stats", name) for name in names}


def test_stats_say_from_which_row_on_each_stage_holds(capsys, root):
    first, second = (str(root / name) for name in ("store", "second"))
    stages = f'data.stages={{"8" = {{"{first}" = 1, "{second}" = 4}}}}'
    lines = text_of(capsys, "data", "stats", *words(root), stages).splitlines()
    assert sum(line.startswith("from row 0 on: ") for line in lines) == 1
    assert f"from row 8 on: 1 {first} + 4 {second}" in lines
