"""Results kept in a file of JSON lines, and what has become slower or faster since.

A result is known by what was measured (verb, options) and where (device, processor, cores), a
version by the digest of the package's code and the version of JAX. A difference counts if the
ranges of the two medians, each as wide as its spread to both sides, do not meet.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxgpt import __version__, strict_json
from jaxgpt.durable import storage_errors
from jaxgpt.errors import DataError, show_path

Result = dict[str, Any]
PACKAGE = Path(__file__).parent.parent
# Options that say how long to measure, not what; and those that say what to do with the result.
EFFORT = {"steps", "warm_up", "repeats", "seconds", "pairs", "no_check"}
NOT_MEASURED = {"verb", "action", "json", "save", "figure"}
WHERE = ("device", "devices", "processor", "cores")


def check_writable(path: Path) -> None:
    """Raise StorageError, before anything is measured, if `save` could not append to a file."""
    with storage_errors(path), open(path, "ab"):
        pass


def save(
    path: Path, verb: str, options: dict[str, Any], figure: str | None, result: Result
) -> None:
    """Append a result as one line of JSON, with date, version, commit and what was asked for.

    `figure` is the key of what it is compared by. Raises StorageError.
    """
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    asked = {key: value for key, value in options.items() if key not in NOT_MEASURED}
    identity = {"date": date, "jaxgpt": __version__, "commit": commit(), "code": code_digest()}
    identity |= {"verb": verb, "options": asked, "figure": figure}
    line = json.dumps(identity | result) + "\n"
    with storage_errors(path), open(path, "a+b") as file:
        if file.tell() and not ends_in_newline(path):  # a line that was cut off stays alone
            line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def ends_in_newline(path: Path) -> bool:
    """Tell whether the last byte of a file that is not empty ends a line."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def code_digest(package: Path = PACKAGE) -> str:
    """Return 12 hex digits that tell versions of the package's code apart."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]


def commit(package: Path = PACKAGE) -> str | None:
    """Return the git commit of the package, with `+` behind it if its files differ from that.

    None: not known, for there is no git, or the package is not in the repository that it lies in.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read(path: Path, say: Callable[[str], None]) -> tuple[list[Result], int]:
    """Return the results in a file, in their order, and the number of damaged lines.

    Of each damaged line is said where it is and what is wrong. Raises DataError for a file that
    cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{show_path(str(path))}: cannot be read: {error.strerror}") from None
    results, damaged = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            results.append(checked(strict_json.loads(line)))
        except (ValueError, RecursionError) as error:
            damaged += 1
            say(f"{show_path(str(path))}:{number}: passed over, not a result: {reason(error)}")
    return results, damaged


def reason(error: Exception) -> str:
    """Return what is wrong with a line."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def checked(value: Any) -> Result:
    """Return a result; raises ValueError for what is none."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    kinds = {"verb": str, "options": dict, "code": str, "date": str}
    if wrong := [key for key, kind in kinds.items() if not isinstance(value.get(key), kind)]:
        raise ValueError(f"no {wrong[0]}")
    numbers = ("spread", "repeats")
    if wrong := [key for key in numbers if not isinstance(value.get(key, 0), int | float)]:
        raise ValueError(f"{wrong[0]} is not a number")
    if figure_name(value) is None:
        raise ValueError("no figure above 0 (tokens_per_sec_median or the like)")
    return value


def figure_name(result: Result) -> str | None:
    """Return the key of the figure that results are compared by; None: it has none above 0."""
    others = [key for key in result if key.endswith("_per_sec_median")]
    own = str(result.get("figure"))
    for name in ("ratio_median", own, "tokens_per_sec_median", *others, "seconds_median"):
        value = result.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return name
    return None


def key(result: Result) -> str:
    """Return what was measured and where, as text: equal for results that may be compared."""
    asked = dict(result["options"])
    if isinstance(asked.get("config"), list):
        asked["config"] = sorted(map(str, asked["config"]))
    asked = {name: v for name, v in asked.items() if name not in EFFORT and v is not None}
    where = {name: result.get(name) for name in WHERE}
    return json.dumps([result["verb"], figure_name(result), asked, where], sort_keys=True)


def compare(earlier: Sequence[Result] | None, newer: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each thing measured in `newer`: its newest version beside an earlier one.

    The earlier one is the newest in `earlier` or, where that is None, the one before in `newer`.
    Results of one version that follow each other count together. The `ratio` is that of the
    speeds, above 1 is faster; `spread` that of both together; `verdict` one of faster, slower,
    within the spread, spread unknown, nothing earlier.
    """
    rows = []
    before = None if earlier is None else by_key(earlier)
    for name, results in by_key(newer).items():
        new, rest = newest_version(results)
        if before is not None:
            rest = before.get(name, [])
        old, _ = newest_version(rest)
        rows.append(row(new, old))
    return rows


def by_key(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results of each thing measured, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def newest_version(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return the last results, as many as are of one version, and those before them."""
    start = len(results)
    while start and program(results[start - 1]) == program(results[-1]):
        start -= 1
    return list(results[start:]), list(results[:start])


def program(result: Result) -> tuple[str, Any]:
    """Return what tells versions apart: the code of the package, and of the libraries."""
    return result["code"], result.get("framework")


def row(new: Sequence[Result], old: Sequence[Result]) -> dict[str, Any]:
    """Return a comparison of two versions, see `compare`."""
    name = figure_name(new[-1]) or ""
    figure, spread = summary(new, name)
    found: dict[str, Any] = {"verb": new[-1]["verb"], "options": new[-1]["options"]}
    found |= {place: new[-1].get(place) for place in WHERE}
    found |= {"figure": name, "newest": figure, "newest_version": version(new[-1])}
    if not old:
        return found | {"verdict": "nothing earlier"}
    other, other_spread = summary(old, name)
    ratio = other / figure if name == "seconds_median" else figure / other
    found |= {"earlier": other, "earlier_version": version(old[-1]), "ratio": round(ratio, 4)}
    if spread is None or other_spread is None:
        return found | {"spread": None, "verdict": "spread unknown"}
    found["spread"] = round(spread + other_spread, 4)
    return found | {"verdict": verdict(ratio, spread, other_spread)}


def verdict(ratio: float, spread: float, other_spread: float) -> str:
    """Say whether two medians differ by more than their spreads, which are shares of them."""
    if ratio * (1 - spread) > 1 + other_spread:
        return "faster"
    return "slower" if ratio * (1 + spread) < 1 - other_spread else "within the spread"


def summary(results: Sequence[Result], name: str) -> tuple[float, float | None]:
    """Return the median figure of results of one version, and its spread, a share of it.

    That is the larger of the typical spread inside a result and half the range of several.
    """
    figures = [float(result[name]) for result in results]
    median = statistics.median(figures)
    inside = [spread for result in results if (spread := inner_spread(result, name)) is not None]
    spreads = [statistics.median(inside)] if inside else []
    if len(figures) > 1:
        spreads.append((max(figures) - min(figures)) / 2 / median)
    return median, max(spreads, default=None)


def inner_spread(result: Result, name: str) -> float | None:
    """Return the spread of a figure: `encode_spread` of `encode_mb_per_sec_median`, or `spread`."""
    words = name.removesuffix("_per_sec_median").split("_")
    keys = ["_".join([*words[:count], "spread"]) for count in range(len(words), -1, -1)]
    found = next((result[key] for key in keys if isinstance(result.get(key), int | float)), None)
    return float(found) if found is not None and result.get("repeats", 2) > 1 else None


def version(result: Result) -> str:
    """Return what people call a version: its commit, or the digest of its code, and the date."""
    name = str(result.get("commit") or "")
    short = name[:9] + ("+" if name.endswith("+") else "") if name else result["code"]
    return f"{short} ({result.get('framework') or 'libraries unknown'}) of {result['date'][:16]}"
