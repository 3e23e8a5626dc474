"""What the adapter to SGLang relies on, read from the SGLang that is installed, as JSON.

    PYTHONPATH=. .peers/sglang/bin/python tests/sglang_signatures.py > tests/sglang_signatures.json

The recorded file is of the version that the adapter is tested with. test_sglang_record.py holds the adapter's source
against it without SGLang; test_sglang.py holds SGLang against it.
"""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
CLASSES = {  # of sglang.srt -> classes of which the adapter calls or overrides methods
    "mem_cache.base_prefix_cache": ["BasePrefixCache"],
    "mem_cache.allocator": ["TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"],
    "mem_cache.memory_pool": ["ReqToTokenPool"],
    "mem_cache.radix_cache": ["RadixKey"],
    "mem_cache.events": ["KVCacheEventRecorder"],
}
RECORDS = {  # -> classes of which it reads or makes fields
    "mem_cache.base_prefix_cache": [
        *("MatchPrefixParams", "MatchResult", "InsertParams", "InsertResult", "EvictParams", "EvictResult"),
        *("IncLockRefResult", "DecLockRefParams", "DecLockRefResult", "TreeLock"),
    ],
    "mem_cache.cache_init_params": ["CacheInitParams"],
    "mem_cache.registry": ["TreeCacheBuildContext"],
    "disaggregation.kv_events": ["BlockStored", "BlockRemoved"],
    "managers.schedule_batch": ["ReqKvInfo"],
    "arg_groups.fields.memory": ["Memory"],
}
ENUMS = {"disaggregation.kv_events": ["StorageMedium"]}
FUNCTIONS = {
    "mem_cache.registry": ["register_radix_cache_backend", "get_radix_cache_factory", "create_tree_cache"],
    "mem_cache.utils": ["get_eviction_strategy", "compute_node_event_hash_values", "get_hash_str"],
    "mem_cache.common": ["match_kv_cache", "checkpoint_kv_cache", "release_kv_cache", "evict_from_tree_cache"],
    "plugins": ["load_plugins"],
    "runtime_context": ["get_memory"],
}


def collect() -> dict[str, Any]:
    """The record of the installed version."""

    def module(name: str) -> Any:
        return importlib.import_module(f"sglang.srt.{name}")

    base = module("mem_cache.base_prefix_cache").BasePrefixCache
    source = inspect.getsource(module("managers.schedule_batch").Req)
    root = Path(module("mem_cache").__path__[0]).parent
    calls = set()
    for path in root.rglob("*.py"):
        calls.update(re.findall(r"\btree_cache\.([a-z]\w*)", path.read_text()))
    return {
        "version": importlib.import_module("sglang.version").__version__,
        "group": module("plugins").GENERAL_PLUGINS_GROUP,
        "policies": sorted(module("mem_cache.utils")._EVICTION_POLICY_FACTORIES),
        "abstract": sorted(base.__abstractmethods__),
        "attributes": sorted(name for name in dir(base) if not name.startswith("_")),
        "request": sorted(set(re.findall(r"self\.(\w+)\b[^=\n]*(?<![=!<>])=(?!=)", source))),
        "calls": sorted(calls),
        "methods": {
            f"{where}.{name}": {
                method: parameters(function)
                for method, function in inspect.getmembers(getattr(module(where), name), inspect.isfunction)
                if not method.startswith("_") or method == "__init__"
            }
            for where, names in CLASSES.items()
            for name in names
        },
        "fields": {
            f"{where}.{name}": fields(getattr(module(where), name)) for where, ns in RECORDS.items() for name in ns
        },
        "enums": {
            f"{where}.{name}": {member.name: member.value for member in getattr(module(where), name)}
            for where, names in ENUMS.items()
            for name in names
        },
        "functions": {
            f"{where}.{name}": parameters(getattr(module(where), name))
            for where, names in FUNCTIONS.items()
            for name in names
        },
    }


def parameters(function: Any) -> str:
    """A signature without its annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def fields(kind: Any) -> list[str]:
    """The fields of a dataclass, a named tuple or a msgspec struct, in their order."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", None) or kind.__struct_fields__)


if __name__ == "__main__":
    print(json.dumps(collect(), separators=(",", ": "), indent=0))
