"""What is off is found, leaf by leaf, as a share of what is right."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.training.comparison import leaf_errors, named_leaves, random_documents, share


def test_leaves_are_named_by_their_paths_and_scalars_are_left_out():
    tree = {"layers": [{"wq": np.ones(2, jnp.bfloat16)}], "count": np.int32(3)}
    leaves = named_leaves(tree)
    assert list(leaves) == ["layers/0/wq"] and leaves["layers/0/wq"].dtype == np.float64


def test_an_error_is_a_share_of_the_norm_of_its_own_leaf():
    right = {"a": np.array([3.0, 4.0]), "b": np.array([30.0, 40.0])}
    wrong = {"a": np.array([3.0, 4.5]), "b": np.array([30.0, 40.5])}
    assert leaf_errors(wrong, right) == pytest.approx({"a": 0.1, "b": 0.01})


def test_a_leaf_that_is_nearly_zero_counts_against_a_hundredth_of_all():
    right = {"a": np.array([100.0, 0.0]), "b": np.array([1e-9, 0.0])}
    wrong = {"a": np.array([100.0, 0.0]), "b": np.array([2e-9, 0.0])}
    assert leaf_errors(wrong, right) == pytest.approx({"a": 0.0, "b": 1e-9})  # of 1, not of 1e-9


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_as_wrong_as_can_be(wrong):
    assert leaf_errors({"a": np.array([1.0, wrong])}, {"a": np.ones(2)}) == {"a": np.inf}
    assert share(wrong, 1.0) == np.inf


def test_nothing_off_of_nothing_is_right_and_anything_is_not():
    assert share(0.0, 0.0) == 0.0 and share(1e-30, 0.0) == np.inf


def test_documents_of_a_row_are_numbered_from_1_and_their_positions_count_from_0():
    segments, positions = random_documents(np.random.default_rng(0), (50, 40))
    assert segments.dtype == positions.dtype == np.int32
    starts = np.diff(segments, axis=1, prepend=0)
    assert (segments[:, 0] == 1).all() and set(np.unique(starts)) == {0, 1}
    assert ((positions == 0) == (starts == 1)).all()
    inside = starts[:, 1:] == 0
    assert (np.diff(positions, axis=1)[inside] == 1).all()
    assert 3 < segments[:, -1].mean() < 6  # about four, and the one that opens the row
