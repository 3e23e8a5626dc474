"""What the tree offers beside `PrefixCache`, to a scheduler that owns the blocks itself."""

from array import array

import pytest

from radixkv.policy import LRU, make_policy
from radixkv.tokens import pack
from radixkv.tree import RadixTree


def cached(tree: RadixTree, tokens: list[int], first: int) -> int:
    """Publish a prompt in blocks from `first` on, as a request that ends; returns where it ends."""
    key = pack(tokens)
    root = tree.root(None)
    path, num, part = tree.find(root, key, 0, len(key))
    node = tree.hold(root, None, path, part)[1]
    if num < len(tokens):
        rest = array("i", range(first, first + len(tokens) - num))
        node = tree.insert(node, bytearray(key[num * tree.width :]), rest)
    tree.release(node, 0)
    return node


def look(tree: RadixTree, tokens: list[int]) -> int:
    key = pack(tokens)
    path, _, part = tree.find(tree.root(None), key, 0, len(key))
    node = tree.hold(tree.root(None), None, path, part)[1]
    tree.let_go(node)
    return node


def evict(tree: RadixTree, num: int, stump: int = 0) -> list[int]:
    freed = array("i")
    tree.evict(num, freed, stump)
    tree.check({})
    return freed.tolist()


def test_looking_makes_recent_exactly_what_it_found() -> None:
    tree = RadixTree(1, LRU())
    cached(tree, [1, 2, 3, 4], 0)
    cached(tree, [5, 6], 10)
    look(tree, [1, 2])
    assert [evict(tree, 2) for _ in range(3)] == [[3, 2], [11, 10], [1, 0]]


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_looking_is_no_use(policy: str) -> None:
    tree = RadixTree(1, make_policy(policy))
    cached(tree, [1, 2], 0)
    for _ in range(2):
        cached(tree, [5, 6], 10)
    for _ in range(3):
        look(tree, [1, 2])
    assert [evict(tree, 2) for _ in range(2)] == [[1, 0], [11, 10]]


def test_looking_is_recent_among_what_was_used_as_often() -> None:
    tree = RadixTree(1, make_policy("lfu"))
    cached(tree, [1, 2], 0)
    cached(tree, [5, 6], 10)
    look(tree, [1, 2])
    assert [evict(tree, 2) for _ in range(2)] == [[11, 10], [1, 0]]


def test_a_prefix_is_known_by_its_serial_until_it_ends_elsewhere() -> None:
    tree = RadixTree(1, LRU())
    node = cached(tree, [1, 2, 3, 4], 0)
    serial = tree.serial(node)
    look(tree, [1, 2])  # the split leaves it its number
    assert tree.ends(node, serial)
    assert evict(tree, 1) == [3]
    assert not tree.ends(node, serial)  # it is shorter
    serial = tree.serial(node)
    assert cached(tree, [1, 2, 3, 9], 7) == node
    assert not tree.ends(node, serial)  # it is longer
    serial = tree.serial(node)
    evict(tree, 9)
    assert not tree.ends(node, serial)  # it is gone
    assert cached(tree, [8], 1) != node or not tree.ends(node, serial)  # and its number another's


def test_a_stump_goes_where_as_much_was_cut_off_before_it() -> None:
    tree = RadixTree(1, LRU())
    for first, num_cut, stump, gone in ((0, 3, 2, 5), (10, 3, 1, 3), (20, 1, 4, 1), (30, 3, 0, 3)):
        cached(tree, [1, 2, 3, 4, 5], first)
        assert len(evict(tree, num_cut, stump)) == gone
        evict(tree, 5)
