import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from array import array
from types import SimpleNamespace

import pytest
from chats import TOOLS, TRACES, bodies, library_chats, needs_traces, write
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import TraceError
from radixkv.json_array import array_items
from radixkv.prompts import TokenRequest, TokenRequests
from radixkv.replay import replay
from radixkv.text_trace import ChatReader, parts_of
from radixkv.tokenizer import MARKS, load_tokenizer
from radixkv.trace import TokenTrace, read_trace

BUILT_IN = load_tokenizer(None)
ASK = {"role": "user", "content": "How are you?"}
ANSWER = {"role": "assistant", "content": "Well."}
SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
BODY = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, ASK]}


def shown(tokens, tokenizer=BUILT_IN):
    """Whose part, and its text."""
    parts = parts_of(tokens)
    return [(part.role, tokenizer.decode(tokens[4 * part.start : 4 * part.end])) for part in parts]


def chats(*records):
    reader = ChatReader(BUILT_IN)
    return [chat for record in records for chat in reader.read(record)]


# Tokenizers


@given(st.text(st.characters(codec="utf-16-le", exclude_categories=()), max_size=80) | st.text(" ab1\n.", max_size=80))
def test_the_built_in_tokenizer_is_reversible(text):
    tokens = BUILT_IN.encode(text)
    assert BUILT_IN.decode(tokens) == text
    assert len(tokens) % 4 == 0
    assert all(0 <= token < MARKS for token in array("i", tokens))


def test_its_tokens_are_readable_chunks():
    chunks = [
        BUILT_IN.decode(BUILT_IN.encode("Hello, world: 12345\n    understandably é")[at : at + 4])
        for at in range(0, 60, 4)
    ]
    assert [chunk for chunk in chunks if chunk] == [
        *("Hello", ",", " world", ":", " ", "12", "34", "5", "\n   ", " understa", "ndably", " é")
    ]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat and the dog", "the dogs"] * 9, trainer)
    made.save(str(path))
    return path


def test_a_tokenizer_file_or_the_folder_it_is_in_can_be_named(tokenizer_file):
    for name in (tokenizer_file, str(tokenizer_file.parent)):
        named = load_tokenizer(name)
        tokens = named.encode("the dog é")
        assert named.decode(tokens) == "the dog é"
        assert len(tokens) // 4 < 9
    named.encode("lone \ud800 surrogate")


def test_a_trace_is_read_by_the_tokenizer_that_is_named(tmp_path, tokenizer_file):
    path = write(tmp_path / "t", [{"messages": [{"role": "user", "content": "the dog"}, ANSWER]}])
    trace = read_trace(path, tokenizer=tokenizer_file)
    assert shown(trace.requests[0].tokens, trace.tokenizer) == [("user", "the dog"), ("assistant", "")]
    assert (trace.tokenizer.name, read_trace(path).tokenizer.name) == ("tokenizer.json", "built-in")


def test_tiktoken_encodings_that_are_installed_can_be_named(monkeypatch):
    codec = SimpleNamespace(
        encode=lambda text, disallowed_special: [*text.encode()], decode=lambda ids: bytes(ids).decode()
    )

    def get_encoding(name):
        if name == "far":
            raise OSError("no network")
        return codec

    fake = SimpleNamespace(list_encoding_names=lambda: ["near", "far"], get_encoding=get_encoding)
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    named = load_tokenizer("near")
    assert (named.name, named.decode(named.encode("abc"))) == ("near", "abc")
    with pytest.raises(ValueError, match="tiktoken cannot load far: no network"):
        load_tokenizer("far")
    with pytest.raises(
        ValueError, match="'other' is no file or folder here, nor one of tiktoken's encodings near, far"
    ):
        load_tokenizer("other")


def test_tokens_of_another_vocabulary_are_shown_as_numbers_or_not_at_all(monkeypatch, tokenizer_file):
    load_tokenizer(tokenizer_file).decode(array("i", [70_000, 5]).tobytes())
    codec = SimpleNamespace(encode=None, decode=lambda ids: {}[ids[0]])
    monkeypatch.setitem(
        sys.modules, "tiktoken", SimpleNamespace(list_encoding_names=lambda: ["x"], get_encoding=lambda name: codec)
    )
    assert load_tokenizer("x").decode(array("i", [7, 8]).tobytes()) == " 7 8"


def test_what_is_missing_is_named(monkeypatch, tmp_path, tokenizer_file):
    for package, name in (("tiktoken", "cl100k_base"), ("tokenizers", tokenizer_file), ("transformers", tmp_path)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"{package}.*(is not installed|pip install)"):
            load_tokenizer(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/file", "there is no file or folder 'no/such/file'"), ("x.json", "there is no file or folder 'x.json'")],
)
def test_a_tokenizer_that_is_not_there_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load_tokenizer(write(tmp_path / "t.json", [BODY]))


# Chats


def test_each_turn_of_the_assistant_is_a_request_that_begins_with_the_one_before():
    first, second = chats({"messages": [ASK, ANSWER, {"role": "user", "content": "Good."}, ANSWER]})
    assert shown(first.prompt) == [("user", "How are you?"), ("assistant", "")]
    assert BUILT_IN.decode(first.answer) == "Well."
    assert second.prompt.startswith(first.prompt + first.answer)
    assert shown(second.prompt)[2:] == [("user", "Good."), ("assistant", "")]


def test_sharegpt_names_its_roles_and_fields_otherwise():
    (chat,) = chats({"system": "Be kind.", **SHAREGPT})
    assert shown(chat.prompt) == [("system", "Be kind."), ("user", "Hi"), ("assistant", "")]
    assert BUILT_IN.decode(chat.answer) == "Hello!"


def test_a_request_body_is_one_request():
    for record in (BODY, {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}):
        (chat,) = chats(record)
        assert shown(chat.prompt) == [("system", "Be kind."), ("user", "How are you?"), ("assistant", "")]
        assert chat.answer == b""
    history = [ASK, ANSWER, ASK]
    assert len(chats({"model": "m", "messages": [*history, ANSWER]})) == 1
    assert len(chats({"messages": [ASK]}, {"messages": [*history]})) == 2, "the first shows what they are"


def test_the_answer_beside_a_request_is_read():
    for response in (
        {"choices": [{"message": ANSWER}]},
        {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    ):
        (chat,) = chats({"request": BODY, "response": response})
        assert BUILT_IN.decode(chat.answer) == "Well."
    (chat,) = chats({"request": BODY, "response": {"error": "none"}})
    assert chat.answer == b""


def test_an_answer_that_is_to_be_continued_is_part_of_the_prompt():
    (chat,) = chats({"model": "m", "messages": [ASK, {"role": "assistant", "content": "I am"}]})
    assert shown(chat.prompt) == [("user", "How are you?"), ("assistant", "I am")]
    (longer,) = chats({"model": "m", "messages": [ASK, {"role": "assistant", "content": "I am well"}]})
    assert longer.prompt.startswith(chat.prompt)


def test_tools_come_first_as_they_are_written():
    (chat,) = chats({"model": "m", "messages": [ASK], "tools": TOOLS[:2]})
    assert shown(chat.prompt)[:2] == [("tools", json.dumps(tool)) for tool in TOOLS[:2]]
    assert shown(chats({**SHAREGPT, "tools": "[1, 2]"})[0].prompt)[0] == ("tools", "[1, 2]")


def test_what_an_assistant_message_holds_is_in_its_part():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    (chat,) = chats({"model": "m", "messages": [ASK, message, {"role": "tool", "content": "x", "tool_call_id": "1"}]})
    assert shown(chat.prompt)[1:] == [
        ("assistant", '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'),
        ("tool", "x"),
        ("assistant", ""),
    ]


def test_an_image_counts_as_which_one_it_is():
    def prompt(url):
        image = {"type": "image_url", "image_url": {"url": url}}
        return chats(
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "See: "}, image]}]}
        )

    assert shown(prompt("data:a")[0].prompt)[0][1].startswith("See: [image_url ")
    assert prompt("data:a") == prompt("data:a") != prompt("data:b")


def test_what_else_stands_beside_a_stored_conversation_means_nothing(tmp_path):
    chat = {"messages": [ASK, ANSWER]}
    records = [{**chat, "timestamp": "yesterday", "model_name": "x"}, {**chat, "timestamp": -1}, chat]
    assert len(read_trace(write(tmp_path / "t", records)).requests) == 3


def test_deep_json_is_read_or_refused_in_one_line(tmp_path):
    for depth in (100, 800, 990, 5000):
        tools = "[" * depth + "]" * depth
        (tmp_path / "t").write_text(f'{{"model": "m", "messages": [{json.dumps(ASK)}], "tools": {tools}}}\n')
        try:
            assert len(read_trace(tmp_path / "t").requests) == 1
        except TraceError as error:
            assert "nested too deeply" in str(error)


def test_models_and_salts_share_nothing(tmp_path):
    records = [BODY, {**BODY, "model": "n"}, {**BODY, "cache_salt": "s"}, BODY]
    trace = read_trace(write(tmp_path / "t", records), block_size=4)
    assert len({request.namespace for request in trace.requests}) == 3
    assert replay(trace, None).hit_tokens == 8
    assert trace.num_blocks == 3 * 3


BAD = {
    "no message": ({"messages": []}, r"messages: must be a list of at least one message, got \[\]"),
    "no list": ({"messages": "x"}, "messages: must be a list of at least one message, got 'x'"),
    "no messages": ({"body": {"input": "x"}}, "body.messages: missing"),
    "message": ({"messages": [ASK, 7]}, r"messages\[1\]: must be an object, got 7"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\].role: missing"),
    "role": (
        {"body": {"messages": [{"role": "boss"}]}},
        r"body.messages\[0\].role: must be one of system, .*, got 'boss'",
    ),
    "from": ({"conversations": [{"from": 3, "value": ""}]}, r"conversations\[0\].from: must be one of .*, got 3"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: must be text, .*, got 5"),
    "part": (
        {"messages": [{"role": "user", "content": [5]}]},
        r"messages\[0\].content\[0\]: must be text or an object",
    ),
    "calls": (
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        r"messages\[0\].tool_calls: must be a list, got 5",
    ),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\].function.name: missing"),
    "tools": ({**BODY, "tools": 5}, "tools: must be a list, got 5"),
    "model": ({**BODY, "model": 5}, "model: must be text, got 5"),
    "no answer": ({"messages": [ANSWER]}, "messages: has no turn of the assistant behind another message"),
    "timestamp": ({**BODY, "timestamp": "now"}, "timestamp: must be a number"),
}


@pytest.mark.parametrize(("record", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_with_its_field(tmp_path, record, message):
    path = write(tmp_path / "t", [record])
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:1: ")


def test_a_bad_line_can_be_skipped(tmp_path):
    path = write(tmp_path / "t", [BODY, {"model": "m", "messages": []}, BODY])
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.skipped.num_lines, trace.skipped.reasons[0].line) == (2, 1, 2)


# Files


def tokens_of(trace):
    assert isinstance(trace, TokenTrace)
    return [(request.tokens, request.output_tokens) for request in trace.requests]


def test_boms_crlf_gzip_and_blank_lines_change_nothing(tmp_path):
    records = bodies(library_chats(2), answers=True)
    plain = write(tmp_path / "t", records).read_bytes()
    expected = tokens_of(read_trace(tmp_path / "t"))
    for data in (
        b"\xef\xbb\xbf" + plain,
        plain.replace(b"\n", b"\r\n"),
        gzip.compress(plain),
        plain.replace(b"\n", b"\n\n"),
    ):
        (tmp_path / "t").write_bytes(data)
        assert tokens_of(read_trace(tmp_path / "t")) == expected


def test_a_file_may_be_one_json_array(tmp_path):
    records = [{"messages": [ASK, {"role": "assistant", "content": f"é {i} \ud800"}]} for i in range(5)]
    expected = sorted(tokens_of(read_trace(write(tmp_path / "lines", records), concurrency=1)))
    for indent in (None, 2):
        path = tmp_path / "array"
        path.write_text(json.dumps(records, indent=indent, ensure_ascii=True))
        assert sorted(tokens_of(read_trace(path, concurrency=1))) == expected


def test_a_bad_item_of_an_array_is_named_with_its_line(tmp_path):
    (tmp_path / "t").write_text(f"[\n{json.dumps(BODY)},\n\n{{}}\n]")
    with pytest.raises(TraceError, match=r"t:4: messages: missing"):
        read_trace(tmp_path / "t")


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=40) | st.lists(st.booleans()))),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
)
def test_items_of_an_array_come_one_by_one(items, indent, ascii_only):
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(7)

    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    for stream in (io.BytesIO(text), Slow(text)):
        found = list(array_items(stream))
        assert [json.loads(item.decode("utf-8", "surrogatepass")) for _, item in found] == items
        for number, item in found:
            assert item.split(b"\n")[0] in text.split(b"\n")[number - 1]


@pytest.mark.parametrize(
    ("text", "line", "item"),
    [
        ("[", 1, "]"),
        ('[{"a": 1}', 1, "]"),
        ('[{"a": 1},\n', 2, "]"),
        ('[{"a": 1}\n {}]', 2, "{}]"),
        ('[{"a": 1}, {"b": ', 1, '{"b": '),
        ("[nul]" + " " * 20, 1, "nul]" + " " * 20),
        ('[{"a": 1}]\n{}', 2, "{}"),
    ],
)
def test_what_is_no_array_any_more_comes_last(text, line, item):
    assert list(array_items(io.BytesIO(text.encode())))[-1] == (line, item.encode())


def test_several_files_are_merged_by_time(tmp_path):
    times = ((0, 300), (100, 200))
    paths = [
        write(tmp_path / f"{number}", [{**BODY, "model": str(time), "timestamp": time} for time in times[number]])
        for number in (0, 1)
    ]
    trace = read_trace(*paths)
    assert [request.namespace for request in trace.requests] == [
        json.dumps([str(time), None]) for time in (0, 100, 200, 300)
    ]
    assert [request.time for request in read_trace(*paths, limit=3).requests] == [0, 0.1, 0.2]


def test_stdin_is_read(tmp_path):
    path = write(tmp_path / "t", [BODY, BODY])
    code = "from radixkv.trace import read_trace; trace = read_trace('-'); print(trace.name, len(trace.requests))"
    with open(path) as file:
        shown = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True, check=True)
    assert shown.stdout == "stdin 2\n"


def test_chats_without_times_go_on_side_by_side(tmp_path):
    path = write(tmp_path / "t", [{"messages": chat} for chat in library_chats(12)])

    def order(**options):
        return [request.tokens for request in read_trace(path, **options).requests]

    assert order() == order(seed=0) != order(seed=1)
    alone = read_trace(path, concurrency=1)
    assert sorted(order()) == sorted(request.tokens for request in alone.requests)
    starts = [request.num_prompt_tokens < 250 for request in alone.requests]
    assert [starts[at] for at in range(0, 84, 7)] == [True] * 12, "one after the other, each from its beginning"
    gaps = [later.time - sooner.time for sooner, later in zip(alone.requests, alone.requests[1:], strict=False)]
    assert gaps == pytest.approx([30.0] * 83)


def test_lone_surrogates_and_long_prompts_are_read(tmp_path):
    text = "odd \ud800 " + "word " * 100_000
    path = write(tmp_path / "t", [{"model": "m", "messages": [{"role": "user", "content": text}]}] * 2)
    trace = read_trace(path)
    assert trace.requests[0].num_prompt_tokens > 100_000
    assert shown(trace.requests[1].tokens, trace.tokenizer)[0] == ("user", text)
    assert replay(trace, None).token_hit_rate > 0.49


def test_memory_is_that_of_distinct_prefixes(tmp_path):
    path = write(tmp_path / "t", [{"model": "m", "messages": [{"role": "user", "content": "word " * 2000}]}] * 2000)
    tracemalloc.start()
    trace = read_trace(path)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(trace.requests) * trace.requests[0].num_prompt_tokens > 4_000_000
    assert used < 500_000


requests_of_tokens = st.builds(
    TokenRequest,
    st.integers(0, 3).map(float),
    st.integers(1, 200).flatmap(lambda num: st.sampled_from([b"\1\0\0\0", b"\2\0\0\0"]).map(lambda token: token * num)),
    st.sampled_from([b"", b"\1\0\0\0" * 3]),
    st.sampled_from([None, "a", 1]),
)


@given(st.lists(requests_of_tokens), st.integers(0, 5))
def test_stored_requests_are_a_list_of_requests(requests, num):
    stored = TokenRequests()
    for request in requests:
        stored.add(request.time, request.tokens, request.output_tokens, request.namespace)
    assert list(stored) == requests
    assert [stored[index] for index in range(len(requests))] == requests == stored[:]
    stored.sort()
    assert list(stored) == sorted(requests, key=lambda request: request.time)
    stored.truncate(num)
    assert len(stored) == min(num, len(requests))
    assert stored.num_distinct_tokens <= sum(request.num_prompt_tokens + 3 for request in requests)


@needs_traces
@pytest.mark.parametrize(
    ("name", "num_requests"), [("taubench_gpt4o_airline", 2454), ("mtbench101", 4208), ("sweagent_demos", 230)]
)
def test_the_public_chats_are_read(name, num_requests):
    trace = read_trace(os.fspath(TRACES / f"{name}.jsonl.gz"))
    assert len(trace.requests) == num_requests
    assert replay(trace, None).token_hit_rate > 0.75
