"""The stream of a run: which row of which store is the sample at a position.

`open_data` opens the stores and packing indices and fixes the plan of their weights: stages, each
a position and the weights that hold from there. What a run has already consumed is history: a
resumed run keeps the plan recorded in its checkpoint up to its position, and takes another from
there on only when told to. Stores are known by the identity of their contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import best_fit, order
from jaxgpt.data.history import History
from jaxgpt.data.mixture import (
    MAX_POSITION,
    Mixture,
    Plan,
    draws,
    ends,
    make_mixture,
    resume,
    same_from,
    visits_before,
)
from jaxgpt.data.packing import Layout, Rows
from jaxgpt.data.store import Store, open_store
from jaxgpt.errors import ConfigError, DataError

STREAM_VERSION = 2  # part of the digest; raise it with any change of what a position holds


@dataclass(frozen=True, eq=False)
class Data:
    """Everything the stream of samples depends on, and nothing else; `open_data` makes one.

    Per source, in the order of their digests: `sources` (None: only drawn before the position
    where a resumed run goes on, and no longer there), `names` as configured (NAME@N: what was drawn
    from a store while it was generation N), and what `mixture` holds. `digest` identifies the
    stream: where it is the same, so is the sample at every position, wherever the stores lie.
    `layout` is its part that no stage can change; a resumed run may have another one `since` a
    position, and what came before cannot be told from this record.
    """

    sources: tuple[Rows | None, ...]
    names: tuple[str, ...]
    mixture: Mixture
    seed: int
    seq_len: int
    document_mask: bool
    order: str
    layout: str
    since: int = 0

    @property
    def digest(self) -> str:
        stages = [[stage.start, stage.counts.tolist()] for stage in self.mixture.stages]
        facts = [self.layout, self.seed, self.mixture.names, stages, self.mixture.end]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(source.store for source in self.sources if source)

    @property
    def row_layout(self) -> Layout:
        return next(source for source in self.sources if source).layout(self.document_mask)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of one epoch of each source that is there."""
        return tuple(source.num_rows for source in self.sources if source)

    @property
    def end(self) -> int:
        """The first position that does not exist."""
        return MAX_POSITION if self.mixture.end is None else self.mixture.end

    @property
    def tokenizer_digest(self) -> str:
        return self.stores[0].tokenizer_digest

    @property
    def vocab_size(self) -> int:
        return self.stores[0].vocab_size

    @property
    def eos_id(self) -> int:
        return self.stores[0].eos_id


def layout_digest(cfg: DataConfig, seq_len: int) -> str:
    """Return what identifies how rows are made and ordered, whatever they are made of."""
    packing = [cfg.packing] if cfg.packing == "concat" else [cfg.packing, best_fit.VERSION]
    facts = [STREAM_VERSION, order.VERSION, cfg.order, packing, seq_len, cfg.document_mask]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def locate(data: Data, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (source, epoch, row), int64 [M] each, of the samples at global positions [M]."""
    source, visit = draws(data.mixture, positions)
    epoch, row = np.empty_like(visit), np.empty_like(visit)
    for number in np.unique(source):
        mine = source == number
        rows = data.sources[number]
        if rows is None:
            raise ConfigError(
                f"data.store: the data {data.names[number]} of positions before the last change of "
                "the mixture is not among the stores"
            )
        epoch[mine], row[mine] = order.visit(
            data.seed,
            rows.store.digest,
            rows.num_rows,
            visit[mine],
            order=data.order,
            stretch=stretch(data.seq_len),
        )
    return source, epoch, row


def stretch(seq_len: int) -> int:
    """Return the rows of a stretch of `data.order = "block"`: 2^25 tokens, 64 to 128 MiB of ids."""
    return max(1, (1 << 25) // seq_len)


def epochs(data: Data, position: int) -> dict[str, float]:
    """Return how many passes over each source lie before a global position."""
    visits = visits_before(data.mixture, position).tolist()
    drawn = zip(data.names, visits, data.sources, strict=True)
    return {name: visit / source.num_rows for name, visit, source in drawn if source}


def open_data(
    cfg: DataConfig,
    *,
    seq_len: int,
    seed: int,
    split: str = "train",
    history: History | None = None,
    say: Callable[[str], None] | None = None,
) -> Data:
    """Open the stores of `cfg.store` and `cfg.stages` and check that they make one stream.

    A packing index that is missing is built beside the store, with a line through `say`. Raises
    ConfigError for weights or a seq_len that cannot be used, for a store named twice, and for a
    mixture that is not the one of `history` and may not be; DataError for stores of different
    tokenizers, without documents, or shorter than one row.
    """
    best_fit.check_seq_len(seq_len)
    tables = list(_tables(cfg))
    names = list(dict.fromkeys(name for _, table in tables for name in table))
    if not names:
        raise ConfigError("data.store: the table of stores is empty; name at least one")
    if "" in names:
        raise ConfigError("data.store: names no store; give the folder that `prepare` wrote")
    max_open = max(1, 64 // len(names))  # file descriptors, over all stores together
    opened = {name: _open(name, split, history, max_open, say) for name in names}
    by_digest: dict[str, str] = {}
    for name, store in opened.items():
        if (other := by_digest.setdefault(store.digest, name)) != name:
            raise ConfigError(f"data.store: {other} and {name} hold the same data; add the weights")
    for name, store in opened.items():
        _check_source(store, name, opened[names[0]], names[0], seq_len, split)
    sources = {
        store.digest: Rows(store, seq_len, _index(cfg, store, seq_len, say))
        for store in opened.values()
    }
    wanted = tuple(
        (start, {opened[name].digest: weight for name, weight in table.items()})
        for start, table in tables
    )
    counts = {digest: rows.num_rows for digest, rows in sources.items()}
    for name, rows in _earlier(cfg, seq_len, split, history, opened).items():
        sources[rows.store.digest], by_digest[rows.store.digest] = rows, name
    limits = {"max_epochs": cfg.max_epochs, "run_out": cfg.run_out}
    try:
        if history is None:
            mixture = make_mixture(wanted, counts, **limits)
        else:
            mixture = resume(history.plan, wanted, history.position, counts, **limits)
    except ConfigError as error:
        text = str(error)
        for digest, name in by_digest.items():
            text = text.replace(digest, name)
        raise ConfigError(*text.splitlines()) from None
    if history:
        _check_change(history, mixture, by_digest)
    layout, since = layout_digest(cfg, seq_len), 0
    if history:
        same = history.layout == f"{layout} {seed}"
        since = history.since if same else history.position
    if say and cfg.run_out == "drop":
        for digest, position in ends(mixture).items():
            if position != mixture.end:
                name = by_digest.get(digest, digest[:12])
                say(f"{name}: runs out at row {position:,}; the others go on (data.run_out)")
    return Data(
        sources=tuple(sources.get(digest) for digest in mixture.names),
        names=tuple(by_digest.get(digest, digest[:12]) for digest in mixture.names),
        mixture=mixture,
        seed=seed,
        seq_len=seq_len,
        document_mask=cfg.document_mask,
        order=cfg.order,
        layout=layout,
        since=since,
    )


def _tables(cfg: DataConfig) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (first position, {store name: weight}) of each configured stage, in order."""
    yield 0, cfg.store if isinstance(cfg.store, dict) else {cfg.store: 1.0}
    stages = {int(start.replace("_", "")): table for start, table in cfg.stages.items()}
    yield from sorted(stages.items())


def _open(
    name: str,
    split: str,
    history: History | None,
    max_open: int,
    say: Callable[[str], None] | None,
) -> Store:
    """Open a store: the newest generation, or the one that the run has been using."""
    store = open_store(name, split, max_open=max_open)
    if history is None or history.may_change:
        return store
    used = {digest for _, table in history.plan for digest in table}
    if store.digest in used:
        return store
    for digest in used:
        try:
            older = open_store(name, split, digest=digest, max_open=max_open)
        except DataError:
            continue
        if say:
            say(
                f"{name}: has been added to since the run began; going on with the data it began "
                'with (checkpoint.allow_change=["mixture"] takes the new)'
            )
        return older
    return store


def _earlier(
    cfg: DataConfig, seq_len: int, split: str, history: History | None, opened: dict[str, Store]
) -> dict[str, Rows]:
    """Return what a run has drawn from its stores when they were of an earlier generation."""
    plan = history.plan if history else ()
    drawn = {digest for start, table in plan if start < history.position for digest in table}
    found, whole = {}, cfg.packing == "best_fit_whole"
    for digest in sorted(drawn - {store.digest for store in opened.values()}):
        for name, store in opened.items():
            with contextlib.suppress(DataError):  # not of this store, or no longer packed
                older = open_store(store.directory, split, digest=digest, max_open=1)
                packed = cfg.packing != "concat"
                index = best_fit.open_index(older, seq_len, whole=whole) if packed else None
                generation = older.manifest["generation"]
                found[f"{name}@{generation}"] = Rows(older, seq_len, index)
                break
    return found


def _check_source(
    store: Store, name: str, first: Store, first_name: str, seq_len: int, split: str
) -> None:
    for field in ("tokenizer_digest", "vocab_size", "eos_id", "start_id"):
        ours, theirs = getattr(store, field), getattr(first, field)
        if ours != theirs:
            raise DataError(
                f"data.store: {name} has {field} {ours}, {first_name} has {theirs}; "
                "stores of one run need one tokenizer"
            )
    if store.num_docs == 0:
        kind, remedy = "", "prepare it with some text"
        if split == "valid":
            kind, remedy = "held-out ", "prepare it with a larger data.valid_share"
        raise DataError(f"data.store: {name} holds no {kind}documents; {remedy}")
    if seq_len > store.stream_len:
        raise DataError(
            f"data.store: {name} has {store.stream_len} tokens ({store.num_docs} documents), fewer "
            f"than one row of model.seq_len={seq_len}; add text or lower seq_len"
        )


def _index(
    cfg: DataConfig, store: Store, seq_len: int, say: Callable[[str], None] | None
) -> best_fit.PackingIndex | None:
    """Return the packing index that `cfg.packing` asks for, built first where it is missing."""
    if cfg.packing == "concat":
        return None
    whole = cfg.packing == "best_fit_whole"
    if not best_fit.index_path(store, seq_len, whole=whole).exists():
        if say:
            say(f"{store.directory}: packing {store.num_docs:,} documents into rows of {seq_len}")
        best_fit.build_index(store, seq_len, whole=whole)
    index = best_fit.open_index(store, seq_len, whole=whole)
    if say:
        cut = f", {index.truncated.tokens:,} tokens of longer documents left out" if whole else ""
        say(f"{store.directory}: {index.num_rows:,} rows, {index.padding:.3%} padding{cut}")
    return index


def _check_change(history: History, mixture: Mixture, names: dict[str, str]) -> None:
    at = history.position
    if history.may_change or same_from(history.plan, mixture.plan, at):
        return
    before, now = (_words(plan, at, names) for plan in (history.plan, mixture.plan))
    raise ConfigError(
        f"data.store: the run draws {before} from row {at} on, this configuration {now}; "
        'checkpoint.allow_change=["mixture"] makes the change there'
    )


def _words(plan: Plan, position: int, names: dict[str, str]) -> str:
    """Return the weights in force at a position and later, for a message."""
    active = max(start for start, _ in plan if start <= position)
    stages = [(start, table) for start, table in plan if start >= active]
    return ", ".join(
        (f"from row {start} " if start > position else "")
        + " + ".join(f"{weight:g} {names.get(k, k[:12])}" for k, weight in sorted(table.items()))
        for start, table in stages
    )
