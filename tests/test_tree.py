"""Arithmetic on trees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom import tree
from fedloom.tree import Tree

# other tests of this process may have turned denormal numbers off
numbers = st.floats(-1e6, 1e6, allow_subnormal=False)
factors = st.floats(-100, 100, allow_subnormal=False)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def two_trees(draw: st.DrawFn) -> tuple[Tree, Tree]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    values = [[leaf(*draw(st.lists(numbers, min_size=n, max_size=n))) for n in sizes] for _ in range(2)]
    a, b = ({str(number): value for number, value in enumerate(one)} for one in values)
    return a, b


def assert_equal(a: Tree, b: Tree) -> None:
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_close(a: Tree, b: Tree) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-6)


@given(two_trees())
def test_addition_commutes_and_subtraction_undoes_it(trees: tuple[Tree, Tree]) -> None:
    a, b = trees
    assert_equal(tree.add(a, b), tree.add(b, a))
    assert_close(tree.sub(tree.add(a, b), b), a)
    assert_equal(tree.sub(a, b), tree.add(a, b, scale=-1.0))


@given(two_trees())
def test_zero_is_neutral_and_a_tree_minus_itself_is_zero(trees: tuple[Tree, Tree]) -> None:
    a, _ = trees
    assert_equal(tree.add(a, tree.zeros_like(a)), a)
    assert_equal(tree.sub(a, a), tree.zeros_like(a))


@given(two_trees(), factors)
def test_scaling_distributes_over_addition(trees: tuple[Tree, Tree], factor: float) -> None:
    a, b = trees
    assert_close(tree.scale(tree.add(a, b), factor), tree.add(tree.scale(a, factor), tree.scale(b, factor)))
    assert_close(tree.add(a, b, scale=factor), tree.add(a, tree.scale(b, factor)))


@given(two_trees(), factors)
def test_arithmetic_leaves_its_arguments_alone(trees: tuple[Tree, Tree], factor: float) -> None:
    a, b = trees
    before = tree.clone(a), tree.clone(b)
    tree.add(a, b, scale=factor), tree.sub(a, b), tree.scale(a, factor)
    assert_equal(a, before[0])
    assert_equal(b, before[1])


def test_whole_numbers_such_as_batch_counters_can_be_added() -> None:
    counter = {"batches": torch.tensor([2, 3])}
    assert tree.add(counter, counter)["batches"].tolist() == [4, 6]


def test_a_stacked_tree_minus_a_shared_one_is_stacked() -> None:
    stacked = {"w": leaf(1, 2, 3, 4).reshape(2, 2)}
    assert tree.sub(stacked, {"w": leaf(1, 1)})["w"].tolist() == [[0, 1], [2, 3]]


def test_a_vector_scales_each_client_by_its_own_number() -> None:
    stacked = {"w": leaf(1, 2, 3, 4).reshape(2, 2), "b": leaf(1, 1)}
    scaled = tree.scale(stacked, leaf(10, 100))
    assert scaled["w"].tolist() == [[10, 20], [300, 400]]
    assert scaled["b"].tolist() == [10, 100]
    assert tree.add(stacked, stacked, scale=leaf(1, 0))["w"].tolist() == [[2, 4], [3, 4]]


def test_a_stack_gives_back_what_it_was_made_of() -> None:
    trees = [{"w": leaf(number, 2)} for number in range(3)]
    stacked = tree.stack(trees)
    assert stacked["w"].shape == (3, 2)
    for number, one in enumerate(trees):
        assert_equal(tree.row(stacked, number), one)
    assert tree.rows(stacked, torch.tensor([2, 0]))["w"][:, 0].tolist() == [2, 0]
    assert_equal(tree.concat([tree.stack(trees[:1]), tree.stack(trees[1:])]), stacked)


def test_expanding_shares_one_tree_among_clients_without_a_copy() -> None:
    shared = {"w": leaf(1, 2)}
    expanded = tree.expand(shared, 3)
    assert expanded["w"].tolist() == [[1, 2]] * 3
    assert expanded["w"].data_ptr() == shared["w"].data_ptr()


def test_select_keeps_the_order_of_the_tree() -> None:
    assert list(tree.select({"c": leaf(1), "a": leaf(2), "b": leaf(3)}, ["b", "c"])) == ["c", "b"]


def test_the_norm_runs_over_all_floating_leaves() -> None:
    mixed = {"a": leaf(3), "b": leaf(0, 4), "batches": torch.tensor(100)}
    assert tree.norm(mixed).item() == 5


def test_a_clone_shares_no_memory() -> None:
    original = {"w": leaf(1, 2)}
    tree.clone(original)["w"].zero_()
    assert original["w"].tolist() == [1, 2]


def test_the_size_is_in_bytes() -> None:
    assert tree.size({"a": torch.zeros(3, dtype=torch.float32), "n": torch.tensor(1)}) == 3 * 4 + 8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_makes_a_tree_not_finite(bad: float) -> None:
    assert tree.is_sound({"a": leaf(1, 2), "n": torch.tensor(3)}, ["a"])
    assert not tree.is_sound({"a": leaf(1, 2), "b": leaf(0, bad)}, ["a", "b"])


def test_the_fingerprint_depends_on_names_shapes_types_and_bits_alone() -> None:
    base = {"a": leaf(1, 2), "b": leaf(0)}
    same = {"b": leaf(0), "a": leaf(1, 9, 2, 9).reshape(2, 2).t()[0]}  # another order, and not contiguous
    assert tree.sha256(base) == tree.sha256(same)
    others = [
        {"a": leaf(1, 2), "c": leaf(0)},
        {"a": leaf(1, 2).reshape(1, 2), "b": leaf(0)},
        {"a": leaf(1, 2).float(), "b": leaf(0)},
        {"a": leaf(1, 2), "b": leaf(-0.0)},
        {"a": leaf(1, torch.nextafter(leaf(2), leaf(3)).item()), "b": leaf(0)},
    ]
    assert len({tree.sha256(one) for one in [base, *others]}) == len(others) + 1


def test_leaves_of_any_kind_have_a_fingerprint() -> None:
    kinds = {
        "flag": torch.tensor([True]),
        "count": torch.tensor(3),
        "half": torch.ones(2).half(),
        "none": torch.ones(0),
    }
    changed = {**kinds, "flag": torch.tensor([False])}
    assert tree.sha256(kinds) != tree.sha256(changed)


def test_a_fingerprint_of_groups_depends_on_their_names_and_values() -> None:
    one = {"a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(2)}}
    assert tree.sha256_of_groups(one) == tree.sha256_of_groups({"b": one["b"], "a": one["a"]})
    assert tree.sha256_of_groups(one) != tree.sha256_of_groups({"a": one["b"], "b": one["a"]})
