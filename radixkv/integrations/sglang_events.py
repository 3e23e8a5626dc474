"""The KV events of SGLang's prefix cache on our tree. Needs SGLang."""

from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str


class Recorder(KVCacheEventRecorder):
    """SGLang's own recorder, fed from our tree. Remembers of each cached page what it was announced as."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.enabled:
            get_hash_str(RadixKey(array("q", [0])), None, 1)  # builds SGLang's hash now, not within a request
        self._announced: dict[int, tuple[int, str]] = {}  # place -> (block hash, the hash that the next goes on from)
        self._new: list[int] = []

    def enqueue(self, event: Any) -> None:
        if isinstance(event, BlockStored):
            self._new += event.block_hashes
        super().enqueue(event)

    def clear(self) -> None:
        """Everything is gone."""
        self._announced.clear()
        self.record_all_cleared()

    def stored(self, above: int | None, places: "array[int]", key: RadixKey, session: str | None) -> None:
        """`key` is cached in `places`, behind what is in place `above`."""
        # What the recorder reads of a node of SGLang's own trees, and of those above it.
        namespace = {"extra_key": key.extra_key, "cache_salt": key.cache_salt}
        is_named = key.extra_key is not None or key.cache_salt is not None
        root = SimpleNamespace(parent=None, key=RadixKey(array("q")), hash_value=[], event_hash_value=None)
        parent = root
        if above is not None:
            last = [self._announced[above][1]]
            any_key = RadixKey(array("q", [0]), **namespace)
            parent = SimpleNamespace(parent=root, key=any_key, hash_value=last, event_hash_value=last)
        node = SimpleNamespace(parent=parent, key=key, hash_value=[] if is_named else None, event_hash_value=None)
        self._new.clear()
        self.record_store(node, session_id=session)
        chain = node.event_hash_value if is_named else node.hash_value
        self._announced.update(zip(places, zip(self._new, chain, strict=True), strict=True))

    def removed(self, places: "array[int]") -> None:
        """What was in `places` is evicted."""
        if self.enabled:
            hashes = [self._announced.pop(place)[0] for place in places]
            self.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))

    def check(self, cached: "array[int]") -> None:
        """Raises: AssertionError where what is announced is not what is cached."""
        assert not self.enabled or self._announced.keys() == set(cached), "events do not cover what is cached"
