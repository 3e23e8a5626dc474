"""Chats keep ids: whatever a template or tokeniser does to the past, a turn's prompt begins with the turn before."""

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TextIteratorStreamer  # noqa: E402

from radixkv.integrations.chat import RadixChat, Turn  # noqa: E402
from radixkv.integrations.hf import RadixCache  # noqa: E402

torch.set_num_threads(1)

# One template for each way in which they differ, after those of the models named.
CHATML = (  # Qwen2.5, SmolLM2: a system prompt of its own where there is none
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # trims what is said
    "<s>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA2 = (  # the system prompt inside the first message, a blank before the end of a reply, roles in turn or an error
    "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (ns.system if loop.first else '') + m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
GEMMA = (  # no system prompt, a role of another name
    "<s>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # the system prompt moves to the last message
    "<s>{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
QWEN3 = (  # strips the thinking out of old turns, puts an empty one where thinking is off
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (  # begins the thinking in the prompt, and strips it
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}<|start|>{{ m.content.split('</think>')[-1] }}</s>"
    "{% else %}<|end|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|><think>\n{% endif %}"
)
PLAIN = (  # no special token at all
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
_CHATML_TURN = ("<|im_end|>", "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
# template; how a reply ends; what comes between it and the user's next words; what comes after them
STABLE = {  # renders the past the same in every turn
    "chatml": (CHATML, *_CHATML_TURN),
    "llama3": (LLAMA3, "<|eot|>", "<|start|>user<|end|>\n\n", "<|eot|><|start|>assistant<|end|>\n\n"),
    "gemma": (GEMMA, "<end_of_turn>", "\n<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
}
TEMPLATES = {
    **STABLE,
    "llama2": (LLAMA2, " </s>", "<s>[INST] ", " [/INST]"),
    "mistral": (MISTRAL, "</s>", "[INST]", "[/INST]"),
    "qwen3": (QWEN3, *_CHATML_TURN),
    "r1": (R1, "</s>", "<|end|>", "<|start|><think>\n"),
    "plain": (PLAIN, "", "\n\n### user:\n", "\n\n### assistant:\n"),
}
SPECIAL = ["<|eos|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Bytes, special tokens, a BOS unless told otherwise, and one merge, so that a reply can come in other ids than its
    text has."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["he"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|eos|>", additional_special_tokens=SPECIAL
    )
    begin = ("<s>", fast.convert_tokens_to_ids("<s>"))
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    fast.chat_template = template
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class ScriptedModel:
    """Says what it is told to, token by token, and remembers how it was called."""

    device = torch.device("cpu")

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, replies: list[str | list[int]], context: int = 10**6
    ) -> None:
        ends = tokenizer.convert_tokens_to_ids(["<|eos|>", "</s>", "<|im_end|>", "<|eot|>", "<end_of_turn>"])
        self.generation_config = SimpleNamespace(eos_token_id=ends, max_new_tokens=None)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=context))
        self._replies = iter([encode(tokenizer, reply) if isinstance(reply, str) else reply for reply in replies])
        self.calls: list[dict[str, object]] = []

    def generate(self, input_ids: torch.Tensor, *, streamer: object, **kwargs: object) -> torch.Tensor:
        self.calls.append(kwargs)
        streamer.put(input_ids)
        reply = next(self._replies)
        if isinstance(reply, BaseException):
            raise reply
        for token in reply:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([input_ids, torch.tensor([reply])], dim=1)


def scripted_chat(template: str, replies: list[str | list[int]], **kwargs: object) -> RadixChat:
    tokenizer = make_tokenizer(template)
    return RadixChat(ScriptedModel(tokenizer, replies), tokenizer, None, **kwargs)


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompts_are_what_the_template_makes_of_the_whole_chat(name: str, system: str | None) -> None:
    template, end, *_ = STABLE[name]
    if name == "gemma" and system:
        with pytest.raises(Exception, match="System role not supported"):
            scripted_chat(template, [], system=system)
        return
    chat = scripted_chat(template, [f"{word}{end}" for word in ("one", "", "three 3", "last")], system=system)
    for text in ("first", "the second", "the\n\nthird", ""):
        said = [*chat.messages, {"role": "user", "content": text}]
        turn = chat.send(text)
        whole = chat._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert list(turn.prompt_tokens) == encode(chat._tokenizer, whole)
    assert [message["role"] for message in chat.messages if message["role"] != "system"] == ["user", "assistant"] * 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_the_turn_before_and_what_is_new_whatever_the_template_strips(name: str) -> None:
    template, end, between, after = TEMPLATES[name]
    replies = [f"<think>\nhm {number}\n</think>\n\n  reply {number}  {end}" for number in range(3)]
    chat = scripted_chat(template, replies)
    text = chat._tokenizer.decode(chat.send("question").prompt_tokens)
    for number in range(1, 3):
        before = chat.tokens
        turn = chat.send(f"question {number}")
        assert turn.prompt_tokens[: len(before)] == before
        text += replies[number - 1] + between + f"question {number}" + after
        assert chat._tokenizer.decode(turn.prompt_tokens) == text


def test_end_of_a_reply_with_a_blank_before_it_is_not_said_twice() -> None:
    chat = scripted_chat(LLAMA2, [" one </s>", " two", "three</s>"], system="s")
    for text in ("1", "2", "3"):
        chat.send(text)
    assert chat._tokenizer.decode(chat.tokens) == (
        "<s>[INST] <<SYS>>s<</SYS>>1 [/INST] one </s><s>[INST] 2 [/INST] two </s><s>[INST] 3 [/INST]three</s>"
    )


def test_system_prompt_that_a_template_moves_stays_where_it_was_first() -> None:
    chat = scripted_chat(MISTRAL, ["one</s>", "two</s>"], system="Be brief.")
    chat.send("first")
    chat.send("second")
    assert chat._tokenizer.decode(chat.tokens) == "<s>[INST]Be brief.\n\nfirst[/INST]one</s>[INST]second[/INST]two</s>"


def test_ids_of_a_reply_are_kept_where_its_text_has_others() -> None:
    tokenizer = make_tokenizer()
    h, e, end = tokenizer.convert_tokens_to_ids(["h", "e", "<|im_end|>"])
    chat = scripted_chat(CHATML, [[h, e, end], "bye<|im_end|>"])
    first = chat.send("say he")
    assert first.text == "he"
    assert encode(tokenizer, "he") != [h, e]
    assert chat.send("again").prompt_tokens[: first.num_prompt_tokens + 3] == (*first.prompt_tokens, h, e, end)


def test_reply_that_was_cut_off_is_ended_by_the_template() -> None:
    chat = scripted_chat(CHATML, ["I will never st", "op<|im_end|>"], system="s")
    chat.send("a")
    turn = chat.send("b")
    assert chat._tokenizer.decode(turn.prompt_tokens).endswith(
        "assistant\nI will never st<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reply_that_ended_as_the_template_would_not_is_ended_as_it_would() -> None:
    chat = scripted_chat(CHATML, ["hi<|eos|>", "bye<|im_end|>"], system="s")
    chat.send("a")
    assert "<|eos|>" in chat._tokenizer.decode(chat.tokens)
    turn = chat.send("what is <|eos|>?")
    assert "\nhi<|im_end|>\n<|im_start|>user\nwhat is <|eos|>?" in chat._tokenizer.decode(turn.prompt_tokens)


def test_template_gets_its_arguments_in_every_turn() -> None:
    chat = scripted_chat(QWEN3, ["a<|im_end|>", "b<|im_end|>"], template_kwargs={"enable_thinking": False})
    for _ in range(2):
        prompt = chat._tokenizer.decode(chat.send("hi").prompt_tokens)
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")


def test_messages_of_any_role_make_a_turn() -> None:
    chat = scripted_chat(CHATML, ["call<|im_end|>", "done<|im_end|>"], system="s")
    chat.send(
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    )
    turn = chat.send([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    text = chat._tokenizer.decode(turn.prompt_tokens)
    assert [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]] == (
        ["system", "user", "assistant", "user", "assistant", "tool", "tool", "assistant"]
    )


def test_user_may_say_the_word_that_stands_for_a_reply() -> None:
    chat = scripted_chat(CHATML, ["a<|im_end|>", "b<|im_end|>"])
    chat.send("a")
    turn = chat.send("what is radixkv-stands-for-a-reply?")
    assert chat._tokenizer.decode(turn.prompt_tokens).count("radixkv-stands-for-a-reply") == 1


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), StopIteration()])
def test_failed_turn_leaves_the_chat_as_before_and_ends_the_streamer(error: BaseException) -> None:
    ended = []
    streamer = SimpleNamespace(put=lambda value: None, end=lambda: ended.append(True))
    chat = scripted_chat(CHATML, ["a<|im_end|>"])
    turn = chat.send("hi")
    chat._model._replies = iter([error, encode(chat._tokenizer, "b<|im_end|>")])
    tokens = chat.tokens
    with pytest.raises(type(error)):
        chat.send("there", streamer=streamer)
    assert ended == [True]
    assert (chat.tokens, chat.turns) == (tokens, (turn,))
    assert chat.send("there").text == "b"


def test_fork_shares_the_past_and_nothing_else() -> None:
    chat = scripted_chat(CHATML, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    chat.send("one")
    other = chat.fork()
    tokens = chat.tokens
    other.send("two")
    assert chat.tokens == tokens == other.tokens[: len(tokens)]
    chat.send("three")
    assert [turn.text for turn in chat.turns + other.turns] == ["a", "c", "a", "b"]


def test_reset_begins_anew_behind_the_same_system_prompt() -> None:
    chat = scripted_chat(CHATML, ["a<|im_end|>", "b<|im_end|>"], system="Be brief.")
    first = chat.send("hi")
    chat.reset()
    assert (chat.tokens, chat.turns, chat.messages) == ((), (), [{"role": "system", "content": "Be brief."}])
    assert chat.send("hi").prompt_tokens == first.prompt_tokens


def test_arguments_of_generate_come_from_the_chat_unless_the_turn_has_others() -> None:
    chat = scripted_chat(CHATML, ["a<|im_end|>"] * 3, repetition_penalty=1.1)
    chat.send("a")
    chat.send("b", max_new_tokens=5, repetition_penalty=1.3)
    chat.send("c", max_length=500, stop_strings=["\n"])
    for call in chat._model.calls:
        del call["attention_mask"]
    assert chat._model.calls == [
        {"max_new_tokens": 256, "repetition_penalty": 1.1},
        {"max_new_tokens": 5, "repetition_penalty": 1.3},
        {"max_length": 500, "repetition_penalty": 1.1, "stop_strings": ["\n"], "tokenizer": chat._tokenizer},
    ]


def test_what_a_chat_cannot_do_is_refused_at_the_door() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        scripted_chat("", [])
    with pytest.raises(ValueError, match="leaves replies out"):
        scripted_chat("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", [])
    with pytest.raises(ValueError, match=r"num_beams must be 1, .* got 4"):
        scripted_chat(CHATML, [], num_beams=4)
    chat = scripted_chat(CHATML, [])
    with pytest.raises(ValueError, match=r"num_return_sequences must be 1, .* got 2"):
        chat.send("hi", num_return_sequences=2)
    for message in (None, b"hi", {"role": "user"}, ["hi"]):
        with pytest.raises(TypeError, match="message must be a string or a list of dicts, got "):
            chat.send(message)
    with pytest.raises(ValueError, match="got an empty list"):
        chat.send([])
    chat = RadixChat(ScriptedModel(chat._tokenizer, [], context=100), chat._tokenizer, None)
    with pytest.raises(ValueError, match=r"the chat is \d+ tokens with this turn, the model's context 100"):
        chat.send("hi" * 60)
    assert chat.tokens == ()


def test_times_add_up() -> None:
    turn = Turn(
        messages=(),
        text="",
        prompt_tokens=tuple(range(100)),
        tokens=(1, 2, 3, 4, 5),
        num_cached_tokens=80,
        num_prefill_tokens=20,
        prepare_seconds=0.25,
        lookup_seconds=0.25,
        prefill_seconds=0.5,
        inter_token_seconds=(0.125, 0.25, 0.125, 0.5),
        commit_seconds=9.0,
    )
    assert (turn.ttft, turn.decode_seconds, turn.total) == (1.0, 1.0, 2.0)
    assert (turn.itl, turn.itl_median, turn.itl_p99) == (0.25, 0.1875, 0.5)
    assert turn.ttft + (turn.num_generated_tokens - 1) * turn.itl == turn.total
    assert (turn.prefill_tokens_per_second, turn.decode_tokens_per_second) == (40.0, 4.0)
    assert str(turn) == (
        "prompt 100 tokens: 80 cached, 20 prefilled; 5 generated; TTFT 1.000 s, "
        "ITL median 187.5 ms, P99 500.0 ms, 4.0 tokens/s; 2.000 s in all"
    )


def test_p99_is_met_by_99_of_100_tokens() -> None:
    times = tuple(float(number) for number in range(1, 101))
    turn = Turn((), "", (), (0,) * 101, 0, 0, 0.0, 0.0, 1.0, times, 0.0)
    assert turn.itl_p99 == 99.0


# With a model and a cache

TOKENIZER = make_tokenizer()
BLOCK_SIZE = 16


def make_model() -> LlamaForCausalLM:
    """Two layers with random weights, over the vocabulary of `TOKENIZER`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=TOKENIZER.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=TOKENIZER.convert_tokens_to_ids("<|eos|>"),
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def cache(model: LlamaForCausalLM) -> RadixCache:
    return RadixCache(model, max_bytes="4MiB", block_size=BLOCK_SIZE)


CONTROLS = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3, "top_p": 0.95}


def test_ten_turns_prefill_what_is_new_and_at_most_a_block(model: LlamaForCausalLM, cache: RadixCache) -> None:
    chat = RadixChat(model, TOKENIZER, cache, system="Be brief. " * 20, **CONTROLS)
    plain = RadixChat(model, TOKENIZER, None, system="Be brief. " * 20, **CONTROLS)
    for number in range(10):
        num_old = len(chat.tokens)
        torch.manual_seed(number)
        turn = chat.send(f"Question {number}?")
        torch.manual_seed(number)
        expected = plain.send(f"Question {number}?")
        assert (turn.prompt_tokens, turn.tokens, turn.text) == (expected.prompt_tokens, expected.tokens, expected.text)
        assert turn.num_cached_tokens + turn.num_prefill_tokens == turn.num_prompt_tokens == expected.num_prefill_tokens
        if number:
            assert turn.num_prefill_tokens <= turn.num_prompt_tokens - num_old + BLOCK_SIZE
        assert expected.num_cached_tokens == 0
        assert len(turn.inter_token_seconds) == turn.num_generated_tokens - 1 > 0
        assert turn.ttft + (turn.num_generated_tokens - 1) * turn.itl == pytest.approx(turn.total)


@pytest.mark.parametrize(
    "controls",
    [
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 3.0, "top_k": 20, "min_new_tokens": 4},
        {"stop_strings": ["a", "e", "0"], "do_sample": True, "temperature": 5.0},
        {"bad_words_ids": [[5], [7]], "max_new_tokens": 3},
    ],
)
def test_controls_of_generate_work_unchanged(
    model: LlamaForCausalLM, cache: RadixCache, controls: dict[str, object]
) -> None:
    chats = [RadixChat(model, TOKENIZER, each, max_new_tokens=20) for each in (cache, None)]
    for seed in range(3):
        replies = []
        for chat in chats:
            torch.manual_seed(seed)
            replies.append(chat.send("Say something, please.", **controls))
        assert replies[0].tokens == replies[1].tokens
        assert replies[0].num_cached_tokens > 0 or not seed


@pytest.mark.parametrize(
    "settings", [{"prompt_lookup_num_tokens": 3}, {"use_cache": False}, {"cache_implementation": "static"}]
)
def test_what_the_cache_cannot_serve_goes_without_it(
    model: LlamaForCausalLM, cache: RadixCache, settings: dict[str, object]
) -> None:
    chats = [RadixChat(model, TOKENIZER, each, max_new_tokens=12) for each in (cache, None)]
    for text in ("one two one two", "one two"):
        turn, plain = (chat.send(text, **settings) for chat in chats)
        assert turn.tokens == plain.tokens
        assert (turn.num_cached_tokens, turn.num_prefill_tokens) == (0, turn.num_prompt_tokens)
        assert turn.ttft + (turn.num_generated_tokens - 1) * turn.itl == pytest.approx(turn.total)
    assert sum(cache.stats.bypasses.values()) == 2


def test_streams_each_token_as_it_comes(model: LlamaForCausalLM, cache: RadixCache) -> None:
    chat = RadixChat(model, TOKENIZER, cache, **CONTROLS)
    for _ in range(2):
        streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60, skip_special_tokens=True)
        turns = []
        thread = threading.Thread(target=lambda: turns.append(chat.send("hello", streamer=streamer)))  # noqa: B023
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert text == turns[0].text


@pytest.mark.parametrize("error", [RuntimeError("connection lost"), KeyboardInterrupt()])
def test_interrupted_turn_leaves_chat_and_cache_as_before(
    model: LlamaForCausalLM, cache: RadixCache, error: BaseException
) -> None:
    class Failing:
        def __init__(self) -> None:
            self.num_puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.num_puts += 1
            if self.num_puts == 5:
                raise error

        def end(self) -> None:
            raise RuntimeError("fails as well")

    chat = RadixChat(model, TOKENIZER, cache, max_new_tokens=12)
    plain = RadixChat(model, TOKENIZER, None, max_new_tokens=12)
    assert chat.send("first").tokens == plain.send("first").tokens
    tokens = chat.tokens
    with pytest.raises(type(error)) as raised:
        chat.send("second", streamer=Failing())
    assert raised.value is error
    assert chat.tokens == tokens
    turn = chat.send("second, again")
    assert turn.tokens == plain.send("second, again").tokens
    assert turn.num_prefill_tokens <= turn.num_prompt_tokens - len(tokens) + BLOCK_SIZE


def test_forks_and_other_chats_share_the_past(model: LlamaForCausalLM, cache: RadixCache) -> None:
    system = "Be brief. " * 20
    chat = RadixChat(model, TOKENIZER, cache, system=system, **CONTROLS)
    first = chat.send("hello")
    other = chat.fork()
    assert other.send("how?").num_cached_tokens > first.num_prompt_tokens
    assert chat.send("why?").num_cached_tokens > first.num_prompt_tokens
    assert RadixChat(model, TOKENIZER, cache, system=system, **CONTROLS).send("bye").num_cached_tokens >= 192
    apart = RadixChat(model, TOKENIZER, cache, system=system, namespace="another", **CONTROLS)
    assert apart.send("bye").num_cached_tokens == 0
