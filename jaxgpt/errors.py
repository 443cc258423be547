"""What can go wrong in a way the user can act on: one exception per exit code.

The message is one line: what, where (file:line, config key, leaf path), the value, what would be
right. The command prints it without a traceback and exits with `exit_code`; any other exception is
a bug (70).
"""

from __future__ import annotations


class JaxgptError(Exception):
    """Base of every expected failure."""

    exit_code = 70


class ConfigError(JaxgptError):
    """A refused configuration; `problems` holds one line for each thing that is wrong."""

    exit_code = 64

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class DataError(JaxgptError):
    """Input text, a token store or a tokenizer that cannot be used."""

    exit_code = 65


class NothingRestorable(JaxgptError):
    """A run that is not empty but holds no checkpoint that passes verification."""

    exit_code = 66


class StorageError(JaxgptError):
    """A file system that refuses to write or read (full, read-only, failing)."""

    exit_code = 74


class Interrupted(JaxgptError):
    """Stopped by a signal after a durable save; starting again continues the run."""

    exit_code = 75


class HangError(JaxgptError):
    """A phase that exceeded its time limit, or a lost peer."""

    exit_code = 76


class DisagreementError(JaxgptError):
    """Hosts that were started with different configuration, data or code."""

    exit_code = 78


class NumericsError(JaxgptError):
    """Too many non-finite steps in a row, or a compiler setting that breaks gradients."""

    exit_code = 79


def show_path(path: str) -> str:
    r"""Return a path as one printable line, different for different paths.

    Bytes of what is not printable, or no UTF-8, and the backslash become \xNN.
    """
    if path.isprintable() and "\\" not in path:
        return path
    return "".join(c if c.isprintable() and c != "\\" else _escape(c) for c in path)


def one_line(error: object) -> str:
    """Return what a library says is wrong as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def _escape(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
