"""safetensors files: read by mapping, hostile headers refused in one line, written in shards."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxgpt.errors import DataError
from jaxgpt.interop import weights
from jaxgpt.interop.weights import open_weights, read_json, write_weights

INDEX = "model.safetensors.index.json"
VALUES = {
    "a": np.float32([[1, 2, 3], [4, 5, 6]]),
    "b": np.float16([0.5, -2.0]),
    "c": np.array([1.5, -3.0, 2.0**100], ml_dtypes.bfloat16),
}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file of any header, true or not, and return its folder."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + data)
    return path.parent


def entry(first: int, last: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def refusal(directory: Path) -> str:
    with pytest.raises(DataError) as error:
        open_weights(directory)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1500
    return message


# Reading.


def test_arrays_are_read_as_the_library_wrote_them(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = open_weights(tmp_path)
    assert set(found.tensors) == set(VALUES)
    for name, value in VALUES.items():
        read = found.read(name)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)


def test_arrays_are_mapped_and_cannot_be_written(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    read = open_weights(tmp_path).read("a")
    assert not read.flags.writeable and not read.flags.owndata
    base = read
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)


def test_scalars_and_empty_arrays_are_read(tmp_path):
    save_file({"one": np.array(3.0, np.float32), "none": np.zeros((0, 4), np.float32)},
              tmp_path / "model.safetensors")  # fmt: skip
    found = open_weights(tmp_path)
    assert found.read("one") == np.float32(3.0) and found.read("one").shape == ()
    assert found.read("none").shape == (0, 4)


def test_data_at_odd_offsets_is_read(tmp_path):
    header = json.dumps({"a": entry(0, 8, [2])}).encode()
    header += b" " * (1 + -len(header) % 2)  # an odd number of bytes
    raw_file(tmp_path / "model.safetensors", header, np.float32([1, 2]).tobytes())
    np.testing.assert_array_equal(open_weights(tmp_path).read("a"), [1, 2])


def test_many_files_are_read_with_an_index_and_without(tmp_path):
    save_file({"a": VALUES["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": VALUES["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    assert set(open_weights(tmp_path).tensors) == {"a", "b"}
    (tmp_path / "other.safetensors").write_bytes(b"not of this model")
    table = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    np.testing.assert_array_equal(open_weights(tmp_path).read("b"), VALUES["b"])


def test_other_dtypes_are_refused_by_name_when_they_are_read(tmp_path):
    save_file({"ids": np.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="ids is of I64; weights must be F32, F16, BF16"):
        open_weights(tmp_path).read("ids")


# What is refused.

HOSTILE = {
    "empty file": (b"", "is cut off"),
    "no header": (b"\x00" * 7, "is cut off"),
    "header longer than the file": ((1 << 20).to_bytes(8, "little") + b"{}", "is cut off"),
    "header of 16 EiB": (b"\xff" * 8 + b"{}", "is cut off"),
}
HEADERS: dict[str, tuple[Any, int, str]] = {  # header, bytes of data, what is said
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "b overlaps the one before"),
    "same place": ({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, 8, "overlaps the one before"),
    "hole": ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "b comes after a hole"),
    "hole at the start": ({"a": entry(4, 12, [2])}, 12, "a comes after a hole"),
    "beyond the end": (
        {"a": entry(0, 80, [20])},
        40,
        "holds 40 bytes of data, its header names 80",
    ),
    "data left over": ({"a": entry(0, 8, [2])}, 9, "holds 9 bytes of data, its header names 8"),
    "truncated data": ({"a": entry(0, 8, [2])}, 7, "holds 7 bytes of data"),
    "no tensors but data": ({}, 4, "holds 4 bytes of data, its header names 0"),
    "wrong size": ({"a": entry(0, 8, [3])}, 8, r"a takes 8 bytes, but F32\[3\] 12"),
    "wrong size by dtype": ({"a": entry(0, 8, [2], "F16")}, 8, r"a takes 8 bytes, but F16\[2\] 4"),
    "product that overflows": ({"a": entry(0, 0, [2**32, 2**32])}, 0, "a takes 0 bytes"),
    "huge shape": ({"a": entry(0, 8, [2**61])}, 8, "a takes 8 bytes"),
    "too many axes": ({"a": entry(0, 4, [1] * 40)}, 4, "shape is not a list of sizes"),
    "negative size": ({"a": entry(0, 8, [-2])}, 8, "shape is not a list of sizes"),
    "size that is true": ({"a": entry(0, 4, [True])}, 4, "shape is not a list of sizes"),
    "fractional size": ({"a": entry(0, 8, [2.0])}, 8, "shape is not a list of sizes"),
    "offsets backwards": ({"a": entry(8, 0, [2])}, 8, "is no range"),
    "negative offset": ({"a": entry(-8, 0, [2])}, 8, "data_offsets is not a list of sizes"),
    "one offset": ({"a": {"dtype": "F32", "shape": [], "data_offsets": [0]}}, 4, "is no range"),
    "unknown dtype": (
        {"a": entry(0, 8, [2], "F4")},
        8,
        "dtype 'F4'; weights must be F32, F16, BF16",
    ),
    "dtype of a list": ({"a": {"dtype": [], "shape": [], "data_offsets": [0, 4]}}, 4, "dtype"),
    "missing field": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "is not described by"),
    "entry of a list": ({"a": []}, 0, "is not described by"),
    "header of a list": ([], 0, "holds a list, not a JSON object"),
    "header of a number": (b"1", 0, "holds a int, not a JSON object"),
    "no JSON": (b"{x", 0, "is not proper JSON"),
    "no UTF-8": (b'{"\xff": 1}', 0, "is not proper JSON"),
    "NaN": (b'{"a": NaN}', 0, "NaN is not a number of JSON"),
    "same name twice": (b'{"a": 1, "a": 2}', 0, "'a' appears twice"),
    "deep": (b'{"a":' * 100_000, 0, "is not proper JSON"),
    "number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", 0, "is not proper JSON"),
    "name of two lines": ({"a\nb": entry(0, 4, [1])}, 4, r"called 'a\\nb'"),
    "name of a megabyte": ({"a" * (1 << 20): entry(0, 4, [1])}, 4, "1048576 characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_is_refused(tmp_path, case):
    content, says = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert says in message and "model.safetensors" in message


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused(tmp_path, case):
    header, size, says = HEADERS[case]
    message = refusal(raw_file(tmp_path / "model.safetensors", header, b"\0" * size))
    assert re.search(says, message)


def test_a_header_above_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "parse_json", pytest.fail)
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(8 + (1 << 40))  # sparse: it takes no room
    assert "a header of 1099511627776 bytes; at most 16777216 are read" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    save_file({"a": VALUES["a"]}, tmp_path / "one.safetensors")
    save_file({"a": VALUES["a"]}, tmp_path / "two.safetensors")
    assert "a is in one.safetensors and two.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "..", "", 7, None],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"'a' is in {str(name)!r}: must be the name of a file beside it" in refusal(tmp_path)


def test_an_index_that_does_not_agree_with_its_files_is_refused(tmp_path):
    save_file({"a": VALUES["a"], "b": VALUES["b"]}, tmp_path / "x.safetensors")
    for table, says in (
        ({"a": "x.safetensors"}, "b is in x.safetensors, by the index in None"),
        (
            {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"},
            "'c' is not in x.safe",
        ),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "x.safetensors, by the index in y.safe"),
        ({"a": "z.safetensors"}, "z.safetensors: cannot be read: No such file"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": table}))
        assert says in refusal(tmp_path)


def test_pickled_weights_are_refused_with_advice_and_never_loaded(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path(tmp_path / "ran").write_text, ("yes",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message and "save_pretrained" in message
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_and_a_path_without_a_folder_are_refused(tmp_path):
    assert "holds no *.safetensors" in refusal(tmp_path)
    assert "is not a folder" in refusal(tmp_path / "nowhere")


def test_a_huge_or_deep_or_repeated_config_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for content, says in (
        (b" " * 2000, "is larger than 1000 bytes"),
        (b"[" * 999, "is not proper JSON"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (b"[]", "holds a list"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=says):
            read_json(path, 1000)
    with pytest.raises(DataError, match="cannot be read"):
        read_json(tmp_path / "none.json", 1000)


# Writing.


def test_what_is_written_the_library_reads(tmp_path):
    write_weights(tmp_path, VALUES.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_slice(name).get_dtype() for name in file.keys()} == {
            "a": "F32", "b": "F16", "c": "BF16"
        }  # fmt: skip
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"], VALUES["a"])
    found = open_weights(tmp_path)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found.read(name), value)


def test_a_transposed_view_is_written_in_its_own_order(tmp_path):
    write_weights(tmp_path, [("t", VALUES["a"].T)])
    np.testing.assert_array_equal(open_weights(tmp_path).read("t"), [[1, 4], [2, 5], [3, 6]])


def test_shards_hold_about_what_was_asked_for_and_an_index_names_them(tmp_path):
    values = {f"w{n}": np.full((10,), n, np.float32) for n in range(5)}
    write_weights(tmp_path, values.items(), shard_bytes=90)
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == dict(
        zip(values, [names[0], names[0], names[1], names[1], names[2]], strict=True)
    )
    found = open_weights(tmp_path)
    for name, value in values.items():
        np.testing.assert_array_equal(found.read(name), value)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    values = {"big": np.zeros(100, np.float32), "small": np.zeros(1, np.float32)}
    write_weights(tmp_path, values.items(), shard_bytes=8)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_arrays_are_asked_for_one_at_a_time_and_no_file_has_its_name_before_the_last(tmp_path):
    seen = []

    def arrays() -> Any:
        for n in range(4):
            seen.append(list(tmp_path.glob("*.safetensors")))
            yield f"w{n}", np.zeros(10, np.float32)

    write_weights(tmp_path, arrays(), shard_bytes=40)
    assert seen == [[], [], [], []]
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_name_that_comes_twice_or_another_dtype_is_a_bug_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="a: float32, or written twice"):
        write_weights(tmp_path, [("a", VALUES["a"]), ("a", VALUES["a"])])
    with pytest.raises(ValueError, match="a: float64"):
        write_weights(tmp_path, [("a", np.zeros(3))])
