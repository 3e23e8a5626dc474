"""The record of a live cache replays to its hits, and tells nothing of the text."""

import gc
import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
import warnings

import pytest

from radixkv import OutOfBlocksError, PrefixCache
from radixkv.record import Recorder
from radixkv.replay import replay
from radixkv.trace import read_trace


def live(cache, *, seed=0, num=200, whole=False):
    """Chats that go on turn by turn, in a few namespaces; with `whole`, no block is ever partly filled."""
    rng = random.Random(seed)
    size = cache.block_size

    def draw(low, high):
        num_tokens = rng.randrange(low, high)
        return [rng.randrange(50_000) for _ in range(num_tokens - num_tokens % size if whole else num_tokens)]

    shared = [draw(100, 400) for _ in range(3)]
    chats = []
    for _ in range(num):
        if not chats or rng.random() < 0.3:
            chats.append([rng.choice([None, "a", ("a", 1)]), list(rng.choice(shared))])
        namespace, history = chat = rng.choice(chats)
        history = history + draw(20, 80)
        request = cache.allocate(history, namespace=namespace)
        cache.commit(request)
        answer = [] if whole else draw(0, 60)
        for token in answer:
            cache.append(request, token)
        if answer:
            cache.commit(request, request.num_tokens - 1)
        cache.free(request)
        chat[1] = history + answer


def serve(cache, tokens, **options):
    request = cache.allocate(tokens, **options)
    cache.commit(request)
    cache.free(request)
    return request


def recorded(path, capacity=None):
    row = replay(read_trace(path), capacity)
    return row.hit_tokens, row.prompt_tokens


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_of_the_record_has_the_live_hits(tmp_path, name, seed):
    cache = PrefixCache(50_000, record=tmp_path / name)
    live(cache, seed=seed)
    cache.record.close()
    assert recorded(tmp_path / name) == (cache.stats.hit_tokens, cache.stats.prompt_tokens)
    assert 0 < cache.stats.hit_tokens < cache.stats.prompt_tokens
    cache.check()


@pytest.mark.parametrize("num_blocks", [60, 150, 400])
def test_in_a_small_cache_whole_blocks_replay_exactly(path, num_blocks):
    cache = PrefixCache(num_blocks, record=path)
    live(cache, whole=True)
    cache.record.close()
    assert cache.stats.evicted_blocks > 0
    assert recorded(path, num_blocks) == (cache.stats.hit_tokens, cache.stats.prompt_tokens)


@pytest.mark.parametrize("num_blocks", [150, 400])
def test_unfinished_blocks_change_little(path, num_blocks):
    cache = PrefixCache(num_blocks, record=path)
    live(cache, num=400)
    cache.record.close()
    hits = recorded(path, num_blocks)[0]
    assert abs(hits - cache.stats.hit_tokens) < 0.01 * cache.stats.hit_tokens


def test_nothing_is_wrapped_without_a_record():
    cache = PrefixCache(8)
    assert cache.record is None
    assert "allocate" not in vars(cache)
    assert "free" not in vars(cache)


def test_a_line_has_hashes_and_counts_only(path):
    cache = PrefixCache(64, 4, record=path)
    request = cache.allocate([*range(7)])
    cache.commit(request)
    cache.append(request, [7, 8, 9])
    cache.commit(request, 9)
    cache.free(request)
    serve(cache, [*range(8)])
    cache.record.close()
    first, second = lines(path)
    assert (first["input_length"], first["output_length"], first["block_size"]) == (7, 3, 4)
    assert [len(first[name]) for name in ("hash_ids", "output_hash_ids")] == [1, 1]
    assert second["hash_ids"] == first["hash_ids"], "a hit leaves the last token"
    assert second["output_hash_ids"] == first["output_hash_ids"]
    assert set(first) == {"timestamp", "input_length", "output_length", "block_size", "hash_ids", "output_hash_ids"}


def test_lines_come_in_the_order_in_which_requests_began(path):
    cache = PrefixCache(64, 4, record=path)
    slow = cache.allocate([1] * 9)
    for length in (5, 6, 7):
        serve(cache, [2] * length)
    cache.record.flush()
    assert lines(path) == []
    cache.free(slow)
    cache.record.flush()
    written = lines(path)
    assert [line["input_length"] for line in written] == [9, 5, 6, 7]
    times = [line["timestamp"] for line in written]
    assert times == sorted(times)


def test_what_was_never_committed_is_never_found(path):
    cache = PrefixCache(64, 4, record=path)
    cache.free(cache.allocate([1] * 9))
    serve(cache, [1] * 9)
    cache.record.close()
    assert recorded(path) == (0, 18)


def test_what_is_forgotten_is_not_found_again(path):
    cache = PrefixCache(64, 4, record=path)
    for namespace in ("a", "b"):
        serve(cache, [1] * 9, namespace=namespace)
    cache.clear("a")
    for namespace in ("a", "b"):
        serve(cache, [1] * 9, namespace=namespace)
    running = cache.allocate([1] * 13, namespace="b")
    cache.reset()
    cache.commit(running)
    cache.free(running)
    serve(cache, [1] * 13, namespace="b")
    cache.record.close()
    assert recorded(path) == (cache.stats.hit_tokens, cache.stats.prompt_tokens) == (8 + 8, 4 * 9 + 2 * 13)


def test_a_reset_alone_is_enough(path):
    cache = PrefixCache(64, 4, record=path)
    for _ in range(3):
        serve(cache, [1] * 9)
        cache.reset()
    cache.record.close()
    assert recorded(path) == (0, 27)


def test_forks_resumed_and_uncacheable_requests_count_as_in_the_stats(path):
    cache = PrefixCache(64, 4, record=path)
    request = cache.allocate([1] * 9)
    cache.commit(request)
    fork, _ = cache.fork(request)
    cache.append(fork, [2] * 4)
    cache.commit(fork)
    cache.free(request)
    cache.free(fork)
    serve(cache, [1] * 9 + [2] * 4 + [3])  # hits what the fork made
    serve(cache, [1] * 9, resumed=True)
    serve(cache, [1] * 9, cacheable=False)
    serve(cache, [1] * 8, min_prefill_tokens=0)
    cache.record.close()
    assert recorded(path) == (cache.stats.hit_tokens, cache.stats.prompt_tokens) == (12 + 8, 9 + 14 + 8)


def test_a_failed_call_leaves_no_line(path):
    cache = PrefixCache(4, 4, record=path)
    held = cache.allocate([1] * 16)
    with pytest.raises(OutOfBlocksError):
        cache.allocate([2] * 8)
    cache.free(held)
    with pytest.raises(ValueError, match="was freed"):
        cache.free(held)
    with pytest.raises(TypeError, match=r"expected a Request, got \[\]"):
        cache.free([])
    cache.record.close()
    assert len(lines(path)) == 1


def test_closing_writes_what_still_runs_and_ends_the_record(path):
    cache = PrefixCache(64, 4, record=path)
    running = cache.allocate([1] * 9)
    cache.commit(running)
    with cache.record:
        pass
    assert [len(line["hash_ids"]) for line in lines(path)] == [2]
    cache.free(running)
    serve(cache, [1] * 9)
    cache.record.close()
    assert len(lines(path)) == 1
    cache.check()


def test_a_record_ends_with_its_cache(path):
    cache = PrefixCache(64, 4, record=path)
    serve(cache, [1] * 9)
    del cache
    gc.collect()
    assert len(lines(path)) == 1


def test_what_is_there_is_appended_to(tmp_path):
    path = tmp_path / "record.jsonl.gz"
    for _ in range(2):
        cache = PrefixCache(64, 4, record=path)
        serve(cache, [1] * 9)
        cache.record.close()
    assert recorded(path) == (0, 18), "another salt: after a restart nothing is cached"


def test_replicas_of_one_salt_can_be_merged(tmp_path):
    paths = [tmp_path / "1", tmp_path / "2"]
    caches = [PrefixCache(64, 4, record=Recorder(path, salt=b"secret")) for path in paths]
    for cache in caches:
        serve(cache, [1] * 9, namespace="a")
        cache.record.close()
    row = replay(read_trace(*paths), None)
    assert (row.hit_tokens, row.prompt_tokens) == (8, 18)
    with pytest.raises(ValueError, match="salt must be at most 64 bytes, got 65"):
        Recorder(tmp_path / "3", salt=b"x" * 65)


def test_a_killed_process_leaves_what_was_flushed(tmp_path):
    path = tmp_path / "record.jsonl.gz"
    code = f"""
import os
from radixkv import PrefixCache
cache = PrefixCache(64, 4, record={os.fspath(path)!r})
for length in (9, 10, 11):
    request = cache.allocate([1] * length)
    cache.commit(request)
    cache.free(request)
    if length == 10:
        cache.record.flush()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    written = gzip.decompress(path.read_bytes()).splitlines()
    assert [json.loads(line)["input_length"] for line in written] == [9, 10]


def test_the_program_may_just_end(path):
    code = f"""
from radixkv import PrefixCache
cache = PrefixCache(64, 4, record={os.fspath(path)!r})
request = cache.allocate([1] * 9)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(lines(path)) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_the_record_and_nothing_else():
    cache = PrefixCache(64, 4, record="/dev/full")
    serve(cache, [1] * 9)
    with pytest.warns(RuntimeWarning, match="the record /dev/full ends here: No space left on device"):
        cache.record.flush()
    assert serve(cache, [1] * 9).num_cached_tokens == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.record.close()


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        PrefixCache(64, 4, record=tmp_path / "no" / "file")


def test_waiting_lines_are_written_in_time(path):
    cache = PrefixCache(4096, 16, record=path)
    tokens = [*range(20_000)]
    tracemalloc.start()
    for _ in range(60):
        serve(cache, tokens)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert path.stat().st_size > 1 << 20
    assert used < 3 << 20
    cache.record.close()
    assert len(lines(path)) == 60
