"""radixkv: a prefix cache for LLM inference. A radix tree of token prefixes over ref-counted KV blocks."""

from radixkv.cache import PrefixCache, Request
from radixkv.errors import OutOfBlocksError

__all__ = ["OutOfBlocksError", "PrefixCache", "Request"]
__version__ = "0.1.0"
