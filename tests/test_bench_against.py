"""One program beside another: turns, ratios, and programs that fail or print no figure."""

from __future__ import annotations

import shlex
import sys

import pytest

from jaxgpt.bench.against import FIGURE, alternate, figure
from jaxgpt.errors import ConfigError


def program(*statements: str) -> list[str]:
    return [sys.executable, "-c", "; ".join(statements)]


def prints(text: str) -> list[str]:
    return program(f"print({text!r})")


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> dict:
    """Three pairs of a program that is twice as fast as the other; `order` is who ran when."""
    log = tmp_path_factory.mktemp("against") / "order"
    own, other = (
        program(
            "import json", f"file = open({str(log)!r}, 'a')", f"file.write({name!r})",
            "print('hello')", f"print(json.dumps({{'{FIGURE}': {rate}}}))", "print('bye')",
        )
        for name, rate in (("a", 300), ("b", 150))
    )  # fmt: skip
    lines: list[str] = []
    found = alternate(own, shlex.join(other), 3, lines.append)
    return found | {"order": log.read_text(), "lines": lines}


def test_the_ratio_is_that_of_own_to_other(beside):
    assert beside["ratios"] == [2.0, 2.0, 2.0]
    assert beside["ratio_median"] == 2.0
    assert beside["ratio_range"] == [2.0, 2.0]


def test_both_figures_of_each_pair_are_kept(beside):
    assert beside["figures"] == [300.0] * 3
    assert beside["figures_of_other"] == [150.0] * 3


def test_who_begins_changes_from_pair_to_pair(beside):
    assert beside["order"] == "abbaab"


def test_a_line_is_said_for_each_pair(beside):
    assert [line.partition(":")[0] for line in beside["lines"]] == ["pair 1", "pair 2", "pair 3"]


def test_the_spread_is_half_the_range_of_the_ratios(tmp_path):
    rates = tmp_path / "rates"
    rates.write_text("100 300 200")
    own = program(
        "import pathlib", f"path = pathlib.Path({str(rates)!r})",
        "first, *rest = path.read_text().split()", "path.write_text(' '.join(rest))",
        "import json", f"print(json.dumps({{'{FIGURE}': float(first)}}))",
    )  # fmt: skip
    other = shlex.join(prints(f'{{"{FIGURE}": 100}}'))
    assert alternate(own, other, 3, lambda line: None)["spread"] == 0.5  # (3 - 1) / 2 / 2


def test_the_last_object_with_the_figure_counts():
    lines = f'{{"{FIGURE}": 1}}\n{{"{FIGURE}": 2}}\n{{"loss": 3}}\n[4]\n5\nnull'
    assert figure(prints(lines)) == 2.0


def test_another_figure_can_be_asked_for():
    assert figure(prints('{"bytes_per_sec_median": 7}'), "bytes_per_sec_median") == 7.0


@pytest.mark.parametrize("value", ["0", "-1", "true", '"fast"', "null", "NaN", "Infinity"])
def test_what_is_no_figure_is_refused(value):
    with pytest.raises(ConfigError, match=f"no line of its output is a JSON object with {FIGURE}"):
        figure(prints(f'{{"{FIGURE}": {value}}}'))


def test_a_program_that_fails_is_named_with_its_last_words():
    command = program("import sys", "print('one\\ntwo\\nthree', file=sys.stderr)", "sys.exit(3)")
    with pytest.raises(ConfigError, match="ended with 3: two three") as caught:
        figure(command)
    assert sys.executable in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no-such-program: cannot be started: No such file"):
        figure(["no-such-program"])


@pytest.mark.parametrize("command", ["python 'open", "", "  "])
def test_a_command_line_that_is_none_is_refused_before_anything_runs(command):
    with pytest.raises(ConfigError, match="--against"):
        alternate(["no-such-program"], command, 1, print)


def test_our_settings_for_other_libraries_are_kept_from_the_other_program(monkeypatch):
    names = ("TF_ENABLE_ONEDNN_OPTS", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    counts = program(
        "import os, json", f"count = 1 + sum(name in os.environ for name in {names})",
        f"print(json.dumps({{'{FIGURE}': count}}))",
    )  # fmt: skip
    found = alternate(counts, shlex.join(counts), 1, lambda line: None)
    assert (found["figures"], found["figures_of_other"]) == ([3.0], [1.0])


def test_a_setting_of_the_user_reaches_the_other_program(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    own = prints(f'{{"{FIGURE}": 1}}')
    other = program(
        "import os, json", "share = float(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])",
        f"print(json.dumps({{'{FIGURE}': share}}))",
    )  # fmt: skip
    assert alternate(own, shlex.join(other), 1, lambda line: None)["figures_of_other"] == [0.5]
