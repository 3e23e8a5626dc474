"""What waits for its turn is evicted last: between a tree and a policy that learns. Knows no tokens and no requests.

A policy that goes by recency keeps a prompt that waits, if whoever schedules it looks at it again and again. One that
learns must not take a look for a use; so the leaves at which somebody looked are kept from it instead.
"""

from radixkv.learner import LearningPolicy


class Waiting:
    """A policy that lets another one choose, among the leaves for which nobody waits. Not thread-safe.

    Where there is none, the leaf goes for which somebody waits since the latest. Nobody has to say that he gave up: a
    leaf is given back when as many blocks were cached since the last look as there are, as LRU would not have it then.
    """

    def __init__(self, policy: LearningPolicy) -> None:
        self._policy = policy
        self._num_offered = len(policy.nodes())  # leaves that the policy has
        self._withheld: set[int] = set()  # leaves that it has not
        # nodes, leaves or not, by the first look, and how many blocks had been cached at the last look
        self._looks: dict[int, int] = {}
        self._num_cached = 0  # blocks, ever
        self._next_check = 0  # of looks, at so many cached blocks

    def add(self, leaf: int) -> None:
        if leaf in self._looks:
            self._withheld.add(leaf)
        else:
            self._num_offered += 1
            self._policy.add(leaf)

    def discard(self, leaf: int) -> None:
        if leaf in self._withheld:
            self._withheld.remove(leaf)
        else:
            self._num_offered -= 1
            self._policy.discard(leaf)

    def victim(self) -> int:
        if not self._num_offered:
            latest = next(node for node in reversed(self._looks) if node in self._withheld)
            del self._looks[latest]
            self._give_back(latest)
        return self._policy.victim()

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        return self._policy.nodes() | self._withheld

    def look(self, node: int) -> None:
        """Somebody waits for `node`, which is held now, unless it is waited for already."""
        self._looks[node] = self._num_cached

    def is_waited_for(self, node: int) -> bool:
        return node in self._looks

    def use(self, path: list[int]) -> None:
        """The nodes were used, and are held still."""
        if self._looks:
            for node in path:
                self._looks.pop(node, None)

    def forget(self, node: int) -> None:
        """`node` is gone."""
        self._looks.pop(node, None)

    def cached(self, num: int, num_in_all: int) -> None:
        """`num` blocks more are cached, `num_in_all` now. O(looks), but not often."""
        self._num_cached += num
        if self._looks and self._num_cached >= self._next_check:
            self._next_check = self._num_cached + num_in_all // _CHECKS
            for node in [node for node, then in self._looks.items() if self._num_cached - then > num_in_all]:
                del self._looks[node]
                self._give_back(node)

    def check(self, nodes: set[int]) -> None:
        """Prove that what is waited for is among `nodes`, and what is withheld too. Raises: AssertionError."""
        assert self._looks.keys() <= nodes, f"nodes {self._looks.keys() - nodes} are waited for, but gone"
        assert self._withheld <= self._looks.keys(), f"leaves {self._withheld - self._looks.keys()} are withheld"
        num = len(self._policy.nodes())
        assert num == self._num_offered, f"the policy has {num} leaves, but {self._num_offered} were offered"

    def _give_back(self, node: int) -> None:
        if node in self._withheld:
            self._withheld.remove(node)
            self._num_offered += 1
            self._policy.add(node)

    def __repr__(self) -> str:
        return repr(self._policy)


_CHECKS = 8  # until all blocks have been cached anew
