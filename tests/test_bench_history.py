"""Kept results: what is appended, what is compared with what, and lines that are damaged."""

from __future__ import annotations

import json
import subprocess

import pytest

from jaxgpt.bench import history
from jaxgpt.errors import DataError, StorageError


def result(rate: float = 100.0, spread: float = 0.02, **changes) -> dict:
    """A kept result, of version "new" unless told otherwise."""
    return {
        "date": "2026-11-30T12:00:00+00:00", "commit": None, "code": "new", "verb": "step",
        "options": {"shape": "small", "dtype": "bf16", "steps": 12}, "framework": "jax 1",
        "device": "cpu", "devices": 1, "processor": "x", "cores": 2,
        "tokens_per_sec_median": rate, "spread": spread, "repeats": 12,
    } | changes  # fmt: skip


def one(results: list[dict], earlier: list[dict] | None = None) -> dict:
    (row,) = history.compare(earlier, results)
    return row


def test_the_newest_version_is_compared_with_the_one_before():
    row = one([result(50, code="older"), result(100, code="old"), result(120)])
    assert (row["earlier"], row["newest"], row["ratio"]) == (100, 120, 1.2)


@pytest.mark.parametrize(
    ("rate", "verdict"),
    # Ranges of 100 +- 2 and of the rate +- 2 % meet from 96.08 (98 / 1.02) to 104.08 (102 / 0.98).
    [(96.0, "slower"), (96.2, "within the spread"), (104.0, "within the spread"),
     (104.2, "faster")],
)  # fmt: skip
def test_a_difference_counts_where_the_ranges_do_not_meet(rate, verdict):
    assert one([result(100, code="old"), result(rate)])["verdict"] == verdict


def test_the_spread_of_a_row_is_that_of_both_together():
    assert one([result(spread=0.03, code="old"), result(spread=0.01)])["spread"] == 0.04


def test_results_of_one_version_in_a_row_count_by_their_median():
    row = one([result(100, code="old"), result(80), result(90), result(130)])
    assert row["newest"] == 90


def test_results_of_one_version_that_differ_widen_its_spread():
    # 80 to 130 about 90: half the range is 0.2778 of the median.
    assert one([result(100, code="old"), result(80), result(90), result(130)])["spread"] == 0.2978


def test_another_version_of_jax_is_another_version():
    row = one([result(100, framework="jax 0"), result(300)])
    assert (row["earlier"], row["newest"]) == (100, 300)


def test_of_two_files_the_newest_are_compared_whatever_their_versions():
    row = one([result(1, code="older"), result(60)], [result(7, code="older"), result(50)])
    assert (row["earlier"], row["newest"]) == (50, 60)


@pytest.mark.parametrize(
    "change",
    [{"verb": "loss"}, {"options": {"shape": "gpt2", "dtype": "bf16"}}, {"device": "H200"},
     {"processor": "y"}, {"cores": 4}, {"devices": 2}],
)  # fmt: skip
def test_what_was_measured_otherwise_or_elsewhere_is_not_compared(change):
    rows = history.compare(None, [result(code="old"), result(**change)])
    assert [row["verdict"] for row in rows] == ["nothing earlier"] * 2


def test_how_long_was_measured_does_not_tell_results_apart():
    longer = {"shape": "small", "dtype": "bf16", "steps": 99, "repeats": 4}
    assert one([result(code="old"), result(options=longer)])["ratio"] == 1.0


def test_the_order_of_overrides_does_not_tell_results_apart():
    ways = [{"config": ["a.b=1", "c.d=2"]}, {"config": ["c.d=2", "a.b=1"]}]
    assert one([result(code="old", options=ways[0]), result(options=ways[1])])["ratio"] == 1.0


def test_a_single_timing_has_no_known_spread():
    row = one([result(100, code="old"), result(50, spread=0.0, repeats=1)])
    assert row["verdict"] == "spread unknown"


def test_a_ratio_of_two_programs_is_compared_rather_than_a_rate():
    older, newer = (
        result(rate, ratio_median=ratio, code=code)
        for rate, ratio, code in ((100, 1.0, "old"), (50, 1.5, "new"))
    )
    assert one([older, newer])["ratio"] == 1.5


def test_fewer_seconds_are_faster():
    fields = result()
    del fields["tokens_per_sec_median"]
    row = one([fields | {"seconds_median": 2.0, "code": "old"}, fields | {"seconds_median": 1.0}])
    assert (row["ratio"], row["verdict"]) == (2.0, "faster")


def test_tokens_per_second_of_the_whole_come_before_those_of_a_part():
    found = {"forward_tokens_per_sec_median": 9.0, "tokens_per_sec_median": 3.0}
    assert history.figure_name(found) == "tokens_per_sec_median"


def test_the_figure_that_a_verb_names_comes_first():
    found = {"figure": "mb_per_sec_median", "tokens_per_sec_median": 9.0, "mb_per_sec_median": 3.0}
    assert history.figure_name(found) == "mb_per_sec_median"


@pytest.mark.parametrize("key", ["encode_mb_spread", "encode_spread", "spread"])
def test_the_spread_is_that_of_the_figure(key):
    found = {"decode_spread": 0.9, "repeats": 3, key: 0.25}
    assert history.inner_spread(found, "encode_mb_per_sec_median") == 0.25


# Files.


def kept(path) -> tuple[list[dict], int, list[str]]:
    lines: list[str] = []
    return *history.read(path, lines.append), lines


def test_what_is_saved_is_read_again(tmp_path):
    path = tmp_path / "results.jsonl"
    options = {"shape": "small", "json": True, "verb": "bench", "action": "step", "save": "x"}
    history.save(path, "step", options, None, {"tokens_per_sec_median": 5.0})
    (found,), damaged, _ = kept(path)
    assert found["tokens_per_sec_median"] == 5.0
    assert found["verb"] == "step"
    assert found["options"] == {"shape": "small"}
    assert {"date", "commit", "jaxgpt", "code"} <= set(found)
    assert damaged == 0


def test_results_are_appended(tmp_path):
    path = tmp_path / "results.jsonl"
    for rate in (1.0, 2.0):
        history.save(path, "step", {}, None, {"tokens_per_sec_median": rate})
    assert [found["tokens_per_sec_median"] for found in kept(path)[0]] == [1.0, 2.0]


def test_a_line_that_was_cut_off_does_not_take_the_next_with_it(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"verb": "st')
    history.save(path, "step", {}, None, {"tokens_per_sec_median": 1.0})
    results, damaged, _ = kept(path)
    assert (len(results), damaged) == (1, 1)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (b'{"verb": "st', "no JSON at column 10"),
        (b"[1]", "not an object"),
        (b"\xff", "byte 0 is not UTF-8"),
        (json.dumps(result(float("nan"))).encode(), "NaN is not a number of JSON"),
        (json.dumps(result(0.0)).encode(), "no figure above 0"),
        (json.dumps(result() | {"options": 3}).encode(), "no options"),
        (json.dumps(result() | {"code": None}).encode(), "no code"),
        (json.dumps(result() | {"spread": "wide"}).encode(), "spread is not a number"),
        (b"[" * 200_000, "nested too deep"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_count(tmp_path, damage, why):
    path = tmp_path / "results.jsonl"
    good = json.dumps(result()).encode()
    path.write_bytes(b"\n".join([good, damage, good]) + b"\n")
    results, damaged, (line,) = kept(path)
    assert (len(results), damaged) == (2, 1)
    assert line.startswith(f"{path}:2: passed over, not a result: ")
    assert why in line
    assert "\n" not in line


def test_empty_lines_are_no_damage(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n" + json.dumps(result()) + "\n\r\n")
    assert kept(path)[1:] == (0, [])


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="missing: cannot be read: No such file"):
        history.read(tmp_path / "missing", print)


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        history.check_writable(tmp_path / "missing" / "results.jsonl")


# Versions.


def package(folder, text: str):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(text)
    return folder


def test_the_digest_is_that_of_the_code(tmp_path):
    one, same, other = (package(tmp_path / str(i), text) for i, text in enumerate("aab"))
    assert history.code_digest(one) == history.code_digest(same) != history.code_digest(other)


def git(folder, *words: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = package(tmp_path / "package", "a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_is_that_of_the_package(repository):
    assert history.commit(repository) == git(repository, "rev-parse", "HEAD")


def test_a_commit_whose_files_were_changed_since_has_a_plus(repository):
    head = git(repository, "rev-parse", "HEAD")
    package(repository, "a = 2\n")
    assert history.commit(repository) == f"{head}+"


def test_a_package_installed_inside_another_project_has_not_its_commit(repository):
    installed = package(repository.parent / ".venv" / "package", "a = 1\n")
    assert history.commit(installed) is None
