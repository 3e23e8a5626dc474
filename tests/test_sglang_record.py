"""The adapter's source against the recorded signatures of the SGLang it is for; needs no SGLang.

test_sglang.py compares the record with the SGLang that is installed.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_signatures import RECORD

from radixkv.integrations.sglang import SUPPORTED_VERSIONS

FOLDER = Path(__file__).parents[1] / "radixkv" / "integrations"
SOURCES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("sglang*.py"))}
SGLANG = json.loads(RECORD.read_text())
BASE = SGLANG["methods"]["mem_cache.base_prefix_cache.BasePrefixCache"]
[CACHE] = [
    node for node in ast.walk(SOURCES["sglang_cache"]) if isinstance(node, ast.ClassDef) and node.name == "RadixKVCache"
]
METHODS = {node.name: node for node in CACHE.body if isinstance(node, ast.FunctionDef)}
# What SGLang calls on a tree cache only together with something that is refused, or guards by a question before.
NOT_ASKED = {
    "host memory, storage, LMCache": {
        *("attach_storage_backend", "bind_prefetch_ticket", "check_prefetch_progress", "clear_storage_backend"),
        *("components", "dec_host_lock_ref", "detach_storage_backend", "enable_storage", "evict_host"),
        *("finish_external_linker_loads", "get_last_hash_value", "get_prefix_hash_values", "has_free_load_back_slot"),
        *("has_ongoing_prefetch", "has_pending_cache_operations", "hicache_storage_pass_prefix_keys"),
        *("host_pool_group", "inc_host_lock_ref", "is_backuped", "is_load_back_event_done", "is_root", "linker"),
        *("pop_prefetch_loaded_tokens", "prefetch_from_storage", "query_storage_hit_length"),
        *("register_sidecar_pool", "sidecar_pool_specs", "tree_core", "validate_retraction_host_capacity"),
    },
    "recurrent or sliding-window layers": {
        *("all_mamba_values_flatten", "mamba_evictable_size", "mamba_protected_size"),
        *("release_swa", "release_swa_prefix_lock", "sliding_window_size"),
    },
    "sessions of the radix cache": {"ensure_session_generation", "open_radix_session"},
}


def test_the_supported_version_is_the_recorded_one() -> None:
    assert list(SUPPORTED_VERSIONS) == [SGLANG["version"]]


def test_the_entry_point_is_in_sglangs_group() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{SGLANG["group"]}"]\nradixkv = "radixkv.integrations.sglang:register"\n' in project


def test_everything_imported_from_sglang_is_recorded() -> None:
    known = {key for kind in ("methods", "fields", "enums", "functions") for key in SGLANG[kind]}
    used = {
        f"{node.module.removeprefix('sglang.srt.')}.{name.name}"
        for source in SOURCES.values()
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for name in node.names
    }
    assert used
    assert used <= known, used - known


def test_every_abstract_method_is_there() -> None:
    assert set(SGLANG["abstract"]) <= METHODS.keys()


@pytest.mark.parametrize("name", sorted(METHODS.keys() & BASE.keys() - {"__init__"}))
def test_overriding_methods_take_what_sglang_passes(name: str) -> None:
    assert f"({ast.unparse(_bare(METHODS[name].args))})".replace(" ", "") == BASE[name].replace(" ", "")


def test_every_call_on_a_tree_cache_is_answered() -> None:
    refused = set().union(*NOT_ASKED.values())
    set_by_init = {
        node.attr
        for node in ast.walk(METHODS["__init__"])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    aliases = {
        target.id
        for node in CACHE.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    answered = METHODS.keys() | set(SGLANG["attributes"]) | set_by_init | aliases
    assert set(SGLANG["calls"]) - answered == refused


def test_only_known_fields_are_read_and_made() -> None:
    by_name = {key.rsplit(".", 1)[1]: set(names) for key, names in SGLANG["fields"].items()}
    params = by_name["CacheInitParams"] | by_name["InsertParams"] | by_name["EvictParams"]
    params |= by_name["MatchPrefixParams"] | by_name["DecLockRefParams"]
    fields = {
        "kv": by_name["ReqKvInfo"],
        "req": set(SGLANG["request"]),
        "params": params,
        "context": by_name["TreeCacheBuildContext"],
        "lock": by_name["TreeLock"],
        "receipt": by_name["DecLockRefParams"],
        "get_memory()": by_name["Memory"],
    }
    seen = set()
    for owner, attribute in _attributes():
        if owner in fields:
            seen.add(owner)
            assert attribute in fields[owner], f"{owner}.{attribute}"
    assert seen == fields.keys()
    for call in _calls():
        if isinstance(call.func, ast.Name) and call.func.id in by_name:
            given = {keyword.arg for keyword in call.keywords}
            assert given <= by_name[call.func.id], f"{call.func.id} has no {given - by_name[call.func.id]}"


def test_the_allocator_has_what_is_called() -> None:
    for kind in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"):
        methods = SGLANG["methods"][f"mem_cache.allocator.{kind}"]
        assert methods["free_segment"] == "(self, free_index, *, start_pos)"
        assert "size" in methods["__init__"]
    assert SGLANG["methods"]["mem_cache.memory_pool.ReqToTokenPool"]["write"] == "(self, indices, values)"


def _attributes() -> Iterator[tuple[str, str]]:
    """Every `x.attribute` and `y.x.attribute` of the sources, as (x, attribute)."""
    for source in SOURCES.values():
        for node in ast.walk(source):
            if isinstance(node, ast.Attribute):
                owner = node.value
                yield owner.attr if isinstance(owner, ast.Attribute) else ast.unparse(owner), node.attr


def _calls() -> Iterator[ast.Call]:
    for source in SOURCES.values():
        yield from (node for node in ast.walk(source) if isinstance(node, ast.Call))


def _bare(arguments: ast.arguments) -> Any:
    for argument in [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return arguments
