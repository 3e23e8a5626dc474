"""RadixCache: tokens and logits are those without a cache, whatever is hit, in each door; and what is not served."""

import contextlib
import copy
import logging
import os
import queue
import threading
from collections.abc import Iterator
from functools import cache as remember
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import PAD, VOCAB, make, padded, prompt  # noqa: E402

from radixkv.integrations.hf import RadixCache, Session, _start_column  # noqa: E402
from radixkv.integrations.hf_cache import CACHE_ARGUMENT, Layer  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

SIZE = 16
GREEDY = {"do_sample": False, "max_new_tokens": 8}
SERVED = [
    *("llama", "qwen3", "mistral", "gemma3", "gpt_oss", "llama4", "phi3", "gpt2", "deepseek_v3"),
    *("phi3_longrope", "llama_dynamic", "bloom", "opt", "gpt_neox", "cohere2", "gemma3n"),
]
REFUSED = ["qwen3_next", "lfm2", "jamba", "mamba2", "bert", "moshi"]


_made = remember(make)


def model(family: str = "llama") -> Any:
    return _made(family)


def fresh(family: str = "llama", **options: Any) -> RadixCache:
    return RadixCache(model(family), **{"num_blocks": 128, "block_size": SIZE} | options)


def plain(ids: Any, mask: Any = None, *, of: Any = None, **options: Any) -> Any:
    """What the model generates without a cache of ours."""
    mask = torch.ones_like(ids) if mask is None else mask
    return (of or model()).generate(ids, attention_mask=mask, **GREEDY | options)


def served(
    cache: RadixCache, ids: Any, mask: Any = None, *, namespace: Any = None, **options: Any
) -> tuple[Any, Session]:
    mask = torch.ones_like(ids) if mask is None else mask
    with cache.session(ids, mask, namespace=namespace) as session:
        out = cache.model.generate(ids, attention_mask=mask, **GREEDY | options, **session.kwargs)
    cache.check()
    return out, session


def assert_same(cache: RadixCache, ids: Any, mask: Any = None, *, namespace: Any = None, **options: Any) -> Session:
    """Serve it twice, with and without the cache: equal tokens, logits within 1e-4."""
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = plain(ids, mask, of=cache.model, **options)
    out, session = served(cache, ids, mask, namespace=namespace, **options)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)
    return session


def test_runs_on_the_version_that_was_asked_for() -> None:
    assert transformers.__version__ == os.environ.get("RADIXKV_TRANSFORMERS", transformers.__version__)


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    yield
    assert "generate" not in vars(model()), "a test left a cache attached"


# Exactness


@pytest.mark.parametrize("family", SERVED)
def test_hits_at_every_block_boundary_are_exact(family: str) -> None:
    cache = fresh(family)
    ids = prompt(3 * SIZE + 5, 1)[None]
    for num_hit in (0, SIZE, 2 * SIZE, 3 * SIZE):
        if num_hit:
            served(cache, ids[:, : num_hit + 1], namespace=num_hit, max_new_tokens=1)
        session = assert_same(cache, ids, namespace=num_hit)
        assert session.num_cached_tokens == num_hit
        assert session.num_prefill_tokens == ids.shape[1] - num_hit
        assert session.bypass is None


@pytest.mark.parametrize("family", SERVED)
def test_a_batch_with_hits_of_0_3_and_40_blocks(family: str) -> None:
    long = 40 * SIZE if family not in ("phi3_longrope", "llama_dynamic") else 2 * SIZE
    rows = [prompt(9, 1), prompt(3 * SIZE + 4, 2), prompt(long + 7, 3)]
    cache = fresh(family)
    for row in rows[1:]:
        served(cache, row[None, : len(row) // SIZE * SIZE + 1], max_new_tokens=1)
    session = assert_same(cache, *padded(rows))
    if family == "bloom":
        assert session.bypass == "padding for a model without position_ids"
    else:
        assert session.bypass is None
        assert session.num_cached_tokens_by_row[0] == 0
        assert long - SIZE < session.num_cached_tokens_by_row[2] <= long
        assert 0 < session.num_cached_tokens_by_row[1] <= 3 * SIZE
        again = assert_same(cache, *padded(rows))
        assert again.num_cached_tokens >= session.num_cached_tokens


@pytest.mark.parametrize("num_tokens", [1, 2, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE - 1])
def test_a_prompt_identical_to_a_committed_one_leaves_a_token_to_prefill(num_tokens: int) -> None:
    cache = fresh()
    ids = prompt(num_tokens, 4)[None]
    assert_same(cache, ids)
    session = assert_same(cache, ids)
    assert session.num_cached_tokens == (num_tokens - 1) // SIZE * SIZE


def test_generated_tokens_are_committed_but_for_the_last() -> None:
    cache = fresh()
    ids = prompt(SIZE - 4, 5)[None]
    out, _ = served(cache, ids, max_new_tokens=SIZE + 4)  # 2 * SIZE tokens, of which the last has no KV
    assert cache.explain(out).num_cached_tokens == SIZE
    longer = torch.cat([out, prompt(3, 6)[None]], 1)
    assert assert_same(cache, longer).num_cached_tokens == SIZE
    assert cache.explain(longer).num_cached_tokens == 2 * SIZE


def test_a_hit_may_end_inside_the_prompts_last_block() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE, 7)[None]
    served(cache, ids)
    assert assert_same(cache, ids[:, : 2 * SIZE - 3]).num_cached_tokens == SIZE
    assert assert_same(cache, torch.cat([ids, prompt(2, 8)[None]], 1)).num_cached_tokens == 2 * SIZE


def test_ten_turns_prefill_what_is_new_and_at_most_a_block() -> None:
    cache = fresh()
    ids = prompt(20, 9)[None]
    known = 0
    for turn in range(10):
        session = assert_same(cache, ids, max_new_tokens=7)
        new = ids.shape[1] - known
        assert session.num_prefill_tokens <= new + SIZE
        out = plain(ids, max_new_tokens=7)
        known = out.shape[1]
        ids = torch.cat([out, prompt(5 + turn, 10 + turn)[None]], 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_bf16_equals_chunked_prefill_without_a_cache(family: str) -> None:
    half = make(family).to(torch.bfloat16)
    cache = RadixCache(half, num_blocks=32, block_size=SIZE)
    ids = prompt(3 * SIZE + 5, 11)[None]
    served(cache, ids[:, : 2 * SIZE], max_new_tokens=1)
    logits = {"return_dict_in_generate": True, "output_logits": True}
    own = transformers.DynamicCache()
    with torch.no_grad():
        half(ids[:, : 2 * SIZE], use_cache=True, **{CACHE_ARGUMENT: own})
    expected = plain(ids, of=half, **logits, **{CACHE_ARGUMENT: own})
    out, session = served(cache, ids, **logits)
    assert session.num_cached_tokens == 2 * SIZE
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), rtol=0, atol=0.01)


def test_two_interleaved_sessions_leave_the_cached_blocks_as_they_are() -> None:
    cache = fresh()
    prefix = prompt(3 * SIZE, 12)
    served(cache, torch.cat([prefix, prompt(1, 13)])[None])

    def what_a_hit_serves() -> list[Any]:
        with cache.session(torch.cat([prefix, prompt(1, 14)])[None]) as session:
            assert session.num_cached_tokens == 3 * SIZE
            return [x.clone() for layer in session.kwargs[CACHE_ARGUMENT].layers for x in (layer.keys, layer.values)]

    before = what_a_hit_serves()
    first, second = (torch.cat([prefix, prompt(9, seed)])[None] for seed in (15, 16))
    with cache.session(first) as a, cache.session(second) as b:
        assert a.num_cached_tokens == b.num_cached_tokens == 3 * SIZE
        out_b = model().generate(second, attention_mask=torch.ones_like(second), **GREEDY, **b.kwargs)
        out_a = model().generate(first, attention_mask=torch.ones_like(first), **GREEDY, **a.kwargs)
    assert torch.equal(out_a, plain(first))
    assert torch.equal(out_b, plain(second))
    assert all(torch.equal(x, y) for x, y in zip(before, what_a_hit_serves(), strict=True))


def test_a_pool_that_always_evicts_is_exact() -> None:
    cache = fresh(num_blocks=3)
    for seed in (1, 2, 1, 1, 3, 2):
        assert_same(cache, prompt(3 * SIZE + 2, seed)[None])  # its reply does not fit
    assert cache.num_cached_blocks == 3
    assert cache.stats.evicted_blocks > 0
    assert assert_same(cache, prompt(3 * SIZE + 2, 2)[None]).num_cached_tokens == 3 * SIZE


# Batches


def test_a_shared_prefix_is_prefilled_once_for_a_batch() -> None:
    cache = fresh()
    prefix = prompt(6 * SIZE + 3, 17)
    rows = [torch.cat([prefix, prompt(5, seed)]) for seed in range(20, 26)]
    session = assert_same(cache, *padded(rows))
    assert sorted(session.num_cached_tokens_by_row) == [0] + 5 * [6 * SIZE + 3]
    assert cache.stats.cached_tokens == 5 * (6 * SIZE + 3)


def test_a_batch_of_equal_rows_is_exact() -> None:
    cache = fresh()
    rows = 3 * [prompt(2 * SIZE, 18)]
    assert_same(cache, *padded(rows))
    assert_same(cache, *padded([*rows, prompt(3, 19)]))


def test_a_batch_in_which_a_row_begins_another() -> None:
    long = prompt(60, 72)
    assert _start_column(60, [30, 0], [0, 0], {1: (0, 30)}, 16) == 30  # where the first has no token yet
    assert_same(fresh(), *padded([long[:30], long]))
    assert_same(fresh(), *padded([long[:30], long, long[:50]]))


def test_a_hit_that_does_not_pay_is_left() -> None:
    cache = fresh()
    rows = [prompt(SIZE + 1, seed) for seed in (63, 64, 65)]
    served(cache, rows[1][None])
    session = assert_same(cache, *padded(rows))  # two passes over a block, to spare one row that block
    assert session.num_cached_tokens_by_row == [0, 0, 0]


def test_padding_fed_to_rows_that_ended_is_not_committed() -> None:
    of = make("llama")
    cache = RadixCache(of, num_blocks=64, block_size=4)
    ids, mask = padded([prompt(9, 27), prompt(12, 28)])
    first = plain(ids, mask, of=of, max_new_tokens=30)
    of.generation_config.eos_token_id = end = int(first[0, 14])  # the first row ends early
    out, _ = served(cache, ids, mask, max_new_tokens=30)
    assert torch.equal(out, plain(ids, mask, of=of, max_new_tokens=30))
    row = out[0][3:].tolist()
    num_row = row.index(end, 9) + 1
    assert row[num_row:] == [PAD] * (len(row) - num_row)
    assert cache.explain(row).num_cached_tokens <= (num_row + 1) // 4 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
)
def test_beams_returned_sequences_and_sampling_controls_work(options: dict[str, Any]) -> None:
    cache = fresh()
    ids, mask = padded([prompt(2 * SIZE + 3, 29), prompt(SIZE + 1, 30)])
    for _ in range(2):  # a miss, then a hit
        torch.manual_seed(0)
        expected = plain(ids, mask, max_new_tokens=SIZE, **options)
        torch.manual_seed(0)
        out, session = served(cache, ids, mask, max_new_tokens=SIZE, **options)
        assert session.bypass is None
        assert torch.equal(out, expected)
    assert session.num_cached_tokens > 0
    pads = (1 - mask).sum(1).repeat_interleave(len(expected) // 2).tolist()
    for row, pad in zip(expected, pads, strict=True):  # what was committed of each is of its own tokens
        kept = row[pad:]
        if "num_beams" not in options:
            assert cache.explain(kept).num_cached_tokens == (len(kept) - 1) // SIZE * SIZE
        assert_same(cache, torch.cat([kept, prompt(2, 31)])[None])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_session_knows_of_which_tokens_its_k_and_v_are(options: dict[str, Any]) -> None:
    cache = fresh()
    ids, mask = padded([prompt(2 * SIZE + 3, 29), prompt(SIZE + 1, 30)])
    for _ in range(2):
        with cache.session(ids, mask) as session:
            model().generate(ids, attention_mask=mask, **GREEDY | {"max_new_tokens": 12} | options, **session.kwargs)
            kv = session.kwargs[CACHE_ARGUMENT]
        assert kv.num_fed == ids.shape[1] + 11
        for row, pad in enumerate(kv.pads.tolist()):
            own = transformers.DynamicCache()
            with torch.no_grad():
                model()(kv.ids[row : row + 1, pad : kv.num_fed], use_cache=True, **{CACHE_ARGUMENT: own})
            for layer, expected in zip(kv.layers, own.layers, strict=True):
                torch.testing.assert_close(layer.keys[row, :, pad:], expected.keys[0], rtol=0, atol=1e-4)
                torch.testing.assert_close(layer.values[row, :, pad:], expected.values[0], rtol=0, atol=1e-4)


def test_start_column_computes_the_fewest_tokens() -> None:
    def start(num_columns: int, pads: list[int], hits: list[int], shared: Any = None, cost: int = 10) -> int:
        return _start_column(num_columns, pads, hits, shared or {}, cost)

    assert start(100, [0], [0]) == 0
    assert start(100, [0], [96]) == 96
    assert start(1, [0], [0]) == 0
    assert start(100, [0, 0], [96, 96]) == 96
    assert start(100, [0, 60], [96, 0]) == 96  # one pass over 36 tokens is less than 2 x 100
    assert start(100, [0, 0], [96, 0]) == 96  # 96 + 10 and 2 x 4, against 2 x 100
    assert start(100, [0, 0], [8, 0]) == 0  # a pass costs more than it spares
    assert start(32, [0, 16], [0, 0], cost=16) == 0  # nor where it comes to the same
    assert start(100, [0, 0, 0], [0, 0, 0], {1: (0, 90), 2: (1, 90)}) == 90
    assert start(100, [0, 0], [0, 0], {1: (0, 100)}) == 99  # one is left to prefill


# Doors


def test_attach_serves_every_generate_and_detach_ends_it() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 1, 32)[None]
    expected = plain(ids)
    cache.attach()
    with pytest.raises(RuntimeError, match="attached to this model already"):
        fresh().attach()
    with pytest.raises(RuntimeError, match="attached to this model already"):
        cache.attach()
    for _ in range(2):
        assert torch.equal(model().generate(ids, attention_mask=torch.ones_like(ids), **GREEDY), expected)
    assert torch.equal(model().generate(input_ids=ids, **GREEDY), expected)
    assert torch.equal(model().generate(ids, transformers.GenerationConfig(**GREEDY, pad_token_id=PAD)), expected)
    assert cache.stats.sessions == 4
    assert cache.stats.cached_tokens == 3 * 2 * SIZE
    with cache.session(ids) as session:  # a door within a door is one session
        assert torch.equal(model().generate(ids, **GREEDY, **session.kwargs), expected)
    assert torch.equal(cache.generate(ids, **GREEDY), expected)
    assert cache.stats.sessions == 6
    assert not cache.stats.bypasses
    cache.detach()
    cache.detach()
    assert torch.equal(model().generate(ids, **GREEDY), expected)
    assert cache.stats.sessions == 6


def test_what_wraps_an_attached_generate_outlives_detach() -> None:
    cache = fresh()
    cache.attach(namespace="a")
    attached = model().generate
    model().generate = lambda *args, **kwargs: attached(*args, **kwargs)
    ids = prompt(SIZE + 1, 33)[None]
    try:
        model().generate(ids, **GREEDY)
        cache.detach()
        assert torch.equal(model().generate(ids, **GREEDY), plain(ids))
        assert cache.stats.sessions == 1
    finally:
        del model().generate


def test_errors_of_generate_stay_its_own() -> None:
    cache = fresh()
    cache.attach()
    try:
        ids = prompt(5, 34)[None]
        with pytest.raises(TypeError, match="multiple values"):
            model().generate(ids, inputs=ids)
        with pytest.raises(ValueError, match="nonsense"):
            model().generate(ids, nonsense=1)
        with pytest.raises(ValueError, match="max_new_tokens"):
            model().generate(ids, max_new_tokens=-1)
        cache.check()
    finally:
        cache.detach()


LETTERS = [chr(33 + i) if i < 94 else chr(256 + i) for i in range(VOCAB)]


def tokenizer() -> Any:
    """A letter a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[1]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token=LETTERS[PAD], padding_side="left")


def test_a_pipeline_over_an_attached_model_is_served() -> None:
    pipe = transformers.pipeline("text-generation", model=model(), tokenizer=tokenizer(), device="cpu")
    text = "".join(LETTERS[i] for i in prompt(2 * SIZE + 1, 35).tolist())
    texts = [text, text + "xy", "z"]
    expected = [pipe(one, **GREEDY) for one in texts], pipe(texts, batch_size=3, **GREEDY)
    cache = fresh()
    cache.attach()
    try:
        for _ in range(2):
            assert ([pipe(one, **GREEDY) for one in texts], pipe(texts, batch_size=3, **GREEDY)) == expected
    finally:
        cache.detach()
    assert cache.stats.sessions == 8
    assert cache.stats.cached_tokens > 10 * SIZE
    assert not cache.stats.bypasses


def test_the_third_door_takes_what_tokenizers_return() -> None:
    cache = fresh()
    letters = tokenizer()
    inputs = letters(["abc" * 12, "x"], padding=True, return_tensors="pt", return_token_type_ids=False)
    expected = plain(inputs["input_ids"], inputs["attention_mask"])
    assert torch.equal(cache.generate(inputs, **GREEDY), expected)
    assert torch.equal(cache.generate(dict(inputs), **GREEDY), expected)
    first = inputs["input_ids"][:1]
    stop = {"stop_strings": [LETTERS[expected[0, 40]]], "tokenizer": letters}
    stopped = cache.generate(first, **GREEDY, **stop)
    assert torch.equal(stopped, plain(first, **stop))
    assert stopped.shape[1] < expected.shape[1]
    assert cache.stats.cached_tokens == 4 * SIZE


def test_a_loop_of_ones_own_is_served_too() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 2, 36)[None]
    expected = plain(ids)
    for turn in range(2):
        with cache.session(ids) as session, torch.inference_mode():
            fed, tokens = ids[:, session.num_cached_tokens :], ids
            while tokens.shape[1] < expected.shape[1]:
                out = model()(fed, use_cache=True, **session.kwargs)
                fed = out.logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, fed], 1)
        assert torch.equal(tokens, expected)
        assert session.num_cached_tokens == (2 * SIZE if turn else 0)
    longer = torch.cat([expected, prompt(9, 37)[None]], 1)
    assert assert_same(cache, longer).num_cached_tokens == 2 * SIZE


def test_a_session_may_begin_in_inference_mode_and_go_on_outside() -> None:
    cache = fresh()
    ids, mask = padded([prompt(3 * SIZE + 4, 68), prompt(2 * SIZE, 69)])
    served(cache, ids[:1])
    for _ in range(2):
        with torch.inference_mode():
            session = cache.session(ids, mask)
            session.__enter__()
        out = model().generate(ids, attention_mask=mask, **GREEDY, **session.kwargs)
        session.__exit__(None, None, None)
        assert torch.equal(out, plain(ids, mask))
    assert session.num_cached_tokens > 3 * SIZE


# What goes wrong


class Stop(transformers.generation.streamers.BaseStreamer):
    """Raises once a few tokens came."""

    def __init__(self, error: BaseException | None = None, after: int = 3) -> None:
        self.tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error, self._after = error, after

    def put(self, value: Any) -> None:
        self.tokens.put(value)
        self._after -= 1
        if not self._after and self._error is not None:
            raise self._error

    def end(self) -> None:
        self.tokens.put(None)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_commits_nothing_and_loses_no_block(error: BaseException) -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 1, 38)[None]
    served(cache, ids[:, : SIZE + 1], max_new_tokens=1)
    before = cache.stats, repr(cache)
    with pytest.raises(type(error)):
        served(cache, ids, streamer=Stop(error))
    cache.check()
    assert repr(cache) == before[1]
    assert cache.stats.committed_tokens == before[0].committed_tokens
    assert assert_same(cache, ids).num_cached_tokens == SIZE


def test_other_tokens_than_the_sessions_are_an_error_and_not_a_wrong_reply() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 5, 39)[None]
    served(cache, ids)
    other = ids.clone()
    other[0, -2] += 1
    with pytest.raises(ValueError, match="not those of the session"), cache.session(ids) as session:
        model().generate(other, attention_mask=torch.ones_like(other), **GREEDY, **session.kwargs)
    longer = torch.cat([ids, prompt(4, 40)[None]], 1)  # begins with the session's: right, if not what was announced
    with cache.session(ids) as session:
        out = model().generate(longer, attention_mask=torch.ones_like(longer), **GREEDY, **session.kwargs)
    assert torch.equal(out, plain(longer))
    with cache.session(ids) as session:
        model().generate(ids, **GREEDY, **session.kwargs)
        with pytest.raises((ValueError, IndexError), match=r"not those of the session|out of bounds"):
            model().generate(ids, **GREEDY, **session.kwargs)
    rows, mask = padded([prompt(SIZE + 2, 40), ids[0]])
    served(cache, rows, mask)
    with pytest.raises(ValueError, match="not those of the session"), cache.session(rows, mask) as session:
        model().generate(rows, attention_mask=torch.ones_like(rows), **GREEDY, **session.kwargs)
    assert_same(cache, ids)
    assert_same(cache, longer)


def test_what_was_fed_otherwise_is_not_committed() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 5, 41)[None]
    embeds = model().get_input_embeddings()(ids)
    shifted = torch.arange(1, ids.shape[1] + 1)[None]
    hidden = torch.ones_like(ids)
    hidden[0, 3] = 0
    for bad in (
        {"inputs_embeds": embeds},
        {"input_ids": ids, "position_ids": shifted},
        {"input_ids": ids, "attention_mask": hidden},
    ):
        with cache.session(ids) as session, torch.no_grad():
            model()(use_cache=True, **bad, **session.kwargs)
    rows, mask = padded([prompt(2 * SIZE, 70), prompt(SIZE, 71)])
    with cache.session(rows, mask) as session, torch.no_grad():
        model()(rows, attention_mask=mask, use_cache=True, **session.kwargs)  # at positions that count the padding
    assert cache.num_cached_blocks == 0
    assert list(cache.stats.bypasses.values()) == [4]


def test_a_pass_that_broke_off_is_not_committed() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 5, 73)[None]

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    hook = model().model.layers[1].register_forward_pre_hook(fail)
    try:
        with cache.session(ids) as session, contextlib.suppress(RuntimeError):
            model().generate(ids, **GREEDY, **session.kwargs)
    finally:
        hook.remove()
    assert cache.num_cached_blocks == 0
    assert sum(cache.stats.bypasses.values()) == 1


def test_a_session_is_entered_once() -> None:
    session = fresh().session(prompt(5, 42)[None])
    with session, pytest.raises(RuntimeError, match="once only"):
        session.__enter__()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2], TypeError, "input_ids must be a tensor of integers, got list"),
        (torch.ones(1, 2), TypeError, "input_ids must be a tensor of integers, got a tensor of torch.float32"),
        (torch.tensor([1, 2]), ValueError, r"input_ids must be \(batch, num_tokens\), got shape \(2,\)"),
    ],
)
def test_a_session_wants_a_batch_of_token_ids(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fresh().session(ids)
    with pytest.raises(TypeError, match=r"namespace must be hashable, got \[\]"):
        fresh().session(prompt(5, 0)[None], namespace=[])


# What bypasses the cache


@pytest.mark.parametrize("policy", ["reuse", "arc", "slru"])
def test_any_policy_serves_the_same_replies(policy: str) -> None:
    cache = fresh(num_blocks=5, policy=policy)
    for number in (43, 44, 43, 45, 43):
        ids = prompt(2 * SIZE + 3, number)[None]
        assert torch.equal(cache.generate(ids, **GREEDY), plain(ids))
        cache.check()
    assert cache.stats.evicted_blocks > 0
    assert cache.stats.cached_tokens >= 2 * SIZE


def own_cache() -> dict[str, Any]:
    return {CACHE_ARGUMENT: transformers.DynamicCache()}


BYPASSES: dict[str, Any] = {
    "a cache passed by the caller": own_cache,
    "assisted decoding": lambda: {"assistant_model": model("qwen3")},
    "prompt-lookup decoding": lambda: {"prompt_lookup_num_tokens": 2, "eos_token_id": VOCAB - 1},
    "use_cache=False": lambda: {"use_cache": False},
    "a cache_implementation": lambda: {"cache_implementation": "static"},
    "attentions or hidden states asked for": lambda: {"output_hidden_states": True},
    "chunked prefill": lambda: {"prefill_chunk_size": 4},
    "model input 'position_ids'": lambda: {"position_ids": torch.arange(2 * SIZE + 3)[None]},
}


@pytest.mark.parametrize("reason", BYPASSES)
def test_what_cannot_be_served_bypasses_is_counted_and_logged_once(reason: str, caplog: Any) -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 3, 43)[None]
    served(cache, ids)
    expected = model().generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **BYPASSES[reason]())
    with caplog.at_level(logging.WARNING, "radixkv"):
        for _ in range(2):
            mask = torch.ones_like(ids)
            out = cache.generate({"input_ids": ids, "attention_mask": mask}, **GREEDY, **BYPASSES[reason]())
            assert torch.equal(out, expected)
    assert cache.stats.bypasses == {reason: 2}
    assert cache.stats.sessions == 1
    assert [record.getMessage() for record in caplog.records if record.name == "radixkv"] == [
        f"prefix cache bypassed: {reason}"
    ]


@pytest.mark.parametrize("reason", BYPASSES)
def test_a_session_told_of_settings_that_cannot_be_served_bypasses(reason: str) -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 3, 43)[None]
    mask = torch.ones_like(ids)
    served(cache, ids)
    settings = GREEDY | BYPASSES[reason]()
    expected = model().generate(ids, attention_mask=mask, **GREEDY, **BYPASSES[reason]())
    with cache.session(ids, mask, generate_kwargs=settings) as session:
        out = model().generate(ids, attention_mask=mask, **settings, **session.kwargs)
    assert (session.bypass, session.num_cached_tokens) == (reason, 0)
    assert torch.equal(out, expected)
    with cache.session(ids, mask, generate_kwargs=GREEDY) as session:
        assert session.num_cached_tokens == 2 * SIZE


def test_embeddings_bypass() -> None:
    cache = fresh()
    embeds = model().get_input_embeddings()(prompt(9, 44)[None])
    expected = model().generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(cache.generate({"inputs_embeds": embeds}, **GREEDY), expected)
    cache.generate({}, **GREEDY, bos_token_id=3)
    assert cache.stats.bypasses == {"inputs_embeds": 1, "no input_ids": 1}


def test_masks_that_are_no_left_padding_bypass() -> None:
    ids = torch.stack([prompt(2 * SIZE, 45), prompt(2 * SIZE, 46)])
    cache = fresh()
    served(cache, ids)
    hole, right, none = torch.ones(3, 2, 2 * SIZE, dtype=torch.int64)
    hole[0, 5] = right[1, -3:] = none[0] = 0
    for mask in (hole, right, none):
        out, session = served(cache, ids, mask)
        assert torch.equal(out, plain(ids, mask))
        assert session.num_prefill_tokens == mask.sum()
    assert cache.stats.bypasses == {"an attention mask that is not left padding": 3}
    shown = ids.clone()
    shown[0, 0] = PAD  # generate takes it for padding
    assert torch.equal(cache.generate(shown, **GREEDY), model().generate(shown, **GREEDY))
    with cache.session(shown) as session:
        assert torch.equal(model().generate(shown, **GREEDY, **session.kwargs), model().generate(shown, **GREEDY))
    assert cache.stats.bypasses["padding without an attention mask"] == 2


def test_a_training_or_changed_model_bypasses() -> None:
    of = make("llama")
    cache = RadixCache(of, num_blocks=32, block_size=SIZE)
    ids = prompt(2 * SIZE + 3, 47)[None]
    served(cache, ids)
    of.train()
    served(cache, ids)
    of.eval()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(ids, of=of)
        assert torch.equal(served(cache, ids)[0], expected)
    with cache.session(ids[:, :20] + 1) as session, torch.autocast("cpu", torch.bfloat16):
        of.generate(ids[:, :20] + 1, **GREEDY, **session.kwargs)  # begun outside: not committed
    of.to(torch.bfloat16)
    assert torch.equal(served(cache, ids)[0], plain(ids, of=of))
    assert sum(cache.stats.bypasses.values()) == 4
    of.float()
    assert cache.stats.bypasses["dtype, device or autocast are not those of the cache"] == 2


def test_encoder_decoder_models_bypass() -> None:
    cache = fresh("t5")
    ids = prompt(2 * SIZE, 48)[None]
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **GREEDY), model("t5").generate(ids, **GREEDY))
    assert cache.stats.bypasses == {"an encoder-decoder model": 2}
    assert cache.explain(ids).num_cached_tokens == 0


@pytest.mark.parametrize("family", REFUSED)
def test_models_without_kv_per_token_are_refused_and_the_layer_named(family: str) -> None:
    with pytest.raises(
        ValueError, match=r"layer \d+ of \w+ is '[^']+': a prefix can be served only by layers that keep"
    ):
        fresh(family)


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic"])
def test_rotary_frequencies_that_depend_on_the_length_are_not_reused_beyond_it(family: str) -> None:
    cache = fresh(family, block_size=4)
    ids = prompt(60, 49)[None]
    served(cache, ids[:, :50])
    out, session = served(cache, ids, max_new_tokens=12)  # crosses the length of 64 while decoding
    assert session.num_cached_tokens > 40
    assert cache.explain(out).num_cached_tokens <= 63
    long = torch.cat([ids, prompt(20, 50)[None]], 1)
    plain(long, of=cache.model)  # the model keeps the frequencies of the longest sequence it saw
    expected = plain(long, of=cache.model)
    out, session = served(cache, long)
    assert session.bypass == "prompts of more than 63 tokens, on which the rotary frequencies depend"
    assert torch.equal(out, expected)
    assert_same(cache, ids[:, :40])


# What must not be shared


def test_namespaces_share_nothing() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 1, 51)[None]
    spaces: list[Any] = [None, "a", ("a",), 7, "7"]
    for space in spaces:
        assert served(cache, ids, namespace=space)[1].num_cached_tokens == 0
    for space in spaces:
        assert assert_same(cache, ids, namespace=space).num_cached_tokens == 2 * SIZE
    assert cache.explain(ids, namespace="b").reason == "another namespace"
    assert cache.explain(ids, namespace="b").namespace in spaces
    cache.generate(ids, namespace="a", **GREEDY)
    assert cache.stats.hit_rate == pytest.approx(6 * 2 * SIZE / (11 * (2 * SIZE + 1)))


class Adapter(torch.nn.Module):
    """As much of a PEFT layer as says what is active."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False
        self.scaling = {"x": 1.0, "y": 1.0}

    def forward(self, hidden: Any) -> Any:
        active = [] if self.disable_adapters else self.active_adapters
        return self.base(hidden) * (1 + sum(self.scaling[name] * (0.5 if name == "x" else -0.7) for name in active))


def test_kv_of_one_adapter_is_not_reused_by_another() -> None:
    of = make("llama")
    adapter = of.model.layers[0].mlp.down_proj = Adapter(of.model.layers[0].mlp.down_proj)
    of.peft_config = {"x": None, "y": None}
    cache = RadixCache(of, num_blocks=128, block_size=SIZE)
    ids = prompt(2 * SIZE + 1, 52)[None]
    states: list[dict[str, Any]] = [
        {"active_adapters": []},
        {"active_adapters": ["x"]},
        {"active_adapters": ["y"]},
        {"active_adapters": ["x", "y"]},
        {"scaling": {"x": 0.3, "y": 1.0}},
        {"merged_adapters": ["x"]},
    ]
    for state in states:
        for name, value in state.items():
            setattr(adapter, name, value)
        assert assert_same(cache, ids).num_cached_tokens == 0
        assert assert_same(cache, ids).num_cached_tokens == 2 * SIZE
    with cache.session(other := prompt(2 * SIZE + 1, 66)[None]) as session:
        of.generate(other, **GREEDY, **session.kwargs)
        adapter.merged_adapters = []
    assert cache.stats.bypasses == {"not committed: the adapters changed meanwhile": 1}
    adapter.disable_adapters = True  # as without any
    assert assert_same(cache, ids).num_cached_tokens == 2 * SIZE


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peft_adapters_are_told_apart() -> None:
    peft = pytest.importorskip("peft")
    of = peft.get_peft_model(make("llama"), peft.LoraConfig(init_lora_weights=False, r=4))
    of.add_adapter("other", peft.LoraConfig(init_lora_weights=False, r=4))
    of.eval()
    cache = RadixCache(of, num_blocks=128, block_size=SIZE)
    ids = prompt(2 * SIZE + 1, 53)[None]
    for adapter in ("default", "other"):
        of.set_adapter(adapter)
        assert assert_same(cache, ids).num_cached_tokens == 0
        assert assert_same(cache, ids).num_cached_tokens == 2 * SIZE
    with of.disable_adapter():
        assert assert_same(cache, ids).num_cached_tokens == 0
    expected = plain(ids, of=of)
    cache.attach()
    assert torch.equal(of.generate(input_ids=ids, **GREEDY), expected)
    cache.detach()
    tuned = peft.get_peft_model(
        make("llama"), peft.PromptTuningConfig(peft.TaskType.CAUSAL_LM, num_virtual_tokens=3)
    ).eval()
    cache = RadixCache(tuned, num_blocks=128, block_size=SIZE)
    for _ in range(2):
        out = cache.generate({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **GREEDY)
        assert torch.equal(out, tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY))
    assert cache.stats.bypasses == {"an adapter that prepends a prompt of its own": 2}


def test_after_a_reset_nothing_old_is_served_nor_committed() -> None:
    of = make("llama")
    cache = RadixCache(of, num_blocks=128, block_size=SIZE)
    ids = prompt(2 * SIZE + 1, 54)[None]
    served(cache, ids)
    with cache.session(ids) as session:
        assert session.num_cached_tokens == 2 * SIZE
        of.generate(ids, **GREEDY, **session.kwargs)
        with torch.no_grad():
            of.model.layers[0].mlp.down_proj.weight.mul_(-1)
        cache.reset()
    assert cache.num_cached_blocks == 0
    assert assert_same(cache, ids).num_cached_tokens == 0
    assert assert_same(cache, ids).num_cached_tokens == 2 * SIZE


def test_takes_ids_of_32_bits() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 1, 67)[None].int()
    assert_same(cache, ids)
    assert assert_same(cache, ids).num_cached_tokens == 2 * SIZE


def test_several_caches_on_one_model_do_not_meet() -> None:
    first, second = fresh(), fresh(block_size=8)
    ids = prompt(2 * SIZE + 1, 55)[None]
    assert_same(first, ids)
    assert assert_same(second, ids).num_cached_tokens == 0
    assert assert_same(second, ids).num_cached_tokens == 2 * SIZE
    assert assert_same(first, ids).num_cached_tokens == 2 * SIZE


# Threads


def test_eight_threads_on_one_cache() -> None:
    cache = fresh(num_blocks=20)
    prefix = prompt(3 * SIZE, 56)
    prompts = [torch.cat([prefix[: SIZE * (1 + n % 3)], prompt(3 + n, 60 + n)])[None] for n in range(8)]
    expected = [plain(ids, max_new_tokens=12) for ids in prompts]
    cache.attach()
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(4):
            n = (number + turn) % 8
            ids = prompts[n]
            stream = Stop()
            out = model().generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, streamer=stream
            )
            streamed = torch.cat([x.reshape(-1) for x in iter(stream.tokens.get, None)])
            if not (torch.equal(out, expected[n]) and torch.equal(streamed, expected[n][0])):
                wrong.append((n, out))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        cache.detach()
    assert not wrong
    assert cache.stats.sessions == 32
    assert cache.stats.cached_tokens > 0
    cache.check()
    assert "private=0, running=0" in repr(cache)


def test_no_lock_is_held_while_the_model_runs() -> None:
    cache = fresh()
    ids, mask = padded([prompt(2 * SIZE + 1, 57), prompt(5, 58)])
    served(cache, ids, mask)
    locked: list[bool] = []
    hook = model().register_forward_hook(lambda *_: locked.append(cache._lock.locked()))
    try:
        assert_same(cache, ids, mask)
    finally:
        hook.remove()
    assert locked
    assert not any(locked)


# Memory


def test_sizes_in_bytes_and_in_blocks() -> None:
    per_token = fresh().store.bytes_per_token
    assert per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, bytes
    cache = RadixCache(model(), f"{10 * SIZE * per_token + 1}B")
    assert (cache.num_blocks, cache.block_size) == (10, 16)
    assert RadixCache(model(), num_blocks=7).store.num_bytes == 7 * 16 * per_token
    with pytest.raises(
        ValueError, match=r"max_bytes=100 is 100 bytes, but .* needs 4,096: 1 blocks of 16 tokens of 256"
    ):
        RadixCache(model(), 100)
    latents, expanded = 2 * (16 + 4) * 4, 2 * 4 * (12 + 6) * 4  # by version
    assert RadixCache(model("deepseek_v3"), num_blocks=2).store.bytes_per_token in (latents, expanded)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_quantised_hit_is_the_same_twice_and_close(family: str, quantize: str) -> None:
    cache = fresh(family, quantize=quantize)
    ids = prompt(3 * SIZE + 1, 59)[None]
    logits = {"return_dict_in_generate": True, "output_logits": True}
    served(cache, ids)
    (first, session), (second, _) = (served(cache, ids, **logits) for _ in range(2))
    assert session.num_cached_tokens == 3 * SIZE
    assert torch.equal(first.sequences, second.sequences)
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))
    expected = plain(ids, of=cache.model, **logits)
    difference = (first.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
    assert 0 < difference < (0.05 if quantize == "int8" else 0.2)
    assert cache.store.num_bytes < 0.6 * fresh(family).store.num_bytes


def test_the_layer_of_a_session_grows_shrinks_and_reorders() -> None:
    layer = Layer(2)
    k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 6)
    layer.update(k, v)
    for _ in range(70):
        layer.update(k[:, :, :1], v[:, :, :1])
    assert layer.get_seq_length() == 73
    assert torch.equal(layer.keys[:, :, :3], k)
    layer.crop(-70)
    assert torch.equal(layer.values, v)
    layer.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.keys[0], k[1])
    layer.batch_select_indices(torch.tensor([0]))
    layer.batch_repeat_interleave(3)
    assert layer.keys.shape == (3, 2, 3, 4)
    layer.crop(2)
    assert layer.get_mask_sizes(5) == layer.get_mask_sizes(torch.arange(5)) == (7, 0)
    layer.reset()
    assert layer.get_seq_length() == 0


def test_explains_a_prompt() -> None:
    cache = fresh()
    ids = prompt(2 * SIZE + 3, 61)[None]
    served(cache, ids)
    changed = ids.clone()
    changed[0, SIZE + 2] += 1
    found = cache.explain(changed)
    assert (found.reason, found.position, found.num_cached_tokens) == ("diverged", SIZE + 2, SIZE)
    assert cache.explain(changed[0].tolist()) == found
    with pytest.raises(ValueError, match="explain takes one prompt, got 2"):
        cache.explain(torch.cat([ids, ids]))


def test_a_copied_model_keeps_its_own_generate_after_detach() -> None:
    other = copy.deepcopy(model())
    ids = prompt(SIZE, 62)[None]
    assert torch.equal(plain(ids, of=other), plain(ids))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_on_a_gpu_unchanged(quantize: str | None) -> None:
    cache = RadixCache(make("llama").cuda(), num_blocks=128, block_size=SIZE, quantize=quantize)
    rows = [prompt(9, 1), prompt(3 * SIZE + 4, 2), prompt(7 * SIZE, 3)]
    ids, mask = (x.cuda() for x in padded(rows))
    expected = plain(ids, mask, of=cache.model)
    served(cache, ids, mask)
    out, session = served(cache, ids, mask)
    assert session.num_cached_tokens > 6 * SIZE
    if quantize is None:
        assert torch.equal(out, expected)
