"""The `jaxgpt` command: parse, dispatch, exit codes; nothing else.

    jaxgpt VERB [CONFIG.toml] [section.field=value ...] [--json]

Results go to stdout (one JSON object with --json), progress and messages to stderr. Exit codes:
0 done, 64 config refused, 65 data refused, 66 nothing restorable, 70 bug, 74 storage,
75 interrupted with a durable checkpoint (start again), 76 hang, 78 hosts disagree, 79 numerics,
130/143 forced.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
from typing import NoReturn

from jaxgpt.errors import ConfigError, Interrupted, JaxgptError, StorageError
from jaxgpt.options import build_parser
from jaxgpt.runtime import leaving, memory
from jaxgpt.runtime.environment import prepare_environment
from jaxgpt.runtime.leaving import error_line, hard_exit


def split_at_dashes(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the words of `prepare` before `--`, and those after it, which are Beam's."""
    if words[:1] != ["prepare"] or "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def is_configuration(word: str) -> bool:
    """Tell whether a word that argparse left over belongs to the configuration."""
    if word.startswith("-"):
        return word.startswith("--") and "." in word
    return "=" in word or word.endswith(".toml")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; the only place where errors become exit codes."""
    as_json = False
    try:
        prepare_environment(argv)
        words, after_dashes = split_at_dashes(sys.argv[1:] if argv is None else list(argv))
        args, rest = build_parser().parse_known_args(words)
        as_json = getattr(args, "json", False)
        if after_dashes:
            args.after_dashes = after_dashes
        if rest:  # --section.field=value is accepted, and words of the configuration after options
            overrides = [word for word in rest if is_configuration(word)]
            if not hasattr(args, "config") or len(overrides) < len(rest):
                raise ConfigError(f"unknown arguments: {' '.join(rest)} (see jaxgpt --help)")
            args.config += overrides
        if argv is None and args.verb in ("eval", "generate", "train"):
            # Nothing to save (a run that trains takes the signals itself), and a KeyboardInterrupt
            # can be swallowed by JAX's garbage callback, or become an ImportError in an extension.
            signal.signal(signal.SIGINT, leave)
        if argv is None and args.verb == "train":
            signal.signal(signal.SIGTERM, leave)
        if args.verb == "train":
            memory.pause_collector()  # until the first step
        from jaxgpt.commands import verbs  # after the environment is set: it imports JAX

        result = verbs.run(args)
        if as_json and leaving.is_first():
            print(json.dumps(result), flush=True)
        code = result.get("exit_code", 0)  # of a verb that has a result and it is bad news
    except JaxgptError as error:
        code = error.exit_code
        label = "" if isinstance(error, Interrupted) else "error: "
        for line in str(error).splitlines() or [type(error).__name__]:
            print(error_line(f"{label}{line}"), file=sys.stderr)
        if as_json and leaving.is_first():
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
        line = f"error: {place}: {error.strerror}; make room"
        print(error_line(line), file=sys.stderr)
        code = StorageError.exit_code
    finally:
        memory.resume_collector()
    return code


def leave(number: int, frame: object) -> NoReturn:
    """Signal handler: end now, as forced by a person; or by SIGTERM, to be started again."""
    print("\njaxgpt: interrupted", file=sys.stderr)
    hard_exit(130 if number == signal.SIGINT else Interrupted.exit_code)


def entry() -> NoReturn:
    """Process entry point: exit with `main`'s code even if a library thread refuses to end."""
    try:
        code = main()
    except SystemExit as error:  # --help and --version
        code = error.code if isinstance(error.code, int) else 64
    except Exception:
        import traceback

        print(leaving.signed(traceback.format_exc()), end="", file=sys.stderr)
        bug = "this is a bug in jaxgpt; please report the lines above"
        print(error_line(bug), file=sys.stderr)
        code = 70
    hard_exit(code)


if __name__ == "__main__":
    entry()
