"""Prepared TensorFlow Datasets as a source of documents: read offline, in stored order.

Written `tfds:NAME/SPLIT`, where NAME may carry a config and a version (`wiki/en:1.0.0`) and SPLIT
may be any split expression (`train[:10%]`). Nothing is ever downloaded or prepared here. Formats
with random access (ArrayRecord) are read as a data source, others (TFRecord) through tf.data; the
documents are the same. TensorFlow is imported on first use, with accelerators hidden from it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxgpt.corpus import columnar, files
from jaxgpt.corpus.formats import BadRecords, Piece
from jaxgpt.errors import DataError


class Examples(NamedTuple):
    """Number of examples, their bytes, and a stamp that changes with version, sizes and times."""

    count: int
    num_bytes: int
    stamp: str


def examples(entry: str, data_dir: str, text_field: str) -> Examples:
    """Return what a `tfds:` entry holds.

    Raises DataError when it is malformed, unknown, not prepared, or has no such split or field;
    UnreadableFile when one of its files is gone.
    """
    builder, split = _builder(entry, data_dir)
    features = list(builder.info.features or ())
    if text_field not in features:
        raise DataError(f"{entry}: no field {text_field!r}, only {', '.join(features)}")
    info = _split_info(builder, entry, split)
    whole = builder.info.splits[re.match(r"\w+", split)[0]] if split[0].isalnum() else info
    num_bytes = int(whole.num_bytes * info.num_examples / max(1, whole.num_examples))
    hasher = hashlib.sha256()
    for path in sorted(map(str, info.filepaths)):
        hasher.update(
            f"{path}\0{'' if files.is_remote(path) else files.status(path).stamp}\0".encode()
        )
    stamp = f"{builder.info.full_name} {info.num_examples} {hasher.hexdigest()[:16]}"
    return Examples(info.num_examples, num_bytes, stamp)


def can_cut(entry: str) -> bool:
    """Return whether an entry is a whole split, so that ranges of it can be read."""
    return entry.rpartition("/")[2].isidentifier()


def documents(
    entry: str, data_dir: str, text_field: str, start: int, stop: int, bad: BadRecords
) -> Iterator[Piece]:
    """Yield examples [start, stop) of an entry that can be cut, or all of one that cannot.

    Origins are entry:number. Raises DataError as `bad` decides, and for damaged or missing records.
    """
    builder, split = _builder(entry, data_dir)
    if can_cut(entry):
        split = f"{split}[{start}:{stop}]"
    index, end = start, start + _split_info(builder, entry, split).num_examples
    for value in _values(builder, entry, split, text_field, start):
        if not isinstance(value, bytes):
            raise DataError(f"{entry}: field {text_field!r} holds no text")
        where = f"{entry}: example {index}"
        yield from columnar.value_pieces(value, where, f"{entry}:{index}", bad)
        index += 1
    if index != end:
        raise DataError(f"{entry}: damaged: it ends at example {index} of {end}")


def _values(builder: Any, entry: str, split: str, text_field: str, start: int) -> Iterator[Any]:
    """Yield one field of the examples of a split; no other field is decoded."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    wanted = tfds.decode.PartialDecoding({text_field: True})
    index = start
    try:
        if builder.info.file_format.value == "array_record":
            features = wanted.extract_features(builder.info.features)
            raw = tfds.decode.DeserializeMethod.RAW_BYTES
            for record in builder.as_data_source(split, deserialize_method=raw):
                yield features.deserialize_example_np(record)[text_field]
                index += 1
            return
        stored_order = tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1)
        dataset = builder.as_dataset(
            split=split, shuffle_files=False, decoders=wanted, read_config=stored_order
        )
        for example in dataset.as_numpy_iterator():
            yield example[text_field]
            index += 1
    except (tf.errors.OpError, RuntimeError) as error:  # ArrayRecord's readers raise the latter
        reason = str(getattr(error, "message", error)).splitlines()[0]
        raise DataError(f"{entry}: damaged near example {index}: {reason}") from error


def _split_info(builder: Any, entry: str, split: str) -> Any:
    try:
        info = builder.info.splits[split]
        info.num_examples  # noqa: B018  # computed here, and refused here
        return info
    except (ValueError, KeyError, AssertionError) as error:
        known = ", ".join(builder.info.splits)
        raise DataError(f"{entry}: no split {split!r}; there are {known}") from error


def _builder(entry: str, data_dir: str) -> tuple[Any, str]:
    """Return the builder of prepared data and the split expression of a `tfds:` entry."""
    name, _, split = entry.removeprefix("tfds:").rpartition("/")
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", name) or not split:
        raise DataError(f"{entry!r}: write tfds:NAME/SPLIT or tfds:NAME:VERSION/SPLIT")
    from jaxgpt.data.feeder import import_tensorflow

    import_tensorflow().get_logger().setLevel("ERROR")
    import absl.logging
    import tensorflow_datasets as tfds

    absl.logging.set_verbosity(absl.logging.ERROR)  # tfds warns of its own deprecated functions

    try:
        builder = tfds.builder(name, data_dir=data_dir or None, try_gcs=False)
    except Exception as error:  # tfds raises many types, all meaning that it has no such dataset
        reason = str(error).splitlines()[0]
        raise DataError(f"{entry}: {reason} (data.data_dir = {data_dir!r})") from error
    if not builder.info.splits:
        raise DataError(f"{entry}: not prepared in {builder.data_dir}; prepare it with tfds first")
    return builder, split
