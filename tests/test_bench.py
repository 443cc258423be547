"""The verb `jaxgpt bench`: what its measurements have in common, and comparing kept results."""

from __future__ import annotations

import json
import sys

import pytest
from test_bench_history import result

from jaxgpt import cli
from jaxgpt.bench import against, attention, loss
from jaxgpt.commands import bench, bench_shared
from jaxgpt.errors import ConfigError
from jaxgpt.options import build_parser

TINY_LOSS = ("bench", "loss", "--rows=1", "--context=8", "--width=4", "--vocab=16", "--dtype=f32",
             "--chunk=8", "--repeats=2")  # fmt: skip


def actions() -> dict:
    """The parsers of what `jaxgpt bench` can do."""
    verbs = build_parser()._subparsers._group_actions[0].choices
    return verbs["bench"]._subparsers._group_actions[0].choices


def parsed(*words: str):
    args, rest = build_parser().parse_known_args(["bench", *words])
    assert not rest
    return args


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict, dict]:
    """What a tiny measurement returns, and the line that --save kept of it."""
    path = tmp_path_factory.mktemp("saved") / "results.jsonl"
    found = bench.bench(parsed(*TINY_LOSS[1:], "--json", f"--save={path}"))
    return found, json.loads(path.read_text())


def test_a_kept_result_is_the_one_printed_with_date_version_and_options(saved):
    found, line = saved
    assert found.items() <= line.items()
    assert line["verb"] == "loss"
    assert line["options"]["vocab"] == 16
    assert {"date", "jaxgpt", "commit", "code"} <= set(line)


def test_options_that_were_not_given_are_kept_as_they_came_out(monkeypatch, tmp_path):
    monkeypatch.setattr(loss, "measure", lambda **options: {"ways": [], "tokens_per_sec_median": 1})
    path = tmp_path / "results.jsonl"
    bench.bench(parsed("loss", "--json", f"--save={path}"))
    options = json.loads(path.read_text())["options"]
    assert (options["rows"], options["context"], options["width"]) == (16, 256, 384)


def test_a_result_is_kept_even_if_the_reader_of_the_output_left(monkeypatch, tmp_path):
    def closed(*text, **options):
        raise BrokenPipeError

    monkeypatch.setattr(loss, "measure", lambda **options: {"ways": [], "tokens_per_sec_median": 1})
    monkeypatch.setattr(bench_shared, "show", closed)
    assert cli.main([*TINY_LOSS, f"--save={tmp_path}/results.jsonl"]) == 0
    assert json.loads((tmp_path / "results.jsonl").read_text())["tokens_per_sec_median"] == 1


def test_a_result_has_the_libraries_and_the_machine(saved):
    places = {"framework", "python", "device", "devices", "processor", "cores"}
    assert places <= set(saved[0])


def test_with_json_one_object_is_printed_and_without_it_a_table(monkeypatch, capsys):
    found = {"tokens_per_sec_median": 1234.56, "tokens_per_sec_best": 2.0, "mfu": 0.25,
             "temporary_bytes": 10, "compile_seconds": 1.0, "deviation": 0.0}  # fmt: skip
    ways = [{"way": "whole", "chunk_tokens": 8, **found}]
    monkeypatch.setattr(loss, "measure", lambda **options: found | {"ways": ways})
    assert cli.main([*TINY_LOSS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_sec_median"] == 1234.56
    assert cli.main([*TINY_LOSS]) == 0
    assert "1,235" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_measuring(monkeypatch, tmp_path, capsys):
    def measure(**options):
        raise AssertionError("measured")

    monkeypatch.setattr(loss, "measure", measure)
    assert cli.main([*TINY_LOSS, f"--save={tmp_path}/missing/x"]) == 74
    assert "missing/x: No such file or directory" in capsys.readouterr().err


def test_options_of_attention_reach_the_measurement(monkeypatch):
    given = {}

    def measure(**options):
        given.update(options)
        return {"implementations": []}

    monkeypatch.setattr(attention, "measure", measure)
    words = ("--rows=2", "--context=32", "--heads=6", "--kv-heads=3", "--head-dim=16",
             "--documents=4", "--window=8", "--dtype=f32", "--repeats=7")  # fmt: skip
    bench.bench(parsed("attention", "--json", *words))
    del given["say"]
    assert given == {
        "rows": 2, "context": 32, "heads": 6, "kv_heads": 3, "head_dim": 16, "documents": 4,
        "window": 8, "dtype": "float32", "repeats": 7,
    }  # fmt: skip


def test_without_sizes_the_loss_is_that_of_its_shape(monkeypatch):
    given = {}

    def measure(**options):
        given.update(options)
        return {"ways": []}

    monkeypatch.setattr(loss, "measure", measure)
    bench.bench(parsed("loss", "--json", "--shape=gpt2", "--rows=5"))
    sizes = tuple(given[name] for name in ("rows", "context", "width", "vocab"))
    assert sizes == (5, 512, 768, 50304)


# The step of a shape or of a configuration.


def configuration(path) -> str:
    path.write_text("[model]\nnum_layers = 2\n[train]\ncompute_dtype = 'float32'\n")
    return str(path)


def test_without_a_file_the_step_is_that_of_the_small_shape_in_bfloat16():
    cfg, name = bench.step_config(parsed("step", "model.num_layers=5"))
    assert (name, cfg.model.embed_dim, cfg.model.num_layers) == ("small", 384, 5)
    assert cfg.train.compute_dtype == "bfloat16"


def test_the_step_of_a_configuration_can_be_measured(tmp_path):
    words = configuration(tmp_path / "own.toml"), "model.vocab_size=64"
    cfg, name = bench.step_config(parsed("step", *words))
    assert (name, cfg.model.num_layers, cfg.model.vocab_size) == ("own", 2, 64)
    assert cfg.train.compute_dtype == "float32"


def test_the_format_given_wins_over_that_of_the_configuration(tmp_path):
    words = configuration(tmp_path / "own.toml"), "model.vocab_size=64", "--dtype=bf16"
    assert bench.step_config(parsed("step", *words))[0].train.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.vocab_size=64", "--shape=gpt2"], "--shape gpt2 and .*own.toml: give one of them"),
        ([], "own.toml: model.vocab_size = 0 takes that of the tokenizer"),
    ],
)
def test_a_configuration_that_says_too_little_or_too_much_is_refused(tmp_path, words, message):
    name = configuration(tmp_path / "own.toml")
    with pytest.raises(ConfigError, match=message):
        bench.step_config(parsed("step", name, *words))


# --against.


@pytest.mark.parametrize("action", sorted(set(actions()) - {"history"}))
def test_the_words_of_a_measurement_ask_for_it_again(action):
    args = parsed(action)
    assert vars(parsed(action, *bench_shared.own_words(args))) == vars(args)


@pytest.mark.parametrize(
    "words",
    [
        ("step", "--shape=gpt2", "--dtype=f32", "--steps=5", "--warm-up=9", "model.num_layers=1"),
        ("attention", "--kv-heads=3", "--window=7", "--repeats=2"),
        ("loss", "--chunk=64", "--chunk=0", "--width=5"),
    ],
)
def test_options_that_were_given_are_among_its_words(words):
    args = parsed(*words)
    assert vars(parsed(words[0], *bench_shared.own_words(args))) == vars(args)


def test_both_programs_are_started_with_all_options(monkeypatch, capsys):
    given = {}

    def alternate(own, other, pairs, say, name):
        given.update(own=own, other=other, pairs=pairs, name=name)
        return {"ratio_median": 2.0, "ratio_range": [1.5, 3.0], "against": other}

    monkeypatch.setattr(against, "alternate", alternate)
    words = ["bench", "step", "--warm-up=4", "--steps=6", "--against=other program", "--pairs=2"]
    assert cli.main([*words, "--shape=gpt2", "--dtype=f32", "model.num_layers=3"]) == 0
    own = [sys.executable, "-m", "jaxgpt.cli", "bench", "step", "--json"]
    assert given["own"][:6] == own
    wanted = {"--steps=6", "--warm-up=4", "--shape=gpt2", "--dtype=f32", "model.num_layers=3"}
    assert set(given["own"][6:]) == wanted
    assert (given["other"], given["pairs"]) == ("other program", 2)
    assert given["name"] == "tokens_per_sec_median"
    assert "2.000 times as fast (1.500 to 3.000)" in capsys.readouterr().out


# history.


def write(path, *results: dict) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in results))
    return str(path)


def test_history_says_what_became_slower(tmp_path, capsys):
    name = write(tmp_path / "r", result(100, code="old"), result(80))
    assert cli.main(["bench", "history", name]) == 0
    out = capsys.readouterr().out
    assert "slower" in out
    assert "0.8" in out
    assert "step shape=small dtype=bf16" in out


@pytest.mark.parametrize(("bound", "code"), [("0.9", 1), ("0.7", 0)])
def test_history_fails_below_the_ratio_given(tmp_path, capsys, bound, code):
    name = write(tmp_path / "r", result(100, code="old"), result(80))
    assert cli.main(["bench", "history", name, f"--fail-below={bound}", "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["below"] == code
    assert ("0.8 is below 0.9 (slower)" in err) == bool(code)


def test_history_of_two_files_compares_the_second_with_the_first(tmp_path, capsys):
    names = [write(tmp_path / str(rate), result(rate)) for rate in (100, 300)]
    assert cli.main(["bench", "history", *names, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (row["ratio"], row["verdict"]) == (3.0, "faster")


def test_history_says_where_nothing_can_be_compared(tmp_path, capsys):
    assert cli.main(["bench", "history", write(tmp_path / "r", result())]) == 0
    assert "1 nothing earlier" in capsys.readouterr().out


def test_history_counts_damaged_lines_and_names_them(tmp_path, capsys):
    path = tmp_path / "r"
    write(path, result(code="old"), result())
    path.write_text(path.read_text() + "{\n")
    assert cli.main(["bench", "history", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["damaged_lines"] == 1
    assert f"{path}:3: passed over" in err


def test_history_names_the_machine_where_there_are_several(tmp_path, capsys):
    name = write(tmp_path / "r", result(), result(device="H200"))
    assert cli.main(["bench", "history", name]) == 0
    assert "on 1 x H200, x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["missing"], 65, "missing: cannot be read: No such file"),
        (["empty"], 65, "empty: holds no result of jaxgpt bench"),
        (["empty", "empty", "empty"], 64, "one or two files, but got 3"),
        (["empty", "--fail-below=nan"], 64, "--fail-below nan: must be a ratio above 0"),
        (["empty", "--fail-below=0"], 64, "--fail-below 0.0: must be a ratio above 0"),
    ],
)
def test_history_refuses_what_it_cannot_compare(
    tmp_path, monkeypatch, capsys, words, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    assert cli.main(["bench", "history", *words]) == code
    assert message in capsys.readouterr().err
