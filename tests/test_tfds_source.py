"""TensorFlow Datasets prepared on disk are read offline, in order, from any range."""

from __future__ import annotations

import contextlib
import os
import shutil

import numpy as np
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.corpus import sources, tfds_source
from jaxgpt.corpus.files import UnreadableFile
from jaxgpt.corpus.formats import BadRecords
from jaxgpt.data.feeder import import_tensorflow
from jaxgpt.errors import DataError

TEXTS = [f"document {i} caf\u00e9\n" for i in range(40)]
HUGE = "\u20ac " * 700_000  # 2.8 MB


FORMATS = ("tfrecord", "array_record")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare one builder in both formats; return their folders."""
    import_tensorflow()
    import tensorflow_datasets as tfds

    class TinyText(tfds.core.GeneratorBasedBuilder):
        """Forty texts, three with one that is no UTF-8, and a huge one."""

        VERSION = tfds.core.Version("1.2.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "number": np.int64,
                "meta": {"parts": tfds.features.Sequence(tfds.features.Text())},
                "image": tfds.features.Image(shape=(1, 1, 3)),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(TEXTS),
                "broken": self._generate_examples([b"a", b"\xff", b"b"]),
                "huge": self._generate_examples([HUGE]),
            }

        def _generate_examples(self, texts):
            image = np.zeros((1, 1, 3), np.uint8)
            for number, text in enumerate(texts):
                example = {"text": text, "number": number, "meta": {"parts": ["p"]}}
                yield number, example | {"image": image}

    folders = {}
    tfds.disable_progress_bar()
    for kind in FORMATS:
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            TinyText(data_dir=folders[kind], file_format=kind).download_and_prepare()
    return folders


@pytest.fixture(params=FORMATS)
def data_dir(request, prepared):
    return prepared[request.param]


def pieces(data_dir, entry, start=0, stop=40, bad=None):
    bad = bad or BadRecords("error")
    return list(tfds_source.documents(entry, data_dir, "text", start, stop, bad))


def read(*args, **options):
    return [piece.text for piece in pieces(*args, **options)]


def test_a_split_gives_each_document_once(data_dir):
    count, size, stamp = tfds_source.examples("tfds:tiny_text/train", data_dir, "text")
    assert count == 40 and size > sum(map(len, TEXTS)) and stamp.startswith("tiny_text/1.2.0 40 ")
    assert sorted(read(data_dir, "tfds:tiny_text/train")) == sorted(TEXTS)


def test_both_formats_give_the_same_documents_in_the_order_in_which_they_are_stored(prepared):
    import tensorflow_datasets as tfds

    first, second = (pieces(prepared[kind], "tfds:tiny_text/train") for kind in FORMATS)
    assert first == second
    assert [piece.origin for piece in first] == [f"tfds:tiny_text/train:{i}" for i in range(40)]
    dataset = tfds.builder("tiny_text", data_dir=prepared["tfrecord"]).as_dataset(
        split="train", read_config=tfds.ReadConfig(add_tfds_id=True)
    )
    by_id = {int(e["tfds_id"].rpartition(b"__")[2]): e["text"] for e in dataset.as_numpy_iterator()}
    assert [piece.text.encode() for piece in first] == [by_id[i] for i in range(40)]


def test_a_huge_document_comes_in_pieces(data_dir):
    found = pieces(data_dir, "tfds:tiny_text/huge", 0, 1)
    assert len(found) > 2 and "".join(piece.text for piece in found) == HUGE
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]


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
        ("tfds:tiny_text/test", "text", "no split 'test'; there are .*broken"),
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


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_dataset_file_is_refused(data_dir, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(data_dir, folder)
    (path,) = folder.rglob("*train.*record*")
    data = bytearray(path.read_bytes())
    data[data.index(b"document 20") + 3] ^= 1
    path.write_bytes({"cut": data[:-10], "empty": b"", "flipped": data}[damage])
    with pytest.raises(DataError, match="damaged near example \\d+: ") as refused:
        read(str(folder), "tfds:tiny_text/train")
    assert "\n" not in str(refused.value)


def test_a_dataset_that_loses_a_file_or_changes_is_refused(data_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(data_dir, folder)
    cfg = DataConfig(sources=("tfds:tiny_text/train",), data_dir=str(folder))
    (part,) = sources.partitions(cfg)
    (path,) = folder.rglob("*train.*record*")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="tfds:tiny_text/train: changed while it was read"):
        list(sources.documents(cfg, part, BadRecords("error")))
    path.unlink()
    with pytest.raises(UnreadableFile, match=r"train.*record.*: cannot read it: No such file"):
        sources.partitions(cfg)
