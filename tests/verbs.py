"""Two small stores, and the command asked about them."""

from __future__ import annotations

import json
from pathlib import Path

from runs import make_store, overrides, tiny

from jaxgpt import cli, config
from jaxgpt.commands import data as data_commands
from jaxgpt.data import stream

ESCAPES = "zz \x1b[31mred\x1b[0m \u202e text\r\n[bold]and more of this[/bold]"
B = 4  # rows of a step
T = 16


def make_two_stores(path: Path) -> Path:
    """Make `store`, with a document full of escapes, and `second`, with the same tokenizer."""
    (path / "corpus").mkdir()
    (path / "corpus/escapes.txt").write_text(ESCAPES, newline="")
    make_store(path)
    for number in range(12):
        text = f"stones of the hall {number} " * (1 + number % 4)
        (path / "more").mkdir(exist_ok=True)
        (path / "more" / f"{number:02}.txt").write_text(text)
    cfg = tiny(
        path,
        "unused",
        data__sources=[str(path / "more")],
        data__store=str(path / "second"),
        tokenizer__path=str(path / "store/tokenizer.model"),
    )
    data_commands.make_store(cfg)
    return path


def words(root: Path, **changes: object) -> list[str]:
    """Return the overrides of a run on both stores, 2 rows of the first for 1 of the second."""
    stores = f'{{"{root / "store"}" = 2, "{root / "second"}" = 1}}'
    options = {"train__global_batch": B, "train__num_steps": 30} | changes
    plain = [w for w in overrides(root, "run", **options) if not w.startswith("data.store=")]
    return [*plain, f"data.store={stores}"]


def ask(capsys, *args: str) -> dict:
    code = cli.main([*args, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == result.get("exit_code", 0)
    return result


def text_of(capsys, *args: str) -> str:
    assert cli.main(list(args)) == 0
    return capsys.readouterr().out


def refused(capsys, code: int, *args: str) -> str:
    """Return the one line of a refusal."""
    assert cli.main(list(args)) == code
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("jaxgpt: error:")]
    assert captured.out == "" and "Traceback" not in captured.err
    return line


def open_both(root: Path, **changes: object) -> stream.Data:
    cfg = config.load(None, words(root, **changes))
    return stream.open_data(cfg.data, seq_len=cfg.model.seq_len, seed=cfg.run.seed)
