"""The engine against `generate` and transformers' continuous batching, on SmolLM2-135M: `python bench/serving.py`.

CPU seconds of the process with one torch thread, wall seconds beside them; ratios are within this run.
"""

import argparse
import gc
import logging
import random
import statistics
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import card
import torch
import transformers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radixkv import PrefixCache
from radixkv.integrations import smollm2
from radixkv.integrations.engine import Engine, Sampling
from radixkv.integrations.engine_rows import PackedRows
from radixkv.integrations.hf_cache import CACHE_ARGUMENT
from radixkv.store import KVStore

NUM_REQUESTS, NUM_SHARED, NUM_OWN, NUM_NEW = 16, 1000, 24, 16
NUM_ROWS, NUM_CONTEXT, NUM_STEPS = 8, 1024, 24
POOLS = (48, 64, 96, 160)
BLOCK = 16

Prompt = list[int]
Result = dict[str, object]


class Clock:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.process_time() - self._cpu, time.perf_counter() - self._wall


def main() -> None:
    sections = (layouts, shared_batch, decode, hits, continuous)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(f.__name__ for f in sections))
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    model, _ = smollm2.load()
    facts = card.card(
        "serving: one engine, many requests",
        model="SmolLM2-135M-Instruct, float32, random token ids",
        threads=f"torch {torch.get_num_threads()}",
        seed=options.seed,
    )
    results = [
        section(model, random.Random(options.seed))
        for section in sections
        if not options.sections or section.__name__ in options.sections
    ]
    card.finish({**facts, "sections": results})


@torch.inference_mode()
def layouts(model: Any, _: random.Random) -> Result:
    """Attention alone, of one new token in each of 8 sequences of 1,024, in all layers, by where K and V lie."""
    config = model.config
    num_layers, kv_heads, heads, dim = (
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.num_attention_heads,
        config.head_dim,
    )
    num_tokens = NUM_CONTEXT - 1  # and the new one
    cache, store = PrefixCache(1024, BLOCK), KVStore(1024, BLOCK)
    apart, together = [], []
    for row in range(NUM_ROWS):
        for holds, shared in ((apart, 0), (together, NUM_CONTEXT - NUM_OWN)):
            hold = cache.allocate([*range(shared), *range(2000 * row, 2000 * row + NUM_CONTEXT - shared)])
            start = hold.num_cached_tokens
            slots = store.slot_mapping(hold.block_table, start, num_tokens)
            for layer in range(num_layers):
                store.write(layer, *(torch.randn(num_tokens - start, kv_heads, dim) for _ in "kv"), slots)
            cache.commit(hold, num_tokens)
            holds.append(hold)
    q = torch.randn(NUM_ROWS, heads, 1, dim)
    new = torch.randn(NUM_ROWS, kv_heads, 1, dim)
    slots = [tuple(torch.randn(NUM_ROWS, kv_heads, NUM_CONTEXT, dim) for _ in "kv") for _ in range(num_layers)]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    blocks = torch.tensor([list(hold.block_table) for hold in apart])

    def attend(k: torch.Tensor, v: torch.Tensor) -> None:
        sdpa_attention_forward(module, q, k, v, None, scaling=dim**-0.5)

    def concatenated(layer: int) -> None:
        attend(*(torch.cat([x[:, :, :num_tokens], new], 2) for x in slots[layer]))

    def gathered(layer: int) -> None:
        k, v = store.read(layer, blocks.flatten(), blocks.numel() * BLOCK)
        attend(*(x.view(NUM_ROWS, -1, kv_heads, dim).transpose(1, 2) for x in (k, v)))

    def in_slots(layer: int) -> None:
        k, v = slots[layer]
        k[:, :, num_tokens:], v[:, :, num_tokens:] = new, new
        attend(k, v)

    def packed(holds: list[Any]) -> Callable[[int], None]:
        rows: PackedRows[int] = PackedRows(num_layers, range(num_layers), store, q.device)
        held = {row: (hold, num_tokens) for row, hold in enumerate(holds)}
        kv = rows.inputs(held, {row: array("i", [0]) for row in held})[CACHE_ARGUMENT]
        packed_q, packed_new = (x.transpose(0, 2) for x in (q, new))  # (1, heads, rows, dim)

        def attend(layer: int) -> None:
            rows.attend(
                SimpleNamespace(layer_idx=layer), packed_q, *kv.update(packed_new, packed_new, layer), dim**-0.5
            )

        return attend

    print(f"attention of one token in each of {NUM_ROWS} sequences of {NUM_CONTEXT}, {num_layers} layers")
    print(f"  {'':44} {'CPU ms':>8} {'wall ms':>8}")
    medians = {}
    for name, layout in {
        "concatenated anew, as transformers' own": concatenated,
        "gathered out of blocks": gathered,
        "a slot each, padded": in_slots,
        "a segment each": packed(apart),
        "one segment and tails, prefix shared": packed(together),
    }.items():
        seconds = []
        for _ in range(9):
            clock = Clock()
            for layer in range(num_layers):
                layout(layer)
            seconds.append(clock.read())
        cpu, wall = (1000 * statistics.median(side) for side in zip(*seconds, strict=True))
        medians[name] = cpu
        print(f"  {name:44} {cpu:8.1f} {wall:8.1f}")
    print()
    return {"section": "layouts", "cpu_ms": medians}


def shared_batch(model: Any, rng: random.Random) -> Result:
    """16 requests with 1,000 tokens in common, 24 of their own and 16 new ones."""
    shared = tokens(rng, NUM_SHARED)
    batches = [[shared + tokens(rng, NUM_OWN) for _ in range(NUM_REQUESTS)] for _ in range(3)]
    sampling = Sampling(max_new_tokens=NUM_NEW, ignore_eos=True)
    print(f"{NUM_REQUESTS} requests, {NUM_SHARED} tokens shared, {NUM_OWN} own, {NUM_NEW} new")
    rows = {}
    names = ("engine, cold", "engine, prefix cached", "engine, prefix cached again")
    with closing(Engine(model, max_bytes="1GiB", max_running=NUM_REQUESTS)) as engine:
        replies = []
        for name, batch in zip(names, batches, strict=True):
            before = engine.cache.stats.hit_tokens
            clock = Clock()
            replies.append([request.tokens for request in engine.generate(batch, sampling)])
            rows[name] = (*clock.read(), (engine.cache.stats.hit_tokens - before) / (len(batch) * len(batch[0])))
    clock = Clock()
    expected = generate(model, batches[0], NUM_NEW)
    rows["generate on the batch"] = (*clock.read(), 0.0)
    same = sum(a == b for a, b in zip(replies[0], expected, strict=True))
    base = rows["generate on the batch"][0]
    print(f"  {'':28} {'CPU s':>8} {'wall s':>8} {'of generate':>12} {'hit tokens':>11}")
    for name, (cpu, wall, hit) in rows.items():
        print(f"  {name:28} {cpu:8.2f} {wall:8.2f} {cpu / base:11.3f}x {hit:11.1%}")
    print(f"  the same replies as generate: {same} of {NUM_REQUESTS}\n")
    return {
        "section": "shared batch",
        "cpu_s": {name: row[0] for name, row in rows.items()},
        "ratio_cold": rows["engine, cold"][0] / base,
        "ratio_warm": rows["engine, prefix cached"][0] / base,
        "same_replies": same,
    }


def decode(model: Any, rng: random.Random) -> Result:
    """A decode step of 8 sequences of 1,024 tokens, without the prefill; all take turns, so that all meet the same."""
    print(f"a decode step of {NUM_ROWS} sequences of {NUM_CONTEXT} tokens, median of {NUM_STEPS}")
    shared = tokens(rng, NUM_CONTEXT - NUM_OWN)
    together = [shared + tokens(rng, NUM_OWN) for _ in range(NUM_ROWS)]
    apart = [tokens(rng, NUM_CONTEXT) for _ in range(NUM_ROWS)]
    options = {"max_bytes": "512MiB", "max_running": NUM_ROWS}
    with closing(Engine(model, **options)) as first, closing(Engine(model, **options)) as second:
        for engine, prompts in ((first, together), (second, apart)):
            requests = [engine.submit(prompt, Sampling(max_new_tokens=256, ignore_eos=True)) for prompt in prompts]
            while not all(request.num_generated_tokens > 1 for request in requests):
                engine.step()
        turns = Turns(
            {
                "engine, nothing shared": second.step,
                "engine, prefix shared": first.step,
                "no context at all": bare(model),
            }
        )
        generate(model, together, NUM_STEPS + 1, turns)
    steps = {"transformers' own cache": turns.between} | turns.seconds
    base = statistics.median(cpu for cpu, _ in turns.between)
    print(f"  {'':28} {'CPU ms':>8} {'wall ms':>8} {'faster by':>10}")
    medians = {}
    for name, seconds in steps.items():
        cpu, wall = (1000 * statistics.median(side) for side in zip(*seconds, strict=True))
        medians[name] = cpu
        print(f"  {name:28} {cpu:8.1f} {wall:8.1f} {1000 * base / cpu:9.2f}x")
    print()
    return {"section": "decode", "cpu_ms": medians}


def hits(_: Any, rng: random.Random) -> Result:
    """Hit tokens of the engine and of `generate_batch` with pages of 16, over pools of several sizes.

    What hits does not depend on the model, so it is a tiny one.
    """
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    prompts = chats(rng)
    total = sum(map(len, prompts))
    print(f"hit tokens: {len(prompts)} turns of chats, {total} prompt tokens, 4 at a time, blocks of {BLOCK}")
    print(f"  {'':6} {'4 come when 4 have gone':>28} {'all queue from the beginning':>32}")
    print(f"  {'blocks':6} {'transformers':>18} {'engine':>9} {'transformers':>22} {'engine':>9}")
    rows = []
    for num_blocks in POOLS:
        cells = [
            serve(model, prompts, num_blocks, size)[0] / total
            for size in (4, len(prompts))
            for serve in (with_transformers, with_engine)
        ]
        rows.append([num_blocks, *cells])
        print(f"  {num_blocks:<6} {cells[0]:18.1%} {cells[1]:9.1%} {cells[2]:22.1%} {cells[3]:9.1%}")
    print()
    return {"section": "hits", "prompt_tokens": total, "pools": rows}


def continuous(model: Any, rng: random.Random) -> Result:
    """What serving the same chats costs."""
    prompts = chats(rng)
    print("serving those turns, 4 new tokens each, 4 come when 4 have gone")
    print(f"  {'':6} {'transformers':>20} {'engine':>20}")
    print(f"  {'blocks':6} {'CPU s':>10} {'wall s':>9} {'CPU s':>10} {'wall s':>9}")
    rows = []
    for num_blocks in (POOLS[0], POOLS[-1]):
        theirs, ours = (serve(model, prompts, num_blocks, 4)[1:] for serve in (with_transformers, with_engine))
        rows.append({"blocks": num_blocks, "transformers": theirs, "engine": ours})
        print(f"  {num_blocks:<6} {theirs[0]:10.2f} {theirs[1]:9.2f} {ours[0]:10.2f} {ours[1]:9.2f}")
    print()
    return {"section": "continuous batching", "pools": rows}


def with_engine(model: Any, prompts: list[Prompt], num_blocks: int, size: int) -> tuple[int, float, float]:
    """Hit tokens, CPU and wall seconds of serving the prompts, `size` at once."""
    with closing(Engine(model, num_blocks=num_blocks, block_size=BLOCK, max_running=4)) as engine:
        clock = Clock()
        for start in range(0, len(prompts), size):
            engine.generate(prompts[start : start + size], Sampling(max_new_tokens=4, ignore_eos=True))
        return engine.cache.stats.hit_tokens, *clock.read()


def with_transformers(model: Any, prompts: list[Prompt], num_blocks: int, size: int) -> tuple[int, float, float]:
    config = ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=num_blocks, max_batch_tokens=256, max_requests_per_batch=4
    )
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = {
        "generation_config": generation,
        "continuous_batching_config": config,
        "persistent_manager": True,
        "warmup": False,
    }
    found = 0
    with counted_hits() as hits:
        clock = Clock()
        for start in range(0, len(prompts), size):
            hits.clear()
            outputs = model.generate_batch(prompts[start : start + size], **options)
            assert [len(output.generated_tokens) for output in outputs.values()] == [4] * len(outputs)
            found += sum(hits.values())
        read = clock.read()
    model.destroy_cached_continuous_batching_manager()
    return found, *read


@contextmanager
def counted_hits() -> Iterator[dict[str, int]]:
    """What transformers' prefix search finds for each request, the first time that it looks."""
    hits: dict[str, int] = {}
    search = PagedAttentionCache.search_prefix_match

    def counting(self: Any, request_id: str, prompt_ids: list[int]) -> int:
        found: int = search(self, request_id, prompt_ids)
        hits.setdefault(request_id, found)
        return found

    PagedAttentionCache.search_prefix_match = counting
    try:
        yield hits
    finally:
        PagedAttentionCache.search_prefix_match = search


def chats(rng: random.Random) -> list[Prompt]:
    """Turns of 12 chats under 3 system prompts, in the order in which a busy service sees them."""
    systems = [tokens(rng, 80) for _ in range(3)]
    histories = [list(rng.choice(systems)) for _ in range(12)]
    prompts = []
    for _ in range(60):
        history = rng.choice(histories)
        history += tokens(rng, rng.randrange(8, 24))
        prompts.append(list(history))
        history += tokens(rng, rng.randrange(8, 24))  # the reply of the trace
        if len(history) > 280:
            history[:] = rng.choice(systems)
    return prompts


class Turns(LogitsProcessor):
    """Gives others a turn between the steps of `generate`, and notes what each of them and it takes."""

    def __init__(self, others: dict[str, Callable[[], object]]) -> None:
        self.between: list[tuple[float, float]] = []
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
        self._others = others
        self._clock: Clock | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._clock is not None:
            self.between.append(self._clock.read())
        for name, step in self._others.items():
            clock = Clock()
            step()
            self.seconds[name].append(clock.read())
        self._clock = Clock()
        return scores


def generate(model: Any, prompts: list[Prompt], num_new: int, *processors: LogitsProcessor) -> list[tuple[int, ...]]:
    """The replies of `model.generate` to a batch of prompts of one length."""
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
    )
    gc.collect()
    return [tuple(row) for row in output[:, ids.shape[1] :].tolist()]


def bare(model: Any) -> Callable[[], object]:
    """The same step with nothing to attend to: what reading the weights costs."""
    ids = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
    return torch.inference_mode()(lambda: model(input_ids=ids, use_cache=False))


def tokens(rng: random.Random, num: int) -> Prompt:
    return [rng.randrange(100, 49000) for _ in range(num)]


if __name__ == "__main__":
    main()
