"""TensorFlow Datasets prepared on disk are read offline, in order, from any range."""

from __future__ import annotations

import contextlib
import os
import shutil

import numpy as np
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.data import sources, tfds_source
from jaxgpt.data.formats import BadRecords
from jaxgpt.errors import DataError

TEXTS = [f"document {i} caf\u00e9\n" for i in range(40)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    import tensorflow_datasets as tfds

    class TinyText(tfds.core.GeneratorBasedBuilder):
        """Forty texts, and three with one that is no UTF-8."""

        VERSION = tfds.core.Version("1.2.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": np.int64}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(TEXTS),
                "broken": self._generate_examples([b"a", b"\xff", b"b"]),
            }

        def _generate_examples(self, texts):
            for number, text in enumerate(texts):
                yield number, {"text": text, "number": number}

    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        TinyText(data_dir=str(folder)).download_and_prepare()
    return str(folder)


def read(data_dir, entry, start=0, stop=40, bad=None):
    bad = bad or BadRecords("error")
    found = tfds_source.documents(entry, data_dir, "text", start, stop, bad)
    return [document.text for document in found]


def test_a_split_gives_each_document_once(data_dir):
    count, size, name = tfds_source.examples("tfds:tiny_text/train", data_dir, "text")
    assert (count, name) == (40, "tiny_text/1.2.0") and size > sum(map(len, TEXTS))
    assert sorted(read(data_dir, "tfds:tiny_text/train")) == sorted(TEXTS)


def test_ranges_join_to_the_whole(data_dir):
    whole = read(data_dir, "tfds:tiny_text:1.2.0/train")
    ranges = [(0, 7), (7, 8), (8, 40)]
    assert [t for a, b in ranges for t in read(data_dir, "tfds:tiny_text/train", a, b)] == whole


def test_partitions_of_a_split_join_to_the_whole(data_dir):
    cfg = DataConfig(sources=("tfds:tiny_text/train",), data_dir=data_dir, partition_bytes=300)
    assert len(sources.partitions(cfg)) > 3
    assert list(sources.texts(cfg)) == read(data_dir, "tfds:tiny_text/train")


def test_a_part_of_a_split_can_be_named(data_dir):
    cfg = DataConfig(sources=("tfds:tiny_text/train[:25%]",), data_dir=data_dir)
    assert list(sources.texts(cfg)) == read(data_dir, "tfds:tiny_text/train")[:10]


def test_bad_text_goes_by_policy(data_dir):
    with pytest.raises(DataError, match=r"broken: example \d: byte 0: 0xFF is not UTF-8"):
        read(data_dir, "tfds:tiny_text/broken", 0, 3)
    bad = BadRecords("skip")
    assert sorted(read(data_dir, "tfds:tiny_text/broken", 0, 3, bad)) == ["a", "b"]
    assert bad.skipped == 1


@pytest.mark.parametrize(
    ("entry", "field", "problem"),
    [
        ("tfds:no_such_thing/train", "text", "no_such_thing"),
        ("tfds:tiny_text:9.9.9/train", "text", "9.9.9"),
        ("tfds:tiny_text/test", "text", "no split 'test'; there are broken, train|train, broken"),
        ("tfds:tiny_text/train", "body", "no field 'body', only"),
        ("tfds:tiny_text", "text", "write tfds:NAME/SPLIT"),
        ("tfds:huggingface:x/train", "text", "write tfds:NAME/SPLIT"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(data_dir, entry, field, problem):
    with pytest.raises(DataError, match=problem) as refused:
        tfds_source.examples(entry, data_dir, field)
    assert "\n" not in str(refused.value)


def test_a_known_but_unprepared_dataset_is_refused_without_a_download(tmp_path):
    with pytest.raises(DataError, match="mnist/train: not prepared in"):
        tfds_source.examples("tfds:mnist/train", str(tmp_path), "image")


def test_a_field_that_is_no_text_is_refused(data_dir):
    bad = BadRecords("error")
    with pytest.raises(DataError, match="field 'number' holds no text"):
        list(tfds_source.documents("tfds:tiny_text/train", data_dir, "number", 0, 1, bad))


def test_a_truncated_dataset_file_is_refused(data_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(data_dir, folder)
    (path,) = folder.rglob("*train.tfrecord*")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="damaged near example"):
        read(str(folder), "tfds:tiny_text/train")
