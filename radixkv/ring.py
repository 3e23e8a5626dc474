"""Numbers in an order that changes at any place. Knows nothing of what they stand for."""

from array import array


class Ring:
    """Numbers in the order in which they were added, all in O(1). Not thread-safe.

    Links in two columns, 8 bytes for each number up to the largest, which no garbage collection walks.
    """

    def __init__(self) -> None:
        # number `n` has place n + 1; place 0 is where the ring begins and ends
        self._next = array("i", [0])
        self._previous = array("i", [0])  # _ABSENT of what is not in the ring

    def add(self, number: int) -> None:
        place = number + 1
        following, previous = self._next, self._previous
        while place >= len(following):
            following.append(0)
            previous.append(_ABSENT)
        last = previous[0]
        following[last] = previous[0] = place
        following[place] = 0
        previous[place] = last

    def discard(self, number: int) -> None:
        place = number + 1
        following, previous = self._next, self._previous
        if place >= len(previous) or previous[place] == _ABSENT:
            return  # subtle: the upper half of a fresh split is held before it was ever added
        before, after = previous[place], following[place]
        following[before] = after
        previous[after] = before
        previous[place] = _ABSENT

    def first(self) -> int:
        return self._next[0] - 1

    def numbers(self) -> set[int]:
        """What was added and not discarded, for checks."""
        found = set()
        place = self._next[0]
        while place:
            found.add(place - 1)
            place = self._next[place]
        return found


_ABSENT = -1
