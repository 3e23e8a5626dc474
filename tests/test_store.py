"""KVStore: what is written is read, in any table of blocks, of any shape; sizes; and what quantising costs."""

import ast
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from radixkv import store as store_module  # noqa: E402
from radixkv.store import KVStore, free_bytes, parse_bytes  # noqa: E402

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kv(num_tokens: int, *, k: Any = (2, 8), v: Any = (2, 8), dtype: Any = torch.float32, seed: int = 0) -> Any:
    """Random K and V, (num_tokens, heads, dim)."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_tokens, *shape, generator=random).to(dtype) for shape in (k, v))


def test_slots_are_block_times_size_plus_offset() -> None:
    store = KVStore(10, 4)
    assert store.slot_mapping([3, 1, 7], 2, 9).tolist() == [14, 15, 4, 5, 6, 7, 28]
    assert store.slot_mapping([3], 4, 4).tolist() == []
    assert store.slot_mapping([3], 0, 1).dtype == torch.int64


@pytest.mark.parametrize("blocks", [[3, 1, 7], (3, 1, 7), array("i", [3, 1, 7]), torch.tensor([3, 1, 7])])
def test_takes_blocks_in_every_form(blocks: Any) -> None:
    store = KVStore(10, 4)
    k, v = kv(9)
    store.write(0, k, v, store.slot_mapping(blocks, 0, 9))
    assert torch.equal(store.read(0, blocks, 9)[0], k)
    store.copy(blocks, [0, 2, 4])
    assert torch.equal(store.read(0, [0, 2, 4], 9)[1], v)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_reads_what_was_written_last(data: Any, dtype: Any) -> None:
    num_blocks, size = 6, 3
    store = KVStore(num_blocks, size)
    written: dict[tuple[int, int], Any] = {}  # (layer, slot) -> K and V
    shapes = {0: ((2, 4), (2, 4)), 1: ((1, 6), (3, 2))}  # layers and their K and V may differ
    tables = st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=4, unique=True)
    for seed in range(data.draw(st.integers(1, 6))):
        layer, table = data.draw(st.sampled_from(sorted(shapes))), data.draw(tables)
        start = data.draw(st.integers(0, len(table) * size))
        end = data.draw(st.integers(start, len(table) * size))
        k, v = kv(end - start, k=shapes[layer][0], v=shapes[layer][1], dtype=dtype, seed=seed)
        slots = store.slot_mapping(table, start, end)
        store.write(layer, k, v, slots)
        written |= {(layer, slot): pair for slot, *pair in zip(slots.tolist(), k, v, strict=True)}
        if data.draw(st.booleans()):
            source, target = data.draw(tables), data.draw(tables)
            num = min(len(source), len(target))
            store.copy(source[:num], target[:num])
            moved = {b: a for a, b in zip(source[:num], target[:num], strict=True)}
            written = {
                (at, slot): written[at, old]
                for at in shapes
                for slot in range(num_blocks * size)
                if (at, old := moved.get(slot // size, slot // size) * size + slot % size) in written
            }
    for (layer, slot), (k, v) in written.items():
        read_k, read_v = store.read(layer, [slot // size], slot % size + 1)
        assert torch.equal(read_k[-1], k)
        assert torch.equal(read_v[-1], v)


def test_reads_into_strided_tensors() -> None:
    store = KVStore(4, 4)
    k, v = kv(7, v=(1, 3))
    store.write(0, k, v, store.slot_mapping([2, 0], 0, 7))
    rows = torch.zeros(2, 9, 8), torch.zeros(1, 9, 3)  # (heads, tokens, dim)
    out = tuple(x[:, 1:8].transpose(0, 1) for x in rows)
    assert store.read(0, [2, 0], 7, out=out) is out
    assert torch.equal(rows[0][:, 1:8], k.transpose(0, 1))
    assert torch.equal(rows[1][:, 1:8], v.transpose(0, 1))
    assert not rows[0][:, [0, 8]].any()


def test_what_is_read_is_a_copy() -> None:
    store = KVStore(2, 4)
    k, v = kv(4)
    store.write(0, k, v, store.slot_mapping([1], 0, 4))
    store.read(0, [1], 4)[0].zero_()
    k.zero_()
    assert store.read(0, [1], 4)[0].any()


def test_can_be_written_first_in_inference_mode() -> None:
    store = KVStore(2, 4)
    k, v = kv(4)
    with torch.inference_mode():
        store.write(0, k, v, store.slot_mapping([0], 0, 4))
    store.write(0, k, v, store.slot_mapping([1], 0, 4))
    assert torch.equal(store.read(0, [1], 4)[0], k)


# Sizes


def test_counts_its_bytes() -> None:
    store = KVStore(10, 4)
    assert store.num_bytes == store.bytes_per_token == store.num_layers == 0
    k, v = kv(1, v=(1, 3))
    store.write(5, k, v, torch.tensor([0]))
    assert store.bytes_per_token == (2 * 8 + 3) * 4
    assert store.num_bytes == 10 * 4 * store.bytes_per_token
    halved = KVStore(10, 4, quantize="int8")
    halved.write(0, k, v, torch.tensor([0]))
    assert halved.bytes_per_token == (2 * 8 + 3) + 3 * 4  # a byte an element, four a token and head


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_fits_as_many_blocks_as_the_bytes_allow(quantize: str | None) -> None:
    layers = [kv(3), kv(1, v=(1, 3), dtype=torch.bfloat16)]
    store = KVStore.fitting("10KiB", 4, layers, quantize=quantize)
    assert store.num_layers == 2
    assert store.num_bytes <= 10 * 1024 < store.num_bytes + 4 * store.bytes_per_token
    with pytest.raises(ValueError, match="layer 1: k must be"):
        store.write(1, *kv(1), torch.tensor([0]))


def test_too_little_for_a_prompt_names_the_numbers() -> None:
    layers = [kv(1)] * 2  # 256 bytes a token
    with pytest.raises(
        ValueError, match="'10KB' is 10,000 bytes, but a prompt of 40 tokens needs 12,288: 3 blocks of 16"
    ):
        KVStore.fitting("10KB", 16, layers, min_tokens=40)
    assert KVStore.fitting(12_288, 16, layers, min_tokens=40).num_blocks == 3


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(5, 5), ("5", 5), ("5 B", 5), ("1KB", 1000), ("1KiB", 1024), ("1.5 gb", 1_500_000_000), ("2MiB", 2 << 20)],
)
def test_parses_sizes(size: Any, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes


def test_a_share_is_of_what_is_free() -> None:
    free = free_bytes("cpu")
    assert free > 0
    assert parse_bytes("50%") == pytest.approx(free / 2, rel=0.2)  # others allocate meanwhile


@pytest.mark.parametrize("size", ["", "GiB", "1XB", "-1", "1e9", "%", "140%", None, True, 1.5, 0, "0.1", "0%"])
def test_refuses_other_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match="a s"):
        parse_bytes(size)


def test_a_device_that_does_not_say_what_is_free_asks_for_bytes() -> None:
    with pytest.raises(ValueError, match="device meta does not say"):
        parse_bytes("40%", "meta")
    assert parse_bytes("1KiB", "meta") == 1024


# Quantised


def magnitudes(draw: Any) -> Any:
    """K of one token and head, over many orders of magnitude."""
    scale = 10.0 ** draw(st.integers(-30, 30))
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=8))
    return torch.tensor(values, dtype=torch.float32) * scale


@given(x=st.composite(magnitudes)())
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_error_is_within_the_documented_bound(quantize: str, x: Any) -> None:
    store = KVStore(1, 1, quantize=quantize)
    k = x[None, None]  # (1, 1, dim)
    store.write(0, k, k, torch.tensor([0]))
    error = (store.read(0, [0], 1)[0] - k).abs().double()
    amax = k.abs().max().double()
    bound = amax / 254 if quantize == "int8" else torch.maximum(k.abs().double() / 16, amax / 458_752)
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_quantised_reads_are_the_same_twice_and_survive_being_written_back(quantize: str, dtype: Any) -> None:
    store = KVStore(4, 4, quantize=quantize)
    k, v = kv(8, dtype=dtype)
    store.write(0, k, v, store.slot_mapping([0, 1], 0, 8))
    first, second = store.read(0, [0, 1], 8), store.read(0, [0, 1], 8)
    assert first[0].dtype == dtype
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    store.copy([0, 1], [2, 3])
    assert torch.equal(store.read(0, [2, 3], 8)[0], first[0])
    if dtype == torch.float32:
        store.write(0, *first, store.slot_mapping([2, 3], 0, 8))
        torch.testing.assert_close(store.read(0, [2, 3], 8)[0], first[0], rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    for quantize in ("int8", "fp8"):
        store = KVStore(1, 2, quantize=quantize)
        store.write(0, torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.tensor([0, 1]))
        assert not store.read(0, [0], 2)[0].any()


# What it refuses, losing nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "num_blocks must be positive, got 0"),
        ((4, -1), "block_size must be positive, got -1"),
        ((4, 4, "int4"), "quantize must be None, 'int8' or 'fp8', got 'int4'"),
    ],
)
def test_refuses_bad_sizes(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStore(*arguments[:2], quantize=(*arguments, None)[2])
    with pytest.raises(TypeError, match="num_blocks must be an int"):
        KVStore(4.0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("k", "slots", "message"),
    [
        (torch.ones(2, 2, 8), [0, 8], r"slots must be in \[0, 8\), got 8"),
        (torch.ones(2, 2, 8), [-9, 0], r"slots must be in \[0, 8\), got -9"),
        (torch.ones(2, 2, 7), [0, 1], r"layer 0: k must be \(2, 2, 8\) torch.float32 on cpu, got \(2, 2, 7\)"),
        (torch.ones(2, 2, 8).half(), [0, 1], "layer 0: k must be .* got .* torch.float16"),
        (torch.ones(2, 2, 8), [0, 1, 2], r"layer 0: k must be \(3, 2, 8\)"),
        (torch.ones(2, 16), [0, 1], r"layer 0: k must be"),
    ],
)
def test_refuses_what_does_not_fit_and_keeps_what_it_has(k: Any, slots: list[int], message: str) -> None:
    store = KVStore(2, 4)
    kept = kv(8)
    store.write(0, *kept, store.slot_mapping([0, 1], 0, 8))
    with pytest.raises(ValueError, match=message):
        store.write(0, k, k, torch.tensor(slots))
    assert torch.equal(store.read(0, [0, 1], 8)[0], kept[0])
    assert torch.equal(store.read(0, [0, 1], 8)[1], kept[1])


def test_the_first_k_and_v_of_a_layer_must_be_three_dimensional_floats() -> None:
    store = KVStore(2, 4)
    for bad in (torch.ones(2, 16), torch.ones(2, 2, 8, dtype=torch.int64), torch.ones(1, 2, 8)):
        with pytest.raises(ValueError, match=r"layer 3: k must be \(2, num_kv_heads, head_dim\) of floats"):
            store.write(3, bad, bad, torch.tensor([0, 1]))
    assert store.num_layers == 0


def test_refuses_to_read_what_is_not_there() -> None:
    store = KVStore(2, 4)
    with pytest.raises(ValueError, match="layer 0 holds nothing; 0 layers do"):
        store.read(0, [0], 1)
    store.write(0, *kv(1), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"blocks must be in \[0, 2\), got 2"):
        store.read(0, [0, 2], 8)
    with pytest.raises(ValueError, match=r"num_tokens must be in \[0, 4\], got 5"):
        store.read(0, [0], 5)
    with pytest.raises(ValueError, match=r"out must be \(1, 2, 8\), got \(2, 2, 8\)"):
        store.read(0, [0], 1, out=kv(2))
    with pytest.raises(ValueError, match=r"positions \[0, 5\) are not within the 4 slots"):
        store.slot_mapping([0], 0, 5)
    with pytest.raises(ValueError, match="as many, got 1 and 2"):
        store.copy([0], [0, 1])
    with pytest.raises(ValueError, match=r"dst_blocks must be in \[0, 2\), got 2"):
        store.copy([0], [2])


def test_needs_torch_and_nothing_of_this_package() -> None:
    tree = ast.parse(Path(store_module.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith("radixkv")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_lives_where_the_first_k_and_v_do(quantize: str | None) -> None:
    k, v = (x.cuda() for x in kv(9))
    store = KVStore.fitting("10%", 4, [(k, v)], quantize=quantize)
    store.write(0, k, v, store.slot_mapping([3, 1, 7], 0, 9))
    read = store.read(0, [3, 1, 7], 9)
    assert read[0].is_cuda
    torch.testing.assert_close(read[0], k, rtol=0.07, atol=0.02)
