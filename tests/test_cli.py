"""The command: verbs end to end, one JSON object on stdout, exit codes, one-line refusals."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_models import byte_level
from runs import WORDS, jaxgpt, make_store, overrides, process_environment

from jaxgpt import cli, config
from jaxgpt.tokenization import tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def run(root) -> Path:
    """A trained tiny run, with a moving average of its weights."""
    averaged = {"train__num_steps": 10, "optim__ema_decay": 0.9}
    assert cli.main(["train", *overrides(root, "run", **averaged)]) == 0
    return root / "run"


def as_json(capsys, *args: str) -> dict:
    assert cli.main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, code: int, *args: str) -> list[str]:
    assert cli.main(list(args)) == code
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return [line for line in captured.err.splitlines() if line.startswith("jaxgpt: error:")]


def test_help_of_a_configured_verb_lists_every_field_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for section in config.SECTIONS:
        for field, _ in config.fields_of(section):
            assert f"{section}.{field.name} = " in text and field.metadata["meaning"] in text
    assert "train.global_batch = 16 rows  (integer)" in text


@pytest.mark.parametrize("verb", ["prepare", "data", "train", "eval", "generate", "tokenizer"])
def test_every_verb_has_help(capsys, verb):
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "--help"])
    assert left.value.code == 0 and verb in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["trian"], "trian"),
        ([], "VERB"),
        (["train", "a.toml", "b.toml"], "a.toml"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["train", "learning_rte=1"], "optim.lr"),
        (["train", "--shuffle", "False"], "--shuffle"),
        (["train", "--shuffle=0"], "--shuffle=0"),
        (["train", "--no-shuffle"], "--no-shuffle"),
        (["train", "--data.document_mask", "False"], "--data.document_mask"),
        (["train", "data.document_mask=False"], "data.document_mask"),
        (["generate", "x", "--temperature", "hot"], "hot"),
        (["eval"], "run"),
        (["eval", "x", "--batch", "-1"], "--batch: -1: must be at least 0"),
        (["eval", "x", "--max-rows", "-2"], "--max-rows: -2: must be at least 0"),
        (["generate", "x", "--samples", "0"], "--samples: 0: must be at least 1"),
        (["generate", "x", "--seed", "-1"], "0 to 4294967295"),
        (["generate", "x", "--seed", "4294967296"], "0 to 4294967295"),
        (["generate", "x", "--seed", "one"], "'one'"),
        (["prepare", "--workers", "-1"], "--workers: -1: must be at least 0"),
        (["train", "run.seed=4294967296"], "run.seed = 4294967296: must be at most 4294967295"),
    ],
)
def test_wrong_words_are_refused_in_one_line_with_64(capsys, args, word):
    lines = refused(capsys, 64, *args)
    assert len(lines) == 1 and word in lines[0]


def test_all_problems_of_a_configuration_are_printed_a_line_each(capsys):
    lines = refused(capsys, 64, "train", "optim.lrr=1", "model.num_heads=5", "data.document_mask=0")
    assert len(lines) == 3


def test_overrides_may_carry_dashes(capsys, root):
    words = [f"--{word}" for word in overrides(root, "x", train__num_steps=7)]
    shown = as_json(capsys, "train", "--show-config", *words)
    assert shown["config"]["train"]["num_steps"] == 7


def test_words_of_the_configuration_may_follow_an_option(capsys, tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text("[train]\nnum_steps = 7\n")
    words = ["model.seq_len=32", "--show-config", str(preset), "run.seed=5"]
    shown = as_json(capsys, "train", *words)["config"]
    assert (shown["train"]["num_steps"], shown["model"]["seq_len"]) == (7, 32)
    assert shown["run"]["seed"] == 5


def test_a_file_where_the_tokenizer_folder_should_be_is_a_storage_error(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog lay on the log " * 20)
    words = [f"data.sources={text}", f"data.store={text}", "tokenizer.vocab_size=275"]
    lines = refused(capsys, 74, "tokenizer", "train", *words)
    assert len(lines) == 1 and f"{text}: File exists" in lines[0]


def test_a_word_of_the_command_beats_the_file_which_beats_the_default(capsys, tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nnum_steps = 7\n")
    args = ["train", "--show-config", str(tmp_path / "run.toml")]
    for words, steps in (([], 7), (["train.num_steps=9"], 9), (["--train.num_steps=9"], 9)):
        assert as_json(capsys, *args, *words)["config"]["train"]["num_steps"] == steps
    assert as_json(capsys, *args[:-1])["config"]["train"]["num_steps"] == 0


def test_show_config_prints_every_value_and_its_origin_and_trains_nothing(capsys, root):
    assert cli.main(["train", "--show-config", *overrides(root, "shown")]) == 0
    text = capsys.readouterr().out
    assert "num_steps = 20  # override" in text and "beta2 = 0.95\n" in text
    assert not (root / "shown").exists()


def test_eval_reports_the_held_out_set_beside_compressors(capsys, run):
    result = as_json(capsys, "eval", str(run))["valid"]
    assert result["tokens"] > result["rows"] > 1
    assert result["perplexity"] == pytest.approx(2.718281828459045 ** result["loss"])
    bits = result["loss"] * result["tokens"] / 0.6931471805599453
    assert result["bits_per_byte"] == pytest.approx(bits / result["bytes"])
    assert set(result["baselines"]) == {"gzip -9", "xz -9"}


def test_eval_of_text_files_does_not_depend_on_the_batch(capsys, root, run, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(WORDS * 9))
    results = [
        as_json(capsys, "eval", str(run), "--data", f"mine={tmp_path}/a.txt", "--batch", size)[
            "mine"
        ]
        for size in ("1", "3", "8")
    ]
    assert results[0]["bytes"] == len(" ".join(WORDS * 9))
    for other in results[1:]:
        assert other["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "moving average of the weights in float32, computing in float32"),
        (["--weights", "ema"], "moving average of the weights in float32, computing in float32"),
        (["--weights", "last"], "last weights in float32, computing in float32"),
        (
            ["--dtype", "bfloat16"],
            "moving average of the weights in float32, computing in bfloat16",
        ),
    ],
)
def test_eval_and_generate_say_which_weights_they_use_and_how_they_compute(
    capsys, run, words, said
):
    assert cli.main(["eval", str(run), "--max-rows", "1", *words]) == 0
    assert capsys.readouterr().err.splitlines().count(f"step 10: {said}") == 1
    assert cli.main(["generate", str(run), "--max-new-tokens", "1", *words]) == 0
    assert capsys.readouterr().err.splitlines().count(f"step 10: {said}") == 1


def test_eval_takes_the_average_and_the_format_that_are_asked_for(capsys, run):
    found = {
        words: as_json(capsys, "eval", str(run), *words)["valid"]["loss"]
        for words in ((), ("--weights", "ema"), ("--weights", "last"), ("--dtype", "bfloat16"))
    }
    assert found[()] == found["--weights", "ema"] != found["--weights", "last"]
    assert found["--dtype", "bfloat16"] == pytest.approx(found[()], rel=0.01)
    assert found["--dtype", "bfloat16"] != found[()]


def test_eval_refuses_a_store_made_with_another_tokenizer(capsys, root, run):
    other = overrides(root, "x", data__store=str(root / "other"), tokenizer__vocab_size=300)
    assert cli.main(["tokenizer", "train", *other]) == cli.main(["prepare", *other]) == 0
    capsys.readouterr()
    lines = refused(capsys, 65, "eval", str(run), "--data", str(root / "other"))
    digests = [tokenizer.load(root / name / "tokenizer.model").digest for name in ("other", "run")]
    assert len(lines) == 1 and all(digest[:12] in lines[0] for digest in digests)


def test_eval_prints_a_table_for_people(capsys, run):
    assert cli.main(["eval", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bits/byte" in lines[0] and "gzip -9" in lines[0] and lines[1].startswith("valid")


def test_generate_is_repeatable_by_seed_and_differs_between_seeds(capsys, run):
    args = (
        "generate",
        str(run),
        "--prompt",
        "the king",
        "--max-new-tokens",
        "8",
        "--temperature",
        "2",
    )
    first, second, other = (
        as_json(capsys, *args, "--seed", seed)["samples"][0]["ids"] for seed in ("1", "1", "2")
    )
    assert first == second != other


def test_generate_writes_several_prompts_as_each_alone(capsys, run):
    prompts = ["the", "old stones slept under", ""]
    common = ("--max-new-tokens", "5", "--temperature", "0")
    together = as_json(
        capsys, "generate", str(run), *common, *(w for p in prompts for w in ("--prompt", p))
    )["samples"]
    for prompt, row in zip(prompts, together, strict=True):
        alone = as_json(capsys, "generate", str(run), *common, "--prompt", prompt)["samples"][0]
        assert alone["ids"] == row["ids"] and row["prompt"] == prompt


def test_generate_streams_prompt_and_text(capsys, run):
    args = [
        "generate",
        str(run),
        "--prompt",
        "the king",
        "--max-new-tokens",
        "5",
        "--temperature",
        "0",
    ]
    row = as_json(capsys, *args)["samples"][0]
    assert cli.main(args) == 0
    assert capsys.readouterr().out == f"the king{row['text']}\n"


def test_generate_past_the_context_is_refused_with_the_numbers(capsys, run):
    lines = refused(capsys, 64, "generate", str(run), "--prompt", "the", "--max-new-tokens", "100")
    assert len(lines) == 1 and "100" in lines[0] and "16" in lines[0]


def test_generated_samples_are_kept_with_the_run(capsys, run):
    as_json(capsys, "generate", str(run), "--prompt", "kept", "--max-new-tokens", "2")
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert rows[-1]["prompt"] == "kept" and rows[-1]["step"] == 10


def test_tokenizer_verbs_round_trip_text(capsys, root):
    text = "the king\n\t rain 🚀 </s>"
    ids = as_json(capsys, "tokenizer", "encode", str(root / "store"), text)["ids"]
    assert ids and 2 not in ids  # </s> in text is text
    words = [str(i) for i in ids]
    assert as_json(capsys, "tokenizer", "decode", str(root / "store"), *words)["text"] == text
    assert as_json(capsys, "tokenizer", "info", str(root / "store"))["vocab_size"] == 320
    assert "320" in refused(capsys, 65, "tokenizer", "decode", str(root / "store"), "320")[0]


def test_a_tokenizer_that_a_store_needs_is_not_replaced_by_another(capsys, root):
    before = (root / "store/tokenizer.model").read_bytes()
    assert cli.main(["tokenizer", "train", *overrides(root, "x")]) == 0  # equal: nothing to refuse
    capsys.readouterr()
    other = overrides(root, "x", tokenizer__vocab_size=300)
    assert "tokenizer.path" in refused(capsys, 64, "tokenizer", "train", *other)[0]
    assert (root / "store/tokenizer.model").read_bytes() == before
    assert not list((root / "store").glob("*.new"))


def test_the_folder_of_a_hugging_face_model_stands_for_its_tokenizer(capsys, tmp_path):
    ids = byte_level(tmp_path / "tokenizer.json").encode("the king").ids
    assert as_json(capsys, "tokenizer", "encode", str(tmp_path), "the king")["ids"] == ids


@pytest.mark.parametrize("word", ["320", "-1", "1.0", "\u00b2", "9" * 5000])
def test_a_word_that_is_no_id_is_refused(capsys, root, word):
    (line,) = refused(capsys, 65, "tokenizer", "decode", str(root / "store"), "--", word)
    assert f"{word!r} is not an id" in line


@pytest.mark.parametrize("place", ["file", "command"])
def test_user_symbols_enter_the_vocabulary_as_they_are_written(capsys, root, tmp_path, place):
    symbols, model = ["<|a|>", "<x,y>"], tmp_path / "t.model"
    changes = {"tokenizer__path": str(model), "tokenizer__vocab_size": 300}
    if place == "file":
        path = tmp_path / "t.toml"
        path.write_text(f"[tokenizer]\nuser_symbols = {json.dumps(symbols)}\n")
        words = [str(path), *overrides(root, "x", **changes)]
    else:
        words = overrides(root, "x", tokenizer__user_symbols=symbols, **changes)
    as_json(capsys, "tokenizer", "train", *words)
    specials = as_json(capsys, "tokenizer", "info", str(model))["specials"]
    assert {name for name, i in specials.items() if i > 2} == set(symbols)


def swap_tokenizer(model: Path, root: Path) -> None:
    """Put a tokenizer of the same size with other pieces in the place of `model`."""
    texts = [path.read_text()[::-1] for path in sorted((root / "corpus").iterdir())]
    tokenizer.train(texts, model, vocab_size=320)


def test_prepare_refuses_a_store_whose_tokenizer_was_swapped(capsys, root, tmp_path):
    store = shutil.copytree(root / "store", tmp_path / "store")
    words = overrides(root, "x", data__store=str(store))
    assert as_json(capsys, "prepare", *words)["already_prepared"] is True
    swap_tokenizer(store / "tokenizer.model", root)
    (line,) = refused(capsys, 65, "prepare", *words)
    assert "tokenizer was" in line


def test_generate_passes_over_a_tokenizer_that_the_run_was_not_trained_with(
    capsys, root, run, tmp_path
):
    args = ("--prompt", "the king", "--max-new-tokens", "5", "--temperature", "0")
    right = as_json(capsys, "generate", str(run), *args)["samples"]
    copy = shutil.copytree(run, tmp_path / "run")
    swap_tokenizer(copy / "tokenizer.model", root)
    assert as_json(capsys, "generate", str(copy), *args)["samples"] == right


def test_prepare_again_says_so_and_changes_nothing(capsys, root):
    before = (root / "store/train/manifest.json").read_bytes()
    assert as_json(capsys, "prepare", *overrides(root, "x"))["already_prepared"] is True
    assert (root / "store/train/manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (["eval", "/nonexistent/run"], 66, "/nonexistent/run"),
        (["generate", "/nonexistent/run"], 66, "/nonexistent/run"),
        (["tokenizer", "info", "/nonexistent.model"], 65, "/nonexistent.model"),
        (["prepare", "data.sources=/nonexistent/*.txt", "data.store=/tmp/x"], 65, "/nonexistent"),
        (["prepare", "data.store=/tmp/x"], 64, "data.sources"),
    ],
)
def test_missing_inputs_have_their_exit_codes(capsys, args, code, word):
    lines = refused(capsys, code, *args)
    assert len(lines) == 1 and word in lines[0]


def test_errors_too_are_one_json_object(capsys):
    assert cli.main(["train", "learning_rte=1", "--json"]) == 64
    error = json.loads(capsys.readouterr().out)
    assert error["exit_code"] == 64 and "optim.lr" in error["error"]


def test_the_process_exits_with_the_code_and_prints_no_traceback():
    process = jaxgpt("train", "data.store=/nonexistent/store", "train.num_steps=1")
    assert process.returncode == 65 and process.stdout == ""
    assert process.stderr.count("\n") == 1 and "/nonexistent/store" in process.stderr


@pytest.mark.parametrize("words", [["--show-config"], ["--show-config", "--json"]])
def test_a_full_disk_under_stdout_is_a_storage_error(words):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    lines = io.StringIO()
    with contextlib.redirect_stdout(Full()), contextlib.redirect_stderr(lines):
        code = cli.main(["train", *words])
    assert code == 74 and lines.getvalue().count("\n") == 1
    assert "No space left on device" in lines.getvalue()


def test_a_bug_is_70_with_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(cli, "main", lambda: 1 / 0)
    codes = []
    monkeypatch.setattr(cli, "hard_exit", codes.append)
    cli.entry()
    assert codes == [70] and "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_before_a_run_has_begun_ends_it_at_once_and_by_sigterm_to_be_started_again(
    tmp_path, number, code
):
    (tmp_path / "jax.py").write_text(  # begins to be imported, and swallows an interrupt
        "import time\nprint('importing', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxgpt.cli", "train"],
        env=process_environment(1, PYTHONPATH=f"{tmp_path}:{Path(cli.__file__).parent.parent}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    assert (process.returncode, said) == (code, "\njaxgpt: interrupted\n")


def test_ctrl_c_ends_generation_with_130_and_no_traceback(run):
    command = [sys.executable, "-m", "jaxgpt.cli", "generate", str(run), "--prompt", "the"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "1000000", "--window", "--ignore-eos"],
        env=process_environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.read(1)  # the first text is there
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
