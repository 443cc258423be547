"""Prepared TensorFlow Datasets as a source of documents: read offline, in stored order.

Written `tfds:NAME/SPLIT`, where NAME may carry a config and a version (`wiki/en:1.0.0`) and SPLIT
may be any split expression (`train[:10%]`). Nothing is ever downloaded or prepared here.
TensorFlow is imported on first use, with accelerators hidden from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxgpt.data.formats import BadRecords, Document, decode
from jaxgpt.errors import DataError


def examples(entry: str, data_dir: str, text_field: str) -> tuple[int, int, str]:
    """Return number of examples, their bytes, and full name with version, of a `tfds:` entry.

    Raises DataError when it is malformed, unknown, not prepared, or has no such split or field.
    """
    builder, split = _builder(entry, data_dir)
    features = list(builder.info.features or ())
    if text_field not in features:
        raise DataError(f"{entry}: no field {text_field!r}, only {', '.join(features)}")
    try:
        info = builder.info.splits[split]
        count = info.num_examples
    except (ValueError, KeyError, AssertionError) as error:
        known = ", ".join(builder.info.splits)
        raise DataError(f"{entry}: no split {split!r}; there are {known}") from error
    whole = builder.info.splits[re.match(r"\w+", split)[0]] if split[0].isalnum() else info
    num_bytes = int(whole.num_bytes * count / max(1, whole.num_examples))
    return count, num_bytes, builder.info.full_name


def can_cut(entry: str) -> bool:
    """Return whether an entry is a whole split, so that ranges of it can be read."""
    return entry.rpartition("/")[2].isidentifier()


def documents(
    entry: str, data_dir: str, text_field: str, start: int, stop: int, bad: BadRecords
) -> Iterator[Document]:
    """Yield examples [start, stop) of an entry that can be cut, or all of one that cannot."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder, split = _builder(entry, data_dir)
    if can_cut(entry):
        split = f"{split}[{start}:{stop}]"
    stored_order = tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1)
    index = start
    try:
        dataset = builder.as_dataset(split=split, shuffle_files=False, read_config=stored_order)
        for example in dataset.as_numpy_iterator():
            value = example[text_field]
            if not isinstance(value, bytes):
                raise DataError(f"{entry}: field {text_field!r} holds no text")
            text = decode(value, f"{entry}: example {index}", bad)
            if text is not None:
                yield Document(text, f"{entry}:{index}")
            index += 1
    except tf.errors.OpError as error:
        reason = str(error.message).splitlines()[0]
        raise DataError(f"{entry}: damaged near example {index}: {reason}") from error


def _builder(entry: str, data_dir: str) -> tuple[Any, str]:
    """Return the builder of prepared data and the split expression of a `tfds:` entry."""
    name, _, split = entry.removeprefix("tfds:").rpartition("/")
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", name) or not split:
        raise DataError(f"{entry!r}: write tfds:NAME/SPLIT or tfds:NAME:VERSION/SPLIT")
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tf.get_logger().setLevel("ERROR")
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    try:
        builder = tfds.builder(name, data_dir=data_dir or None, try_gcs=False)
    except Exception as error:  # tfds raises many types, all meaning that it has no such dataset
        reason = str(error).splitlines()[0]
        raise DataError(f"{entry}: {reason} (data.data_dir = {data_dir!r})") from error
    if not builder.info.splits:
        raise DataError(f"{entry}: not prepared in {builder.data_dir}; prepare it with tfds first")
    return builder, split
