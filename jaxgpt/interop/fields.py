"""Typed reading of one foreign config.json: what is wrong is collected and said at once.

A field that is absent has the default of transformers; a field that is null is not absent. Nothing
here knows what the fields mean.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

MAX_WHOLE = (1 << 31) - 1
MAX_NUMBER = sys.float_info.max


@dataclass(frozen=True)
class Fields:
    """A config.json, the defaults of its family, and the problems found so far."""

    config: dict[str, Any]
    defaults: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        return self.config.get(key, self.defaults.get(key))

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Note that a field cannot be used as it is."""
        key = key if key.isprintable() and len(key) <= 80 else ascii(key)[:80]
        text = json.dumps(value, default=str)
        self.problems.append(f"{key} = {text if len(text) <= 80 else text[:77] + '...'}: {why}")

    def whole(self, key: str, *, null: int | None = None, lowest: int = 1) -> int:
        """Return a whole number; `null` is what a null means, where a null means something."""
        value = self.value(key)
        if value is None and null is not None:
            return null
        if type(value) is not int or not lowest <= value <= MAX_WHOLE:
            self.refuse(key, value, f"must be a whole number from {lowest} to {MAX_WHOLE}")
            return max(1, lowest)
        return value

    def number(self, key: str, *, null: float | None = None) -> float:
        """Return a number above 0; `null` as in `whole`."""
        value = self.value(key)
        return null if value is None and null is not None else self.positive(key, value)

    def positive(self, key: str, value: Any) -> float:
        """Return `value` as a number above 0, or 1 if it is none, which is noted."""
        if type(value) in (int, float) and 0 < value <= MAX_NUMBER:
            return float(value)
        self.refuse(key, value, "must be a number above 0")
        return 1.0

    def share(self, key: str) -> float:
        """Return a number in [0, 1); null means 0."""
        value = self.value(key)
        if value is None or type(value) in (int, float) and 0 <= value < 1:
            return float(value or 0.0)
        self.refuse(key, value, "must lie in [0, 1)")
        return 0.0

    def flag(self, key: str) -> bool:
        """Return true or false; null means false."""
        value = self.value(key)
        if value is not None and type(value) is not bool:
            self.refuse(key, value, "must be true or false")
        return value is True

    def table(self, key: str) -> dict[str, Any]:
        """Return an object; null means an empty one."""
        value = self.value(key)
        if value is not None and type(value) is not dict:
            self.refuse(key, value, "must be an object")
        return value if type(value) is dict else {}

    def choice(self, key: str, meanings: dict[str, str]) -> str:
        """Return what a word means; one that is not in `meanings` is refused."""
        value = self.value(key)
        if type(value) is str and value in meanings:
            return meanings[value]
        self.refuse(key, value, f"must be one of {', '.join(meanings)}")
        return next(iter(meanings.values()))

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a field that has another value than those which change nothing."""
        if (value := self.value(key)) not in (None, *allowed):
            self.refuse(key, value, "no model of jaxgpt computes this")
