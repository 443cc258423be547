"""What people see: text that cannot act on the terminal, tables, and progress now and then."""

from __future__ import annotations

import pytest

from jaxgpt.commands import terminal
from jaxgpt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain caf\u00e9 \u4e2d \U0001f680", "plain caf\u00e9 \u4e2d \U0001f680"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x07\x08\x7f\0", "\\x9b2J\\x07\\x08\\x7f\\x00"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\u202eabc\u2066\u2028", "\\u202eabc\\u2066\\u2028"),
        ("\udc80", "\\udc80"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text, shown):
    assert terminal.visible(text) == shown
    shown.encode()


def test_line_feeds_and_tabs_may_stay():
    assert terminal.visible("a\r\n\tb\x1b", lines=True) == "a\\r\n\tb\\x1b"


def test_an_excerpt_is_one_line_of_at_most_the_width():
    assert terminal.excerpt("a  b\n c", 20) == "a b c"
    assert terminal.excerpt("x" * 50, 20) == "x" * 17 + "..."
    assert len(terminal.excerpt("\x1b" * 50, 20)) == 20


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_table_shows_every_cell_whole_and_markup_as_text(on_terminal):
    rows = [("[red]x[/red]", 1234567, "y" * 200), ("\x1b[2J", 5, "\u4e2d" * 90)]
    text = terminal.table(["name", "count", "long"], rows, terminal=on_terminal)
    for cell in ("[red]x[/red]", "1,234,567", "y" * 200, "\\x1b[2J", "\u4e2d" * 90):
        assert cell in text
    if not on_terminal:
        assert "\x1b" not in text and len(text.splitlines()) == 3


def test_progress_is_said_at_most_every_few_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    progress = terminal.progress_line(lambda done, total: f"{done} of {total}")
    for done in range(1, 13):
        now[0] += 1
        progress(done, 12)
    captured = capsys.readouterr()
    assert captured.err.split("\n") == ["5 of 12", "10 of 12", ""] and captured.out == ""


def test_two_files_of_configuration_are_refused():
    with pytest.raises(ConfigError, match="b.toml"):
        terminal.load_config(["a.toml", "run.seed=1", "b.toml"])
