"""Every form of tokens is the same prompt."""

from array import array
from collections import UserList
from typing import Any

import numpy as np
import pytest

from radixkv import PrefixCache

IDS = [5, 0, 1, 2**31 - 1, 7, 7, 300, 70_000]
PACKED = np.array(IDS, np.int32).tobytes()

FORMS: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "user sequence": UserList(IDS),
    "numpy ints in a list": [np.int64(i) for i in IDS],
    "bytes": PACKED,
    "bytearray": bytearray(PACKED),
    "memoryview": memoryview(PACKED),
    "memoryview of ints": memoryview(array("i", IDS)),
    **{f"array {code}": array(code, IDS) for code in "iIlLqQ"},
    **{f"numpy {t}": np.array(IDS, t) for t in ("int32", "uint32", "int64", "uint64", ">i4", ">i8")},
    "numpy with strides": np.repeat(np.array(IDS), 2)[::2],
    "read-only numpy": np.frombuffer(PACKED, np.int32),
}


@pytest.mark.parametrize("tokens", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_prompt(tokens: Any) -> None:
    cache = PrefixCache(16, 1)
    request = cache.allocate(tokens)
    cache.commit(request)
    assert cache.match(IDS) == 8
    assert cache.match(tokens) == 8
    cache.append(request, tokens)
    cache.commit(request)
    assert cache.match(IDS + IDS) == 16


def test_a_range_is_its_numbers() -> None:
    cache = PrefixCache(8, 1)
    cache.commit(cache.allocate(range(0, 16, 2)))
    assert cache.match([0, 2, 4, 6, 8, 10, 12, 14]) == 8


@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
def test_torch_tensors(kind: str) -> None:
    torch = pytest.importorskip("torch")
    cache = PrefixCache(8, 1)
    request = cache.allocate(torch.tensor([1, 2, 3], dtype=getattr(torch, kind)))
    cache.append(request, torch.tensor(4))
    cache.append(request, torch.arange(5, 7))
    cache.commit(request)
    assert cache.match([1, 2, 3, 4, 5, 6]) == 6
    for bad in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises((ValueError, TypeError), match=r"shape \(2, 2\)|float32|bool"):
            cache.allocate(bad)


@pytest.mark.parametrize("form", [int, np.int32, np.int64])
def test_one_token_in_any_form_of_int(form: type) -> None:
    cache = PrefixCache(8, 1)
    request = cache.allocate([1])
    cache.append(request, form(2))
    cache.commit(request)
    assert cache.match([1, 2]) == 2


def test_appending_nothing_changes_nothing() -> None:
    cache = PrefixCache(8, 1)
    request = cache.allocate([1])
    cache.append(request, [])
    assert (request.num_tokens, len(request.block_table)) == (1, 1)
