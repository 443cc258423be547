"""What a run has drawn from its stores so far, as its checkpoints keep it.

The past of a run does not follow from its configuration: weights, data and the layout of rows may
have been others before. So a checkpoint records the plan of the mixture, and since when rows have
been laid out as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxgpt.data.mixture import Plan
from jaxgpt.errors import DataError

if TYPE_CHECKING:
    from jaxgpt.data.stream import Data


@dataclass(frozen=True)
class History:
    """What a checkpoint recorded: the plan as it went, and will go, and the run's position.

    With `may_change`, another mixture may follow from there on.
    """

    plan: Plan
    position: int
    may_change: bool = False
    layout: str = ""  # and the seed; in force since position `since`
    since: int = 0


def record(data: Data) -> dict[str, Any]:
    """Return what a checkpoint keeps of the mixture, as JSON values."""
    plan = [[start, dict(table)] for start, table in data.mixture.plan]
    return {"plan": plan, "layout": f"{data.layout} {data.seed}", "since": data.since}


def recall(recorded: Any, position: int, *, may_change: bool = False) -> History:
    """Return the history that `record` wrote; DataError if it is none."""
    try:
        stages = recorded["plan"]
        plan = tuple((int(s), {str(k): float(w) for k, w in t.items()}) for s, t in stages)
        if not plan or plan[0][0] != 0:
            raise ValueError("no first stage")
        layout, since = str(recorded["layout"]), int(recorded["since"])
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DataError(f"the mixture recorded in the checkpoint is damaged: {error}") from None
    return History(plan, position, may_change, layout, since)
