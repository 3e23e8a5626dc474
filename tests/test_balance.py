"""Requests go where least is left to do, and a shared prompt makes no hot spot."""

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.balance import Balancer

WORKERS = ["a", "b", "c", "d"]


def test_an_idle_worker_that_has_most_is_chosen() -> None:
    balancer = Balancer(WORKERS)
    assert balancer.choose(100, {}) == "a"
    assert balancer.choose(100, {"b": 16, "c": 32}) == "c"


def test_what_waits_is_weighed_against_what_is_cached() -> None:
    balancer = Balancer("ab", decode_tokens=0, spread=0)
    balancer.begin("a", 500)
    assert balancer.choose(1_000, {"a": 499}) == "b"
    assert balancer.choose(1_000, {"a": 501}) == "a"
    balancer.end("a", 500)
    assert balancer.choose(1_000, {"a": 1}) == "a"


def test_cost_is_the_sum_of_its_terms() -> None:
    balancer = Balancer("ab", decode_tokens=7, spread=0.5, half_life=100)
    balancer.begin("a", 100)
    assert balancer.cost("a", 30, 10) == 20 + 100 + 7 + 0.5 * 100
    balancer.begin("b", 100)
    assert balancer.cost("a", 30, 10) == 20 + 100 + 7 + 0.5 * 50
    balancer.end("a", 100)
    assert balancer.cost("a", 30, 10) == 20 + 0.5 * 50


def test_a_new_worker_is_not_flooded() -> None:
    balancer = Balancer("ab", spread=1, half_life=1e9)
    for worker in ("a", "b"):
        balancer.begin(worker, 1_000_000)
        balancer.end(worker, 1_000_000)
    balancer.add("new")
    got = Counter[str]()
    for _ in range(30):
        worker = balancer.choose(1_000, {})
        balancer.begin(worker, 1_000)
        balancer.end(worker, 1_000)
        got[worker] += 1
    assert got["new"] == 10


def run(num_requests: int, num_in_flight: int, *, shared: int, own: int, **settings: Any) -> Counter[str]:
    """Requests of one shared system prompt and a question of their own; how many each worker gets."""
    balancer = Balancer(WORKERS, **settings)
    has_prompt: set[str] = set()
    running: deque[tuple[str, int]] = deque()
    got = Counter[str]()
    for _ in range(num_requests):
        if len(running) == num_in_flight:
            balancer.end(*running.popleft())
        worker = balancer.choose(shared + own, dict.fromkeys(has_prompt, shared))
        num_prefill = own if worker in has_prompt else shared + own
        balancer.begin(worker, num_prefill)
        running.append((worker, num_prefill))
        has_prompt.add(worker)
        got[worker] += 1
    return got


@pytest.mark.parametrize("num_in_flight", [1, 8, 64])
@pytest.mark.parametrize("own", [16, 200, 4_000])
def test_a_shared_system_prompt_makes_no_hot_spot(num_in_flight: int, own: int) -> None:
    """Whether requests overlap or come one by one: the busiest of four workers gets at most 30 % of them."""
    got = run(20_000, num_in_flight, shared=2_000, own=own)
    assert max(got.values()) <= 6_000


def test_cached_tokens_alone_do_make_one() -> None:
    """What the other terms are for."""
    assert run(1_000, 1, shared=2_000, own=16, spread=0) == {"a": 1_000}


def test_a_removed_worker_is_forgotten() -> None:
    balancer = Balancer(WORKERS)
    balancer.begin("a", 1_000)
    balancer.remove("a")
    balancer.end("a", 1_000)
    assert balancer.workers == ["b", "c", "d"]
    balancer.add("a")
    assert balancer.cost("a", 10) == 10


@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 10**6)), max_size=20))
def test_what_has_ended_waits_no_more(requests: list[tuple[str, int]]) -> None:
    balancer = Balancer(WORKERS, spread=0)
    for request in requests:
        balancer.begin(*request)
    for request in requests:
        balancer.end(*request)
    assert all(balancer.cost(worker, 5) == 5 for worker in WORKERS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spread": -1}, "spread must be finite and at least 0, got -1"),
        ({"half_life": 0}, "half_life must be finite and above 0, got 0"),
        ({"decode_tokens": float("nan")}, "decode_tokens must be finite and at least 0, got nan"),
        ({"spread": "1"}, "spread must be a number, got '1'"),
    ],
)
def test_bad_settings_are_named(settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        Balancer[str](**settings)
    assert str(error.value) == message


def test_no_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 worker"):
        Balancer[str]().choose(10, {})
