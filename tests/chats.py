"""Chats, and the faults that people plant in them unawares: what the tests of text traces share."""

import copy
import gzip
import json
import random
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")

Messages = list[dict[str, Any]]

SYSTEM = (
    "You help the readers of a town library. Look up books, loans and fines with the tools before you answer, and "
    "never guess a date or a price. Readers may borrow twelve books for four weeks each and renew a loan twice, unless "
    "somebody else waits for the book. A fine is twenty cents a day; fines above ten euros block the card until they "
    "are paid at the desk. Rooms for groups can be booked for two hours a day. Films and games are lent for one week "
    "and cannot be renewed. Be friendly and short, ask for what is missing, and pass on to the desk whatever you are "
    "not allowed to do."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{text} Returns a JSON object, or an error message where nothing is found.",
            "parameters": {
                "type": "object",
                "properties": {
                    "card": {"type": "string", "description": "The number on the reader's card, such as 'K-4711'."},
                    "title": {"type": "string", "description": "A title, or the beginning of one."},
                },
                "required": ["card"],
            },
        },
    }
    for name, text in (
        ("find_book", "Look for a book in the catalogue and say which branches have it."),
        ("list_loans", "List what a reader has borrowed, and until when."),
        ("renew_loan", "Renew one loan of a reader by four weeks."),
        ("book_room", "Reserve a room for a group of readers."),
        ("ask_the_desk", "Pass the conversation on to somebody at the desk."),
    )
]
_BOOKS = (
    "The Dispossessed",
    "Middlemarch",
    "Moby-Dick",
    "Solaris",
    "Beloved",
    "Dune",
    "Emma",
    "Ulysses",
    "Momo",
    "Ivanhoe",
)
_NAMES = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hanna", "Ines", "Jonas", "Kemal", "Lena")
_TURNS = (
    (
        "Hello, this is {name}. I would like to know whether you have {book}, and at which branch I could pick it up.",
        "Hello {name}! Give me a moment to look for {book}. Could you tell me the number on your card, so that I can "
        "reserve a copy for you right away if there is one?",
    ),
    (
        "My card is {card}. If {book} is out, then put me on the list, and tell me how many are in front of me.",
        "Thank you. There is one copy of {book} at the branch by the river, it came back to shelf {shelf} today. "
        "I have reserved it under {card}; it waits there for three days.",
    ),
    (
        "Great. And when do I have to bring back what I have at home? I believe that one of them must be due soon.",
        "You have {count} books at home, {name}. The first is due in {days} days, the others have two weeks. Shall "
        "I renew the first one? Nobody else waits for it, so that would give you four weeks more.",
    ),
    (
        "Yes, please renew it. Also I want to meet with {count} people on shelf planning, is there a room for us?",
        "I have renewed it. A room for {count} people is free in the branch by the river from {days} o'clock on, for "
        "two hours. Please leave it as you found it, and bring your card {card} for the key.",
    ),
    (
        "Take that room. One more thing: somebody told me that I have a fine, is that so?",
        "The room is yours. As for the fine, {name}, I see one of {days} times twenty cents for a film that was late. "
        "Your card works as before; you can pay at the desk whenever you come by.",
    ),
    (
        "Good, I will pay then. Thank you for your help, goodbye!",
        "You are welcome, {name}. Enjoy {book}, and see you at the library!",
    ),
)


def library_chats(num: int = 12, seed: int = 0) -> list[Messages]:
    """Chats that share a system prompt, with a call of a tool in the second turn."""
    rng = random.Random(seed)
    chats = []
    for number in range(num):
        words = {
            "name": _NAMES[number % len(_NAMES)],
            "book": rng.choice(_BOOKS),
            "card": f"K-{rng.randrange(1000, 9999)}",
            "shelf": f"{rng.choice('ABCDEF')}{rng.randrange(10, 99)}",
            "count": rng.randrange(3, 9),
            "days": rng.randrange(2, 12),
        }
        chat: Messages = [{"role": "system", "content": SYSTEM}]
        for turn, (question, answer) in enumerate(_TURNS):
            chat.append({"role": "user", "content": question.format(**words)})
            if turn == 1:
                arguments = json.dumps({"title": words["book"], "card": words["card"], "branch": "river"})
                call = {"id": "1", "type": "function", "function": {"name": "find_book", "arguments": arguments}}
                chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
                found = {"copies": [{"branch": "river", "shelf": words["shelf"], "seen": words["days"]}], "waiting": 0}
                chat.append({"role": "tool", "content": json.dumps(found), "tool_call_id": "1"})
            chat.append({"role": "assistant", "content": answer.format(**words)})
        chats.append(chat)
    return chats


def public_chats(name: str, num: int, *, least: int = 0) -> list[Messages]:
    """The first chats of a public trace that have at least so many messages."""
    chats = []
    with gzip.open(TRACES / f"{name}.jsonl.gz") as file:
        for line in file:
            messages = json.loads(line)["messages"]
            if len(messages) >= least:
                chats.append(messages)
            if len(chats) == num:
                break
    return chats


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def bodies(
    chats: list[Messages], fault: "Fault | None" = None, *, answers: bool = False, tools: bool = False, seed: int = 0
) -> list[dict[str, Any]]:
    """What a client sends: each turn of each chat as a request body, the chats going on side by side."""
    rng = random.Random(seed)
    waiting = [list(_turns(chat, number)) for number, chat in enumerate(chats)]
    live: list[Any] = []
    records = []
    while waiting or live:
        while waiting and len(live) < 6:
            live.append(waiting.pop(0))
        turns = rng.choice([turns for turns in live if turns] or [[None]])
        live = [turns for turns in live if turns]
        if turns[0] is None:
            continue
        chat, turn, history, answer = turns.pop(0)
        body: dict[str, Any] = {"model": "m", "messages": copy.deepcopy(history)}
        if tools:
            body["tools"] = copy.deepcopy(TOOLS)
        if fault is not None:
            fault(body, chat, turn, len(records), rng)
        response = {"choices": [{"message": copy.deepcopy(answer)}]}
        records.append({"request": body, "response": response} if answers else {"body": body})
    return records


def _turns(messages: Messages, chat: int) -> Iterator[tuple[int, int, Messages, dict[str, Any]]]:
    turn = 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            yield chat, turn, messages[:index], message
            turn += 1


# Faults: (body, chat, turn, number of the request, rng) -> None

Fault = Callable[[dict[str, Any], int, int, int, random.Random], None]
_START = datetime(2024, 5, 14, 9)
_THOUGHT = (
    "They asked for something, and I must look before I answer. I go through it step by step, and then I answer. "
)


def _system(body: dict[str, Any]) -> dict[str, Any]:
    messages = body["messages"]
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": SYSTEM})
    return messages[0]


def at_the_top(text: Callable[[int, int, int, random.Random], str]) -> Fault:
    def fault(body: dict[str, Any], *where: Any) -> None:
        system = _system(body)
        system["content"] = text(*where) + system["content"]

    return fault


def in_the_middle(text: Callable[[int, int, int, random.Random], str]) -> Fault:
    def fault(body: dict[str, Any], *where: Any) -> None:
        system = _system(body)
        content = system["content"]
        cut = content.find(". ", len(content) // 4) + 2
        system["content"] = content[:cut] + text(*where) + content[cut:]

    return fault


def in_the_first_message(text: Callable[[int, int, int, random.Random], str]) -> Fault:
    def fault(body: dict[str, Any], *where: Any) -> None:
        message = next(message for message in body["messages"] if message["role"] == "user")
        message["content"] = text(*where) + message["content"]

    return fault


def uuid4(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def now(request: int, seconds: int = 61) -> datetime:
    return _START + timedelta(seconds=seconds * request)


def shuffled_tools(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    rng.shuffle(body["tools"])


def tools_in_the_system_prompt(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    tools = [tool["function"] for tool in body.pop("tools")]
    rng.shuffle(tools)
    system = _system(body)
    system["content"] = f"Tools: {json.dumps(tools)}\n{system['content']}"


def shuffled_keys(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled_keys(inner, rng) for inner in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    rng.shuffle(keys)
    return {key: shuffled_keys(value[key], rng) for key in keys}


def shuffled_tool_keys(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    body["tools"] = shuffled_keys(body["tools"], rng)


def shuffled_argument_keys(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    for message in body["messages"]:
        for call in message.get("tool_calls") or []:
            written = call["function"]["arguments"]
            separators = (", ", ": ") if '": ' in written else (",", ":")
            arguments = shuffled_keys(json.loads(written), rng)
            call["function"]["arguments"] = json.dumps(arguments, separators=separators)


def changed_system_prompt(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    if turn >= 2:
        _system(body)["content"] = "Be brief from now on, the reader is in a hurry. " + _system(body)["content"]


def random_system_prompt(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    tone = rng.choice(("friendly", "formal and precise", "brief"))
    _system(body)["content"] = f"You are {tone}.\n{_system(body)['content']}"


def growing_notes(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    notes = [f"\n- the reader said something about {word}" for word in ("books", "cards", "rooms", "fines", "films")]
    _system(body)["content"] += "\nNotes so far:" + "".join(notes[:turn])


def thinking_in_the_last_answer(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    answers = [message for message in body["messages"] if message["role"] == "assistant"]
    for number, message in enumerate(answers):
        if message is answers[-1]:
            message["reasoning_content"] = _THOUGHT + str(number)


def sliding_window(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    head = body["messages"][0]["role"] == "system"
    body["messages"] = body["messages"][:head] + body["messages"][head:][-5:]


def summarised(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    head = body["messages"][0]["role"] == "system"
    if turn >= 4:
        summary = {
            "role": "user",
            "content": "What happened so far: some questions were asked and answered, see the notes.",
        }
        body["messages"] = [*body["messages"][:head], summary, *body["messages"][head:][-7:]]


def cleared_answers(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    for message in body["messages"][:-3]:
        if message["role"] == "tool":
            message["content"] = "[cleared]"


def respaced_answers(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    for message in body["messages"]:
        if message["role"] == "assistant" and message.get("content"):
            message["content"] = f"\n{message['content']}"


def rewritten_messages(body: dict[str, Any], chat: int, turn: int, request: int, rng: random.Random) -> None:
    message = next(message for message in body["messages"] if message["role"] == "user")
    message["content"] = rng.choice(("Dear all! ", "Good day! ", "To whom it may concern: ")) + message["content"]


FAULTS: dict[str, Fault] = {
    "uuid of the request": at_the_top(lambda chat, turn, request, rng: f"Request-ID: {uuid4(rng)}\n"),
    "uuid of the chat": at_the_top(lambda chat, turn, request, rng: f"Session {uuid4(random.Random(chat))}.\n"),
    "uuid in the middle": in_the_middle(lambda chat, turn, request, rng: f"(trace {uuid4(rng)}) "),
    "uuid, short": at_the_top(lambda chat, turn, request, rng: f"[req {uuid4(rng)[:8]}] "),
    "uuid in a message": in_the_first_message(lambda chat, turn, request, rng: f"[{uuid4(rng)}] "),
    "timestamp": at_the_top(lambda chat, turn, request, rng: f"Now: {now(request).isoformat()}Z\n"),
    "timestamp of the minute": at_the_top(
        lambda chat, turn, request, rng: f"Time: {now(request, 20):%Y-%m-%d %H:%M}\n"
    ),
    "timestamp in words": in_the_middle(
        lambda chat, turn, request, rng: f"Today is {now(request, 9999):%A, %B %d, %Y}. "
    ),
    "timestamp, clock": in_the_middle(lambda chat, turn, request, rng: f"It is {now(request):%I:%M %p}. "),
    "timestamp, epoch": at_the_top(lambda chat, turn, request, rng: f"ts={int(now(request).timestamp())} "),
    "timestamp in a message": in_the_first_message(
        lambda chat, turn, request, rng: f"({now(request):%d/%m/%Y %H:%M}) "
    ),
    "counter of requests": at_the_top(lambda chat, turn, request, rng: f"This is request number {request + 1}.\n"),
    "counter of turns": in_the_middle(lambda chat, turn, request, rng: f"There were {2 * turn + 1} messages so far. "),
    "tool_order": shuffled_tools,
    "tool_order in the system prompt": tools_in_the_system_prompt,
    "json_key_order of tools": shuffled_tool_keys,
    "json_key_order of calls": shuffled_argument_keys,
    "system_prompt changes": changed_system_prompt,
    "system_prompt at random": random_system_prompt,
    "system_prompt with notes": growing_notes,
    "thinking": thinking_in_the_last_answer,
    "history_trim": sliding_window,
    "history_trim with a summary": summarised,
    "history_trim of tools": cleared_answers,
    "retokenised": respaced_answers,
    "other": rewritten_messages,
}
