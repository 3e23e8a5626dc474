"""What is learned of ages of reuse: bins, counts, the fit and the index."""

import random

import numpy as np
import pytest

from radixkv.hazards import NUM_BINS, NUM_CLASSES, ROW, Hazards, age_bins, class_of, gittins_index, unused_share

EDGES = [2 ** (b / 2) - 1 for b in range(NUM_BINS + 1)]


def age_bin(age: int) -> int:
    return int(age_bins(np.array([age]))[0])


def test_bins_are_half_octaves() -> None:
    for age in [*range(3000), 92_680, 92_681, 92_682, 10**6]:
        assert age_bin(age) == max(b for b in range(NUM_BINS) if EDGES[b] <= age)


@pytest.mark.parametrize(
    ("uses", "num_new", "expected"),
    [
        *((1, 0, 0), (1, 1, 0), (1, 2, 1), (1, 8, 2), (1, 511, 4), (1, 10**6, 5), (2, 0, 6), (3, 0, 12), (4, 0, 18)),
        *((7, 0, 18), (8, 0, 24), (16, 0, 30), (31, 0, 30), (32, 0, 36), (10**6, 10**6, 41)),
    ],
)
def test_classes(uses: int, num_new: int, expected: int) -> None:
    assert class_of(uses, num_new) == expected


def test_the_share_that_is_left_is_near_that_of_the_exponential() -> None:
    uses = np.array([0, 1e-9, 0.01, 0.5, 2, 10, 1e6])
    assert unused_share(uses) == pytest.approx(np.exp(-uses), rel=0.04, abs=1e-3)
    assert unused_share(np.array([1e300])) == 0


def test_the_index_is_the_best_ratio_of_uses_to_time_over_all_ends() -> None:
    rng = random.Random(0)
    unused = np.array([[rng.random() ** rng.choice([0.01, 1, 10]) for _ in range(12)] for _ in range(50)])
    stays = np.array([[rng.uniform(0.1, 50) for _ in range(12)] for _ in range(50)])
    index = gittins_index(unused, stays)
    for kind in range(50):
        for start in range(12):
            left, cost, best = 1.0, 0.0, 0.0
            for b in range(start, 12):
                cost += left * stays[kind, b]
                left *= unused[kind, b]
                best = max(best, (1 - left) / cost)
            assert index[kind, start] == pytest.approx(best)


def test_what_comes_back_at_one_age_is_worth_more_the_nearer_it_is_and_little_after() -> None:
    hazards = Hazards()
    for _ in range(300):
        hazards.log.extend((0, 0, 100, 5, 1, 0))  # used at age 100
        hazards.log.extend((7, 0, 3000, 5, 0, 0))  # never
    hazards.relearn(256)
    assert hazards.index is not None
    comes, never = hazards.index[0], hazards.index[7]
    assert comes[age_bin(0)] < comes[age_bin(50)] < comes[age_bin(95)]
    assert comes[age_bin(300)] < comes[age_bin(0)] / 4
    assert all(there > 10 * not_there for there, not_there in zip(comes[:13], never[:13], strict=True))


def test_ages_that_are_counted_in_parts_make_the_same_index() -> None:
    whole, parts = Hazards(), Hazards()
    rng = random.Random(0)
    for _ in range(500):
        kind, age, num = rng.randrange(NUM_CLASSES), rng.randrange(1, 5000), rng.randrange(1, 30)
        used = rng.random() < 0.5
        whole.log.extend((kind, 0, age, num, int(used), 0))
        middle = rng.randrange(age + 1)
        one = [np.array([value]) for value in (kind, 0, middle, num)]
        parts.count(*one)
        parts.log.extend((kind, middle, age, num, int(used), 0))
    whole.relearn(100)
    parts.relearn(100)
    assert whole.index is not None
    assert parts.index is not None
    assert np.array(parts.index) == pytest.approx(np.array(whole.index))


def test_nothing_is_known_before_something_was_used_again() -> None:
    hazards = Hazards()
    hazards.relearn(32)
    assert hazards.index is None
    hazards.log.extend((0, 0, 10, 5, 0, 0))
    hazards.log.extend((0, 0, 0, 5, -1, 0))  # in use all the time: no event
    hazards.relearn(32)
    assert hazards.index is None
    assert len(hazards.log) % ROW == 0


def test_a_class_never_seen_is_like_those_with_as_many_uses() -> None:
    hazards = Hazards()
    for _ in range(200):
        hazards.log.extend((class_of(2, 2), 0, 10, 4, 1, 0))
        hazards.log.extend((class_of(1, 2), 0, 1000, 4, 0, 0))
    hazards.relearn(256)
    assert hazards.index is not None
    unseen, seen, other = (hazards.index[class_of(*of)] for of in ((2, 600), (2, 2), (1, 2)))
    assert abs(unseen[5] / seen[5] - 1) < 0.2
    assert unseen[5] > 5 * other[5]


def test_what_was_learned_fades() -> None:
    hazards = Hazards()
    for _ in range(100):
        hazards.log.extend((0, 0, 10, 4, 1, 0))
    hazards.relearn(256)
    for _ in range(40):
        for _ in range(20):
            hazards.log.extend((0, 0, 1000, 4, 0, 0))
            hazards.log.extend((0, 0, 1000, 4, 1, 0))
        hazards.relearn(2000)
    assert hazards.index is not None
    assert hazards.index[0][age_bin(900)] > 2 * hazards.index[0][age_bin(8)]
