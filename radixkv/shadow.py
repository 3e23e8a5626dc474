"""What least recently used would have hit, beside another order, and whether to go by that order. Knows no tree.

A request uses its whole path, so the blocks that it was the last to use are a suffix of that path. LRU keeps those of
the latest requests whole, and of one more the head: a block's last use, and its place on that path, tell whether it
would be there. No second cache is needed.
"""


class ShadowLRU:
    """Of what no request uses. Exact where requests follow one another, are whole blocks, and compute nothing that is
    there already; else as if a request used its path when it ended. Not thread-safe.

    A tick of its clock is a use of a path.
    """

    __slots__ = ("_edge", "_end", "_lengths", "_num_after", "_num_last", "_tick", "room")

    def __init__(self) -> None:
        self.room = 0
        """Blocks that it has: those that no running request holds."""
        self._tick = 0
        self._edge = 0  # of the blocks that were used last at this tick it keeps the head, of those after it all
        self._end = 0  # where on the path of that tick the head ends
        self._num_after = 0  # blocks last used after that
        self._num_last: dict[int, int] = {}  # tick -> blocks that were used last then, from the edge on
        self._lengths: dict[int, int] = {}  # tick -> blocks of the path

    def hits(self, use: int, start: int, num: int) -> int:
        """How many of `num` blocks, last used at tick `use`, from block `start` of its path on, are there."""
        if use > self._edge or use < 0:
            return num
        return min(num, max(0, self._end - start)) if use == self._edge else 0

    def take(self, use: int, start: int, num: int) -> int:
        """The same, and they are forgotten."""
        num_hit = self.hits(use, start, num)
        self.forget(use, num)
        return num_hit

    def forget(self, use: int, num: int) -> None:
        """`num` blocks last used at tick `use` are gone, or in use."""
        if use >= self._edge and use in self._num_last:
            if use > self._edge:
                self._num_after -= num
            self._num_last[use] -= num
            if not self._num_last[use]:  # else every look would leave something behind
                del self._num_last[use], self._lengths[use]

    def use(self, num: int, length: int) -> int:
        """The last `num` blocks of a path of `length` were used, after they were forgotten; returns the tick."""
        self._tick += 1
        if num:  # else every prompt of less than a block would leave something behind
            self._num_last[self._tick], self._lengths[self._tick] = num, length
        self._num_after += num
        while self._num_after > self.room and self._edge < self._tick:
            self._num_last.pop(self._edge, None)
            self._lengths.pop(self._edge, None)
            self._edge += 1
            self._end = self._lengths.get(self._edge, 0)
            self._num_after -= self._num_last.get(self._edge, 0)
        length = self._lengths.get(self._edge, 0)
        self._end = min(self._end, length - self._num_last.get(self._edge, 0) + self.room - self._num_after)
        return self._tick


_WINDOW = 1024  # lookups over which hits are averaged
_LOSS = 0.005  # of the blocks asked for, that is not borne


class Guard:
    """Whether to go by LRU order for a while, as the other one hits less. Not thread-safe.

    For 1,024 lookups, then for twice as many as the last time, up to 16 times; after 8,192 good ones, for 1,024 again.
    """

    __slots__ = ("_asked", "_lead", "_length", "_num", "active", "since", "switches")

    def __init__(self) -> None:
        self.active = False
        self.since = 0
        """The lookup since which that is so."""
        self.switches = 0
        """How often it became active."""
        self._lead = self._asked = 0.0
        self._num = 0  # lookups since the last change
        self._length = 0  # for how many it was active last

    def add(self, lookup: int, lead: int, num_asked: int) -> None:
        """Lookup number `lookup`, of so many blocks, hit `lead` more than LRU would have."""
        self._lead += lead - self._lead / _WINDOW
        self._asked += num_asked - self._asked / _WINDOW
        self._num += 1
        if self.active:
            if self._num >= self._length:
                self.active, self.since, self._num = False, lookup, 0
                self._lead = self._asked = 0.0
        elif self._num >= _WINDOW // 2 and self._lead < -_LOSS * self._asked:
            self.active, self.since, self._num = True, lookup, 0
            self.switches += 1
            self._length = min(max(_WINDOW, 2 * self._length), 16 * _WINDOW)
        elif self._num >= 8 * _WINDOW:
            self._length = 0
