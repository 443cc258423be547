"""The verbs that show rows and find documents: results, text for people, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from verbs import B, T, ask, make_two_stores, open_both, refused, text_of, words

from jaxgpt import config
from jaxgpt.checkpoint import commit
from jaxgpt.checkpoint.record import Record
from jaxgpt.data import history, stream
from jaxgpt.data.pipeline import sample_rows
from jaxgpt.data.store import open_store
from jaxgpt.tokenization import tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_two_stores(tmp_path_factory.mktemp("verbs"))


# data show.


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_show_has_the_ids_and_the_text_of_the_row_that_training_reads(capsys, root, packing):
    tok = tokenizer.load(root / "store/tokenizer.model")
    step, row = 5, 3
    position = (step - 1) * B + row - 1
    tokens = sample_rows(open_both(root, data__packing=packing), np.array([position])).tokens[0]
    args = words(root, data__packing=packing)
    found = ask(capsys, "data", "show", *args, "--step", str(step), "--row", str(row))["rows"]
    assert found == ask(capsys, "data", "show", *args, "--position", str(position))["rows"]
    (shown,) = found
    assert (shown["position"], shown["step"], shown["batch_row"]) == (position, step, row)
    ids = []
    for part in shown["parts"]:
        assert part["row_start"] == len(ids)
        ids += ([] if part["continues_before"] else [tok.eos_id]) + part["ids"]
        assert part["text"] == tok.decode(part["ids"])
        assert part["row_stop"] == len(ids)
    assert ids + [0] * shown["padding"] == tokens.tolist()


def test_show_of_a_step_has_all_its_rows_in_order(capsys, root):
    data = open_both(root)
    rows = ask(capsys, "data", "show", *words(root), "--step", "3")["rows"]
    source, epoch, row = stream.locate(data, np.arange(2 * B, 3 * B))
    assert [r["position"] for r in rows] == list(range(2 * B, 3 * B))
    assert [r["batch_row"] for r in rows] == [1, 2, 3, 4]
    assert [r["store"] for r in rows] == [data.names[s] for s in source]
    assert [r["row"] for r in rows] == row.tolist() and [r["epoch"] for r in rows] == epoch.tolist()
    text = text_of(capsys, "data", "show", *words(root), "--step", "3")
    assert len(text.splitlines()) == 1 + B and "\x1b" not in text


def test_the_file_of_a_shown_document_holds_its_text(capsys, root):
    for position in range(12):
        (row,) = ask(capsys, "data", "show", *words(root), "--position", str(position))["rows"]
        for part in row["parts"]:
            assert part["text"] in Path(part["origin"]).read_bytes().decode()


def test_text_of_documents_cannot_act_on_the_terminal(capsys, root):
    args = words(root, train__num_steps=100)
    found = ask(capsys, "data", "find", *args, "--doc", str(root / "corpus/escapes.txt"))
    shown = ""
    for position in {s["position"] for s in found["sightings"] if s["epoch"] == 0}:
        text = text_of(capsys, "data", "show", *args, "--position", str(position))
        assert all(c.isprintable() or c in "\n\t" for c in text)
        shown += text
    assert (shown.count("\\x1b"), shown.count("\\r")) == (2, 1)  # of ESCAPES, seen whole


def test_held_out_rows_are_shown_as_evaluation_reads_them(capsys, root):
    args = [*words(root, data__packing="best_fit"), "--split", "valid", "--store", "store"]
    store = open_store(root / "store", "valid")
    (row,) = ask(capsys, "data", "show", *args, "--position", "1")["rows"]
    opening = [[] if p["continues_before"] else [store.eos_id] for p in row["parts"]]
    ids = [i for e, p in zip(opening, row["parts"], strict=True) for i in (*e, *p["ids"])]
    assert ids == store.read(16, 32).tolist()
    assert (row["row"], row["epoch"], row["step"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--step", "1", "--row", "5"], 64, "1 to 4"),
        (["--step", "0"], 64, "at least 1"),
        (["--step", "9000000000000000000"], 64, "ends after step"),
        (["data.max_epochs=1", "--step", "100000"], 64, "ends after step"),
        (["data.max_epochs=1", "--position", "100000"], 64, "the last position is"),
        ([], 64, "--step"),
        (["--step", "1", "--position", "1"], 64, "--position"),
        (["--position", "1", "--row", "1"], 64, "--step"),
        (["--split", "valid", "--step", "1"], 64, "--position"),
        (["--split", "valid", "--position", "1"], 64, "--store"),
        (["--store", "second", "--step", "1"], 64, "--split valid"),
    ],
)
def test_rows_that_do_not_exist_are_refused_in_one_line(capsys, root, args, code, said):
    assert said in refused(capsys, code, "data", "show", *words(root), *args)


# data find.


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_find_and_show_agree(capsys, root, packing):
    args = words(root, data__packing=packing)
    origin = str(root / "more/07.txt")
    found = ask(capsys, "data", "find", *args, "--doc", origin)
    shown = set()
    for step in range(1, 31):
        for row in ask(capsys, "data", "show", *args, "--step", str(step))["rows"]:
            for part in row["parts"]:
                if part["origin"] == origin:
                    shown.add((step, row["batch_row"], part["row_start"], part["offset"]))
    keys = ("step", "batch_row", "row_start", "offset")
    assert {tuple(s[key] for key in keys) for s in found["sightings"]} == shown
    assert len(shown) == found["count"] > 1


def test_find_looks_at_the_steps_asked_for_and_counts_beyond_the_limit(capsys, root):
    args = ["data", "find", *words(root), "--store", "second", "--doc", "1"]
    everything = ask(capsys, *args)
    assert everything["steps"] == [1, 30]
    part = ask(capsys, *args, "--first-step", "4", "--steps", "20")
    assert part["sightings"] == [s for s in everything["sightings"] if 4 <= s["step"] <= 20]
    few = ask(capsys, *args, "--limit", "2")
    assert few["sightings"] == everything["sightings"][:2] and few["count"] == everything["count"]
    assert few["count"] > 2
    assert f"seen {few['count']} times" in text_of(capsys, *args)


def test_find_says_what_packing_cut_off(capsys, root):
    args = ["data", "find", *words(root, data__packing="best_fit_whole"), "--store", "second"]
    store = open_store(root / "second")
    spans = [store.document_span(document) for document in range(store.num_docs)]
    document, left_out = next((i, b - a - T) for i, (a, b) in enumerate(spans) if b - a > T)
    found = ask(capsys, *args, "--doc", str(document))
    assert found["inputs_left_out"] == left_out and found["inputs"] == left_out + T
    text = text_of(capsys, *args, "--doc", str(document))
    assert f"last {left_out} tokens are in no row" in text


GROWING = {"train__batch_ramp": {"100": 2, "300": 3}}  # 2 rows at 0, 2, 4, 6; 3 at 8, 11, 14, 17


def test_steps_of_a_growing_batch_are_shown_and_found_where_training_has_them(capsys, root):
    args = words(root, **GROWING)
    steps = {}
    for step in (1, 4, 5, 8, 9, 10):
        shown = ask(capsys, "data", "show", *args, "--step", str(step))["rows"]
        steps[step] = [row["position"] for row in shown]
        assert [row["batch_row"] for row in shown] == list(range(1, len(shown) + 1))
    assert steps == {
        1: [0, 1], 4: [6, 7], 5: [8, 9, 10], 8: [17, 18, 19], 9: [20, 21, 22, 23],
        10: [24, 25, 26, 27],
    }  # fmt: skip
    found = ask(capsys, "data", "find", *args, "--store", "second", "--doc", "1", "--steps", "8")
    plain = ask(capsys, "data", "find", *words(root), "--store", "second", "--doc", "1")
    assert [s["position"] for s in found["sightings"]] == [
        s["position"] for s in plain["sightings"] if s["position"] < 20
    ]
    assert "rows 1 to 2" in refused(capsys, 64, "data", "show", *args, "--step", "4", "--row", "3")


def test_stats_of_a_growing_batch_count_its_steps(capsys, root):
    changes = {"data__max_epochs": 1.0, "data__run_out": "drop", "train__num_steps": 0}
    args, end = words(root, **GROWING, **changes), open_both(root, **changes).end
    usage = ask(capsys, "data", "stats", *args)["run"]
    more, left = divmod(end - 20, B)
    assert (usage["steps"], usage["rows_left_over"]) == (8 + more, left)
    assert "2 until 100 tokens, then 3 until 300 tokens, then 4 a step" in text_of(
        capsys, "data", "stats", *args
    )


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--doc", "nowhere"], 65, "nowhere"),
        (["--doc", "3"], 65, "name its store"),
        (["--doc", "3000", "--store", "second"], 65, "documents 0.."),
        (["--doc", ".txt"], 65, "fit"),
        (["--doc", "3", "--store", "third"], 65, "third"),
        (["--doc", "3", "train.num_steps=0", "--store", "second"], 64, "--steps"),
        ([], 64, "--doc"),
    ],
)
def test_documents_that_are_not_there_are_refused_in_one_line(capsys, root, args, code, said):
    assert said in refused(capsys, code, "data", "find", *words(root), *args)


# A run folder.


def save_run(root: Path, folder: Path, batch: int, step: int, position: int, **changes) -> None:
    """Write what a run folder has of data: its configuration, and a record of its mixture."""
    cfg = config.load(None, words(root, train__global_batch=batch, **changes))
    data = stream.open_data(cfg.data, seq_len=T, seed=0)
    (folder / "ckpt").mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml(cfg))
    record = Record(
        step=step,
        position=position,
        finite=True,
        layout="none",
        leaves=(),
        files=(),
        identity={},
        meta={"mixture": json.loads(json.dumps(history.record(data)))},
        config={},
        mesh={},
        versions={},
    )
    commit.publish(folder / "ckpt", record)


def test_a_run_folder_is_shown_by_the_mixture_it_recorded(capsys, root, tmp_path):
    save_run(root, tmp_path / "run", B, 10, 10 * B)
    changed = f'data.store={{"{root / "store"}" = 1, "{root / "second"}" = 3}}'
    args = [str(tmp_path / "run"), changed, 'checkpoint.allow_change=["mixture"]']
    before = [ask(capsys, "data", "show", *words(root), "--step", s)["rows"] for s in ("2", "20")]
    now = [ask(capsys, "data", "show", *args, "--step", s)["rows"] for s in ("2", "20")]
    assert now[0] == before[0] and now[1] != before[1]
    assert "mixture" in refused(capsys, 64, "data", "show", *args[:2], "--step", "2")


def test_steps_after_a_change_of_batch_are_counted_from_the_checkpoint(capsys, root, tmp_path):
    save_run(root, tmp_path / "run", 8, 10, 10 * B)  # ten steps of 4 rows, now 8 a step
    show = ["data", "show", str(tmp_path / "run")]
    (row,) = ask(capsys, *show, "--step", "11", "--row", "2")["rows"]
    assert row["position"] == 10 * B + 1
    assert "--position" in refused(capsys, 64, *show, "--step", "10")
    (early,) = ask(capsys, *show, "--position", "3")["rows"]
    assert (early["step"], early["position"]) == (None, 3)


def test_a_folder_that_is_no_run_is_refused(capsys, root, tmp_path):
    line = refused(capsys, 64, "data", "show", str(tmp_path), "--step", "1")
    assert "config.toml" in line and str(tmp_path) in line


def test_a_token_store_in_place_of_a_run_is_told_how_to_look_into_it(capsys, root):
    store = str(root / "store")
    line = refused(capsys, 64, "data", "find", store, "--doc", "3")
    assert f"data.store={store}" in line
