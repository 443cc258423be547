"""The verb `doctor`: gradients of this machine, and meshes beside one device."""

from __future__ import annotations

import json

import pytest

from jaxgpt import cli
from jaxgpt.training import parity

SMALL = [
    "model.num_layers=1", "model.embed_dim=32", "model.num_heads=2", "model.seq_len=16",
    "train.compute_dtype=float32",
]  # fmt: skip


def run(capsys, *words: str) -> tuple[int, dict, str]:
    """Return exit code, JSON object and what was said."""
    code = cli.main(["doctor", *words, *SMALL, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_the_gradients_of_this_machine_are_checked(capsys):
    code, result, _ = run(capsys)
    assert code == 0 and result["platform"] == "cpu"
    assert result["probe"]["compute_dtype"] == "float32"
    assert 0 <= result["probe"]["leaf_error"] <= result["probe"]["tolerance"] == 1e-3


def test_a_row_for_each_mesh_and_the_reason_of_those_refused(capsys, monkeypatch):
    monkeypatch.setattr(parity, "all_sizes", lambda devices: [{"expert": 2}, {"fsdp": 2}])
    code, result, said = run(capsys, "--mesh", "--devices", "2")
    refused, fine = result["meshes"]
    assert code == 0 and fine["passed"] and fine["errors"]["loss"] < 1e-5
    assert refused["errors"] is None and "no experts" in refused["refused"]
    assert "fsdp=2: agrees" in said and "expert=2: mesh.expert = 2" in said


def test_a_mesh_that_differs_is_named_and_ends_with_79(capsys, monkeypatch):
    errors = {"loss": 0.5, "grad_norm": 0.0, "moments": 0.0, "weights": 0.0}
    row = parity.Row({"data": 2}, errors, "layers/wq", "", 1.0)
    monkeypatch.setattr(parity, "compare", lambda cfg, layouts: iter([row]))
    code, result, said = run(capsys, "--mesh", "--devices", "2")
    assert code == 79 and not result["meshes"][0]["passed"]
    assert "data=2: DIFFERS in layers/wq" in said


def test_only_so_many_devices_as_can_be_simulated_are_asked_for(capsys):
    with pytest.raises(json.JSONDecodeError):
        run(capsys, "--mesh", "--devices", "3")
