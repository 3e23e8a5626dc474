"""SGLang's prefix cache on our tree: `--radix-cache-backend radixkv`. See docs/sglang.md.

Imports SGLang, and `radixkv.integrations.sglang_cache`, only when SGLang calls.
"""

import logging
from importlib.metadata import version
from typing import Any

SUPPORTED_VERSIONS = ("0.5.23",)
logger = logging.getLogger(__name__)


def register() -> None:
    """Make `--radix-cache-backend radixkv` known to SGLang. The entry point of group `sglang.srt.plugins`.

    With a version of SGLang that this was not tested with, a warning says so and the flag stays unknown: what a cache
    is asked changes from version to version, and a wrong answer is somebody else's text.
    """
    found = version("sglang")
    if found not in SUPPORTED_VERSIONS:
        logger.warning(
            "--radix-cache-backend radixkv is not available: tested with SGLang %s, and this is %s",
            ", ".join(SUPPORTED_VERSIONS),
            found,
        )
        return
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend("radixkv", create)


def create(context: Any) -> Any:
    """The cache for a `TreeCacheBuildContext`. Raises: ValueError for what is not supported, naming the option."""
    from sglang.srt.runtime_context import get_memory

    from radixkv.integrations.sglang_cache import RadixKVCache

    for found, what in (
        (context.is_hybrid_swa, "models with sliding-window layers"),
        (context.is_hybrid_ssm, "models with recurrent layers"),
        (context.enable_hierarchical_cache, "--enable-hierarchical-cache"),
        (get_memory().enable_lmcache, "--enable-lmcache"),
    ):
        if found:
            raise ValueError(f"--radix-cache-backend radixkv does not support {what}; leave one of the two out")
    return RadixKVCache(context.params)
