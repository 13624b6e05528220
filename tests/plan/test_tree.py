"""The tree of what is alive: every node is the sum of its branches, whatever is alive."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.plan.plan_schema import Alive, PhasePeak, RankPlan
from recipe_lib.plan.tracing.trace import STORAGE_KINDS
from recipe_lib.plan.views.tables import (
    Node,
    build_alive_tree,
    fold_small,
    join_numbered,
    split_number,
)
from recipe_lib.units import format_ranges, share_out

PIECES = st.sampled_from(["model", "layers", "0", "1", "2", "10", "mlp", "weight", "norm"])
NAMES = st.lists(PIECES, max_size=5).map(".".join)
STORAGES = st.lists(
    st.builds(
        Alive,
        st.sampled_from(STORAGE_KINDS[:3]),
        NAMES,
        NAMES,
        st.integers(0, 9) | st.integers(0, 2**40),
        st.integers(1, 3),
    ),
    max_size=30,
)


def rank_of(alive: list[Alive], extra: int = 0) -> RankPlan:
    active = sum(found.bytes for found in alive) + extra
    return RankPlan(0, {}, [PhasePeak("step", active, active, active, active, 0)], alive)


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from walk(child)


@settings(max_examples=60, deadline=None)
@given(STORAGES, st.integers(-5, 5))
def test_every_node_is_the_sum_of_its_branches(alive: list[Alive], extra: int):
    root = build_alive_tree(rank_of(alive, extra))
    assert root.bytes == sum(found.bytes for found in alive) + extra
    assert root.count == sum(found.count for found in alive)
    for node in walk(root):
        if node.children:
            assert node.bytes == sum(child.bytes for child in node.children)
            assert node.count == sum(child.count for child in node.children)
            assert len({child.name for child in node.children}) == len(node.children)
    shown = {kind.name: kind.bytes for kind in root.children}
    for kind in STORAGE_KINDS:
        assert shown.get(kind, 0) == sum(found.bytes for found in alive if found.kind == kind)
    assert shown.get("rounded up to blocks", 0) == extra
    assert [kind for kind in STORAGE_KINDS if kind in shown] == [
        name for name in shown if name in STORAGE_KINDS
    ]


@settings(max_examples=60, deadline=None)
@given(STORAGES, st.integers(1, 12), st.integers(0, 2**30))
def test_folding_loses_nothing(alive: list[Alive], most: int, smallest: int):
    for node in walk(build_alive_tree(rank_of(alive))):
        kept = fold_small(node.children, smallest=smallest, most=most)
        assert sum(child.bytes for child in kept) == sum(child.bytes for child in node.children)
        assert sum(child.count for child in kept) == sum(child.count for child in node.children)
        assert len(kept) <= most + 1 or len(kept) == len(node.children) == most + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_shares_add_up(total: int, parts: list[int]):
    found = share_out(total, parts)
    whole = sum(parts)
    assert sum(found) == (total if whole else 0)
    for part, share in zip(parts, found, strict=True):
        assert abs(share * whole - total * part) < max(whole, 1)


def test_layers_that_hold_the_same_are_joined():
    alive = [Alive("parameters", "", f"model.layers.{layer}.w", 10, 1) for layer in (0, 1, 2, 4)]
    alive.append(Alive("parameters", "", "model.layers.3.w", 11, 1))
    alive.append(Alive("parameters", "", "model.layers.4.w", 10, 1))
    kind = build_alive_tree(rank_of(alive)).children[0]
    assert [(node.name, node.bytes, node.count) for node in kind.children] == [
        ("model.layers.0-2.w", 30, 3),
        ("model.layers.4.w", 20, 2),
        ("model.layers.3.w", 11, 1),
    ]


def test_experts_are_joined_inside_of_layers_that_are():
    alive = [
        Alive("parameters", "", f"a.{layer}.experts.{expert}.up", 5, 1)
        for layer in range(3)
        for expert in range(8)
    ]
    kind = build_alive_tree(rank_of(alive)).children[0]
    assert [(node.name, node.bytes) for node in kind.children] == [("a.0-2.experts.0-7.up", 120)]


def test_a_full_name_says_where_a_storage_belongs():
    """Not the module that ran when it was made: gathers are made ahead."""
    alive = [
        Alive("gathered", "model.layers.1", "model.layers.2", 7, 1),
        Alive("batch", "", "", 5, 1),
    ]
    names = [kind.children[0].name for kind in build_alive_tree(rank_of(alive)).children]
    assert names == ["model.layers.2", "outside of modules"]


def test_numbers():
    assert format_ranges([5, 0, 1, 2, 2]) == "0-2,5"
    assert split_number("model.layers.3.mlp") == ("model.layers.", 3, ".mlp")
    assert split_number("3") == ("", 3, "")
    assert split_number("model.norm1") == ("model.norm1", None, "")
    assert join_numbered(["a.0.w", "a.1.w", "b", "a.3.w", "a.1.v", "b"]) == "a.0-1,3.w, b, a.1.v"


def test_a_module_and_a_parameter_of_one_name_are_one_branch():
    alive = [Alive("gathered", "model.norm", "", 7, 1), Alive("gathered", "", "model.norm", 5, 1)]
    kind = build_alive_tree(rank_of(alive)).children[0]
    assert [(node.name, node.bytes, node.count) for node in kind.children] == [
        ("model.norm", 12, 2)
    ]
