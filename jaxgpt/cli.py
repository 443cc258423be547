"""The `jaxgpt` command: parse, dispatch, exit codes; nothing else.

    jaxgpt VERB [CONFIG.toml] [section.field=value ...] [--json]

Results go to stdout (one JSON object with --json), progress and messages to stderr. Exit codes:
0 done, 64 config refused, 65 data refused, 66 nothing restorable, 70 bug, 74 storage,
75 interrupted with a durable checkpoint (start again), 76 hang, 78 hosts disagree, 79 numerics,
130/143 forced.
"""

from __future__ import annotations

import argparse
import errno
import json
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jaxgpt import __version__, config, runtime
from jaxgpt.errors import ConfigError, Interrupted, JaxgptError, StorageError
from jaxgpt.toml_values import type_name
from jaxgpt.validation import MAX_SEED


class Parser(argparse.ArgumentParser):
    """argparse whose refusals are one line and exit code 64, as for any other configuration."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Return a converter of words to whole numbers within the bounds, for `add_argument`."""

    def convert(word: str) -> int:
        number = int(word)
        if number < lowest or highest is not None and number > highest:
            rule = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"{number}: must be {rule}")
        return number

    convert.__name__ = "whole number"  # argparse names it where int() refuses a word
    return convert


def fields_help() -> str:
    """Return every configuration field with type, default, unit and meaning, for `--help`."""
    lines = ["configuration fields, given as section.field=value or in a TOML file:"]
    for section in config.SECTIONS:
        lines.append(f"\n[{section}]")
        defaults = config.SECTIONS[section]()
        for field, hint in config.fields_of(section):
            default = json.dumps(getattr(defaults, field.name))
            unit = f" {field.metadata['unit']}" if field.metadata["unit"] else ""
            lines.append(f"  {section}.{field.name} = {default}{unit}  ({type_name(hint)})")
            lines.append(f"      {field.metadata['meaning']}")
    return "\n".join(lines)


def build_parser() -> Parser:
    """Return the parser of all verbs; `verb` and its options end up in the namespace."""
    parser = Parser(prog="jaxgpt", description="Raw text in, a trained GPT out.")
    parser.add_argument("--version", action="version", version=f"jaxgpt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(parent: Any, name: str, summary: str, *, configured: bool = False) -> Parser:
        sub = parent.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        if configured:
            sub.add_argument("config", nargs="*", metavar="CONFIG.toml | section.field=value")
            sub.epilog = fields_help()
        return sub

    tokenizer = verbs.add_parser("tokenizer", help="train, inspect or use a subword tokenizer")
    actions = tokenizer.add_subparsers(dest="action", metavar="ACTION", required=True)
    verb(actions, "train", "train a SentencePiece model on data.sources", configured=True)
    for name, summary in (
        ("info", "print vocabulary size, special ids and digest"),
        ("encode", "print the ids of a text"),
        ("decode", "print the text of ids"),
    ):
        sub = verb(actions, name, summary)
        sub.add_argument("model", help="tokenizer model file, token store or run folder")
        if name != "info":
            sub.add_argument("input", nargs="*", help="text, or ids; without it, standard input")

    sub = verb(verbs, "prepare", "make the token store data.store of data.sources", configured=True)
    sub.add_argument("--workers", type=whole(0), default=0, help="processes; 0: one per core")

    sub = verb(verbs, "train", "train a model; a run that exists is continued", configured=True)
    sub.add_argument(
        "--show-config", action="store_true", help="print every value and its origin, and stop"
    )

    sub = verb(verbs, "eval", "loss, perplexity and bits per byte of a checkpoint")
    sub.add_argument("run", help="run folder, or one step folder in its ckpt/")
    sub.add_argument("--data", action="append", default=[], metavar="[NAME=]PATH",
                     help="token store or text; default: the run's held-out data")  # fmt: skip
    sub.add_argument("--step", type=int, help="checkpoint step; default: the newest")
    sub.add_argument("--batch", type=whole(0), default=0,
                     help="rows at once; never changes the result; 0: as in training")  # fmt: skip
    sub.add_argument("--max-rows", type=whole(0), default=0, help="rows per set; 0: all")

    sub = verb(verbs, "generate", "write text with a checkpoint")
    sub.add_argument("run", help="run folder, or one step folder in its ckpt/")
    sub.add_argument("--prompt", action="append", default=[], help="start of a text; repeatable")
    sub.add_argument("--prompt-file", help="a file with one prompt a line")
    sub.add_argument("--step", type=int, help="checkpoint step; default: the newest")
    sub.add_argument("--max-new-tokens", type=int, default=128)
    sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    sub.add_argument("--top-k", type=int, default=0, help="0: off")
    sub.add_argument("--top-p", type=float, default=1.0, help="nucleus; 1: off")
    sub.add_argument("--min-p", type=float, default=0.0, help="share of the best token; 0: off")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off")
    sub.add_argument("--seed", type=whole(0, MAX_SEED), default=0)
    sub.add_argument("--samples", type=whole(1), default=1, help="continuations of each prompt")
    sub.add_argument("--window", action="store_true",
                     help="past the context, go on with the most recent tokens")  # fmt: skip
    sub.add_argument("--ignore-eos", action="store_true", help="do not stop at end-of-text")
    return parser


def is_configuration(word: str) -> bool:
    """Tell whether a word that argparse left over belongs to the configuration."""
    if word.startswith("-"):
        return word.startswith("--") and "." in word
    return "=" in word or word.endswith(".toml")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; the only place where errors become exit codes."""
    as_json = False
    try:
        runtime.prepare_environment(argv)
        args, rest = build_parser().parse_known_args(argv)
        as_json = getattr(args, "json", False)
        if rest:  # --section.field=value is accepted, and words of the configuration after options
            overrides = [word for word in rest if is_configuration(word)]
            if not hasattr(args, "config") or len(overrides) < len(rest):
                raise ConfigError(f"unknown arguments: {' '.join(rest)} (see jaxgpt --help)")
            args.config += overrides
        if argv is None and args.verb in ("eval", "generate"):
            # Nothing to save, and JAX's garbage callback can swallow a KeyboardInterrupt.
            signal.signal(signal.SIGINT, leave)
        from jaxgpt import commands  # after the environment is set: it imports JAX

        result = commands.run(args)
        if as_json:
            print(json.dumps(result), flush=True)
        code = 0
    except JaxgptError as error:
        code = error.exit_code
        label = "" if isinstance(error, Interrupted) else "error: "
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"jaxgpt: {label}{line}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": str(error), "exit_code": code}))
    except KeyboardInterrupt:
        print("jaxgpt: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output left, e.g. `| head`
        code = 0
    except OSError as error:  # of an output; the rooms name the files they write themselves
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "standard output"
        print(f"jaxgpt: error: {place}: {error.strerror}; make room", file=sys.stderr)
        code = StorageError.exit_code
    return code


def leave(number: int, frame: object) -> NoReturn:
    """Signal handler: end now, with the exit code of a forced end."""
    print("\njaxgpt: interrupted", file=sys.stderr)
    runtime.hard_exit(130)


def entry() -> NoReturn:
    """Process entry point: exit with `main`'s code even if a library thread refuses to end."""
    try:
        code = main()
    except SystemExit as error:  # --help and --version
        code = error.code if isinstance(error.code, int) else 64
    except Exception:
        import traceback

        traceback.print_exc()
        print("jaxgpt: this is a bug in jaxgpt; please report the lines above", file=sys.stderr)
        code = 70
    runtime.hard_exit(code)


if __name__ == "__main__":
    entry()
