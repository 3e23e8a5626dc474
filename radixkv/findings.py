"""What hides a cached prefix, and what to do about it: requests of one family, compared. Knows nothing of caches."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from radixkv.prompts import TokenRequest
from radixkv.repeats import MIN_RUN, Ids, Repeat, common_length
from radixkv.text_trace import Part, parts_of
from radixkv.tokenizer import Tokenizer
from radixkv.tokens import TOKEN_BYTES
from radixkv.volatile import (
    VOLATILE,
    Change,
    canonical,
    common_prefix,
    json_change,
    text_change,
    volatile_change,
    without_thinking,
)

ADVICE = {
    "uuid": "Move the id behind the stable part, into the newest message, or leave it out of the prompt.",
    "timestamp": "Move the time behind the stable part, into the newest message, or round it to change seldom.",
    "counter": "Move the number behind the stable part, into the newest message.",
    "tool_order": "Send the tools in one fixed order, sorted by name.",
    "json_key_order": "Write JSON with sorted keys, or send the text again exactly as it was sent first.",
    "system_prompt": "Keep one system prompt for a whole session, and put what changes into the newest message.",
    "thinking": "Keep the thinking in the history as it was generated, or strip it before the next turn, never later.",
    "retokenised": "Keep the token ids of each answer and append to them; do not make them anew from text.",
    "history_trim": "Trim seldom and much at once, behind a beginning that stays, not a little on every request.",
    "other": "Send the history again exactly as it was sent first, and put what changes at the end.",
}

_PLACES = {
    "tools": "tool definitions",
    "system": "system prompt",
    "user": "user's message",
    "history": "history",  # what was said but for the users' messages
    "": "prompt",  # whose parts are not known
}
_LEADING = ("tools", "system")  # what comes before a chat
_OF_WORDS = ("system_prompt", "other")  # kinds of no pattern
_OF_AN_ANSWER = ("thinking", "retokenised", "history_trim")  # kinds that show that what was said is the same
_MIN_REQUESTS = 3  # of a finding, unless it costs much
_MIN_SHARE = 0.001  # of all prompt tokens
_MUCH = 0.01
_MIN_VALUES = 3  # of a counter
_MIN_VARIANTS = 5  # of a system prompt that differs between chats
_CANDIDATES = 8  # earlier requests that one is compared with
_BEFORE = 24  # characters shown before a difference
_MAX_SHOWN = 64  # different ones that are kept
_NEAR = 8  # tokens
_SHORT = 64  # characters
_MIN_CUT = 32  # characters
_MIN_REST = 64  # tokens of a user's own message behind what changes in it


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of change at one kind of place, over all requests that it costs."""

    kind: str
    requests: int
    lost_tokens: int
    where: str
    advice: str
    examples: tuple[str, ...]  # what stands there, in some of the requests
    place: str  # tools, system, user or history; "" in a prompt whose parts are not known
    before: str  # the words in front of it, in most of the requests


@dataclass(slots=True)
class _Family:
    """Requests that broke at one kind of place, by one kind of change, behind the same words."""

    requests: int = 0
    lost_tokens: int = 0
    first: int = 1 << 62  # position, in tokens
    last: int = 0
    before: dict[str, int] = field(default_factory=dict)  # text before the difference -> requests
    values: dict[str, None] = field(default_factory=dict)

    def add(self, other: "_Family") -> None:
        self.requests += other.requests
        self.lost_tokens += other.lost_tokens
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        for before, num_requests in other.before.items():
            if before in self.before or len(self.before) < _MAX_SHOWN:
                self.before[before] = self.before.get(before, 0) + num_requests
        if len(self.values) < _MAX_SHOWN:
            self.values.update(other.values)


class _Sequence:
    """The tokens of a request, prompt and answer, and what they say."""

    def __init__(self, request: TokenRequest, is_text: bool) -> None:
        self.packed = request.tokens + request.output_tokens
        self._is_text = is_text
        self.tokens: Ids = np.frombuffer(self.packed, "<i4")
        self.num_prompt_tokens = request.num_prompt_tokens
        self.namespace = request.namespace

    @cached_property
    def parts(self) -> list[Part]:
        return (parts_of(self.packed) if self._is_text else []) or [Part("", 0, len(self.tokens))]

    @cached_property
    def messages(self) -> list[tuple[str, bytes]]:
        """Of each part, whose it is and its packed tokens."""
        return [(part.role, self.run(part)) for part in self.parts]

    @cached_property
    def known(self) -> frozenset[tuple[str, bytes]]:
        return frozenset(self.messages)

    def run(self, place: Part | Repeat) -> bytes:
        """The packed tokens of a part, or of a repeat."""
        return self.packed[place.start * TOKEN_BYTES : place.end * TOKEN_BYTES]

    def part_at(self, position: int) -> int:
        """The index of the part that a token belongs to, a part's marks being its own."""
        starts = [part.start for part in self.parts]
        return max(0, int(np.searchsorted(starts, position + 1, "right")) - 1)


@dataclass(frozen=True, slots=True)
class _Break:
    """Why a request does not go on as an earlier one: a change in its part `index`."""

    kind: str
    place: str  # one of _PLACES
    index: int
    position: int  # tokens that both begin with
    before: str
    ours: str
    theirs: str


class Findings:
    """The breaks of a trace, told request by request, in order.

    A request is compared with the earlier one that has most of what it repeats. Different people's chats repeat one
    another too, so a change counts only where it is of a kind that hides what would be shared (an id in the system
    prompt), or where what was said since shows that the same chat goes on.
    """

    def __init__(self, request: Callable[[int], TokenRequest], tokenizer: Tokenizer | None) -> None:
        """`request` gives a request by its number; without a `tokenizer` no words can be shown or recognised."""
        self._sequence = lru_cache(maxsize=64)(lambda number: _Sequence(request(number), tokenizer is not None))
        self._tokenizer = tokenizer
        # (place, words before) -> (kind, whether the same chat goes on) -> the requests
        self._slots: dict[tuple[str, str], dict[tuple[str, bool], _Family]] = {}

    def tokens(self, number: int) -> Ids:
        """Prompt and answer of a request."""
        return self._sequence(number).tokens

    def examine(self, number: int, *, hit: int, repeats: list[Repeat], goes_on: bool) -> None:
        """A request whose longest known prefix has `hit` tokens, with repeats behind it.

        `goes_on`: that prefix holds a whole earlier prompt, so the request goes on from one as it should.
        """
        ours = self._sequence(number)
        theirs = self._relative(ours, repeats)
        if theirs is None:
            return
        position = common_length(ours.tokens, theirs.tokens)
        if position == len(theirs.tokens):
            return  # what repeats is in its own past: nothing hides it
        found = self._compare(ours, theirs, position, repeats)
        lost = sum(map(len, repeats))
        in_session = _in_session(ours, theirs, found, hit)
        if not _counts(found, ours, hit, repeats, in_session, goes_on):
            return
        one = _Family(1, lost, position, position, {found.before: 1}, dict.fromkeys((found.theirs, found.ours)))
        slot = found.place, found.before if found.place in _LEADING else ""
        self._slots.setdefault(slot, {}).setdefault((found.kind, in_session), _Family()).add(one)

    def result(self, num_prompt_tokens: int) -> list[Finding]:
        """What is worth telling, the costliest first."""
        merged: dict[tuple[str, str], _Family] = {}
        for (place, _), families in self._slots.items():
            for kind, family in _settled(place, families):
                merged.setdefault((kind, "history" if kind == "history_trim" and place else place), _Family()).add(
                    family
                )
        found = []
        for (kind, place), family in merged.items():
            few = family.requests < _MIN_REQUESTS
            if few and kind == "other":
                continue  # two people's chats that began differently, maybe
            least = _MUCH if few or kind == "other" else _MIN_SHARE
            if family.lost_tokens >= least * num_prompt_tokens:
                found.append(_finding(kind, place, family))
        return sorted(found, key=lambda finding: -finding.lost_tokens)

    def _relative(self, ours: _Sequence, repeats: list[Repeat]) -> _Sequence | None:
        """The earlier request that has most of what this one repeats; of equals the one that begins most alike."""
        weights: dict[int, int] = {}
        for repeat in repeats:
            weights[repeat.sequence] = weights.get(repeat.sequence, 0) + len(repeat)
        best, best_score = None, (0, -1, 0)
        for number in sorted(weights, key=lambda number: (-weights[number], -number))[:_CANDIDATES]:
            theirs = self._sequence(number)
            if theirs.namespace != ours.namespace:
                continue
            repeated = sum(len(run) for run in map(ours.run, repeats) if run in theirs.packed)
            if (score := (repeated, common_length(ours.tokens, theirs.tokens), number)) > best_score:
                best, best_score = theirs, score
        return best

    def _compare(self, ours: _Sequence, theirs: _Sequence, position: int, repeats: list[Repeat]) -> _Break:
        if not ours.parts[0].role:
            return self._compare_tokens(ours, theirs, position, repeats[0])
        index = ours.part_at(position)
        our_text, their_text = self._text(ours, index), self._text(theirs, index)
        our_role, their_role = (sequence.parts[index].role for sequence in (ours, theirs))
        place = next((role for role in (*_LEADING, "user") if role in (our_role, their_role)), "history")
        if place == "tools":
            kind, change = self._compare_tools(ours, theirs, our_text, their_text)
        else:
            kind, change = self._compare_messages(ours, theirs, index, our_text, their_text)
        before = our_text[max(0, change.start - _BEFORE) : change.start]
        return _Break(kind, place, index, position, _one_line(before), _one_line(change.ours), _one_line(change.theirs))

    def _compare_tools(self, ours: _Sequence, theirs: _Sequence, our_text: str, their_text: str) -> tuple[str, Change]:
        our_tools, their_tools = ([_tool(text) for text in self._tools(side)] for side in (ours, theirs))
        if our_tools != their_tools and sorted(our_tools) == sorted(their_tools):
            names = [", ".join(name for name, _ in tools) for tools in (our_tools, their_tools)]
            return "tool_order", Change("tool_order", 0, *names)
        change = json_change(our_text, their_text) or volatile_change(our_text, their_text)
        change = change or text_change(our_text, their_text)
        return change.kind or "other", change

    def _compare_messages(
        self, ours: _Sequence, theirs: _Sequence, index: int, our_text: str, their_text: str
    ) -> tuple[str, Change]:
        our_role, their_role = (sequence.parts[index].role for sequence in (ours, theirs))
        plain = text_change(our_text, their_text)
        if _was_trimmed(ours, theirs, index):
            return "history_trim", plain
        if our_role != their_role:
            return ("system_prompt" if "system" in (our_role, their_role) else "other"), plain
        if our_text == their_text:
            return "retokenised", plain
        our_rest, their_rest = without_thinking(our_text), without_thinking(their_text)
        if our_rest.strip() == their_rest.strip() and (our_rest, their_rest) != (our_text, their_text):
            return "thinking", plain
        if our_role == "assistant" and our_text.split() == their_text.split():
            return "retokenised", plain
        if change := json_change(our_text, their_text) or volatile_change(our_text, their_text):
            return change.kind, change
        if our_role == "system":
            return "system_prompt", plain
        return ("history_trim" if _was_cut(ours, theirs, index, our_text, their_text) else "other"), plain

    def _compare_tokens(self, ours: _Sequence, theirs: _Sequence, position: int, repeat: Repeat) -> _Break:
        """Of prompts whose parts are not known."""
        start = max(0, position - _BEFORE)
        our_gap, their_gap = ours.tokens[position : repeat.start], theirs.tokens[position : repeat.offset]
        if self._tokenizer is None:
            our_text, their_text = ("".join(f" {token}" for token in gap[:8].tolist()) for gap in (our_gap, their_gap))
            change = Change("", 0, our_text, their_text)
            same_text = max(len(our_gap), len(their_gap)) <= MIN_RUN
        else:
            before = self._tokenizer.decode(ours.tokens[start:position].tobytes())
            our_text, their_text = (
                before + self._tokenizer.decode(side.tokens[position : position + MIN_RUN].tobytes())
                for side in (ours, theirs)
            )
            change = volatile_change(our_text, their_text) or text_change(our_text, their_text)
            gaps = [self._tokenizer.decode(gap.tobytes()).split() for gap in (our_gap, their_gap)]
            same_text = gaps[0] == gaps[1]
        kind = change.kind or "other"
        if position >= theirs.num_prompt_tokens and same_text:
            kind = "retokenised"
        elif not change.kind and len(our_gap) < MIN_RUN <= len(their_gap) - len(our_gap):
            kind = "history_trim"
        before = our_text[max(0, change.start - _BEFORE) : change.start]
        return _Break(kind, "", 0, position, _one_line(before), _one_line(change.ours), _one_line(change.theirs))

    def _text(self, sequence: _Sequence, index: int) -> str:
        assert self._tokenizer is not None, "parts are made of text"
        return self._tokenizer.decode(sequence.messages[index][1])

    def _tools(self, sequence: _Sequence) -> list[str]:
        return [self._text(sequence, index) for index, part in enumerate(sequence.parts) if part.role == "tools"]


def _in_session(ours: _Sequence, theirs: _Sequence, found: _Break, hit: int) -> bool:
    """Whether what was said since the change shows that both are of one chat.

    Behind a change in the tools or the system prompt ours must go on with what theirs said, but for its last message;
    behind one in the history, where they have more in common, an answer is enough.
    """
    if found.place not in _LEADING:
        since = zip(ours.parts[found.index :], ours.messages[found.index :], strict=True)
        return any(
            part.start > hit and message[1] and message in theirs.known
            for part, message in since
            if part.role == "assistant"
        )
    our_chat, their_chat = (
        [message for message in side.messages if message[1] and message[0] not in _LEADING] for side in (ours, theirs)
    )
    same = 0
    while same < min(len(our_chat), len(their_chat)) and our_chat[same] == their_chat[same]:
        same += 1
    said = {role for role, _ in our_chat[:same]}
    return len(their_chat) - 1 <= same < len(our_chat) and {"user", "assistant"} <= said


def _counts(found: _Break, ours: _Sequence, hit: int, repeats: list[Repeat], in_session: bool, goes_on: bool) -> bool:
    """Whether a change is one that somebody can do something about."""
    if not found.place:  # nothing else is known than where the prompts part
        near = hit - found.position < _NEAR
        return near and (found.kind == "retokenised" or 2 * sum(map(len, repeats)) >= ours.num_prompt_tokens - hit)
    if found.place in _LEADING:
        if found.kind in ("tool_order", "json_key_order"):
            return True
        return in_session or (not goes_on and (found.kind in VOLATILE or found.kind == "system_prompt"))
    if found.kind == "json_key_order" and found.place == "history":
        return True
    if ours.part_at(hit) != found.index:
        return False  # something else goes on from here
    if found.kind in _OF_AN_ANSWER and found.place == "history":
        return True
    rest = sum(len(repeat) for repeat in repeats if repeat.end <= ours.parts[found.index].end)
    return in_session or (found.kind in VOLATILE and not goes_on and rest >= _MIN_REST)


def _was_trimmed(ours: _Sequence, theirs: _Sequence, index: int) -> bool:
    """Whether later messages of theirs follow here at once, or behind a summary of a message or two."""
    for kept in range(index, min(index + 3, len(ours.messages), len(theirs.messages))):
        message = ours.messages[kept]
        if message == theirs.messages[kept]:
            return False
        if message[1] and message in theirs.messages[kept + 1 :]:
            return True
    return False


def _was_cut(ours: _Sequence, theirs: _Sequence, index: int, our_text: str, their_text: str) -> bool:
    """Whether a message lost its middle or its end, or gave way to a few words."""
    if ours.parts[index].role == "tool" and len(our_text) <= _SHORT:
        return True  # a tool's answer does not change by itself
    same = common_prefix(our_text, their_text)
    same += common_prefix(our_text[same:][::-1], their_text[same:][::-1])
    instead, cut = len(our_text) - same, len(their_text) - same
    if instead <= _BEFORE and cut >= instead + _MIN_CUT:
        return True
    following = slice(index + 1, index + 2)
    return 4 * len(our_text) < len(their_text) and ours.messages[following] == theirs.messages[following] != []


def _tool(text: str) -> tuple[str, str]:
    """Its name, and its definition in one way of writing it."""
    try:
        tool = json.loads(text)
        function = tool.get("function", tool)
        return str(function.get("name", "?")), canonical(tool)
    except (ValueError, AttributeError, RecursionError):
        return text[:_BEFORE], text


def _settled(place: str, families: dict[tuple[str, bool], _Family]) -> Iterator[tuple[str, _Family]]:
    """The families of one slot under the kind that most of them have: what stands there is one thing."""
    volatile = dict.fromkeys(VOLATILE, 0)
    for (kind, _), family in families.items():
        if kind in volatile and place in _LEADING:
            volatile[kind] += family.requests
    usual = max(VOLATILE, key=lambda kind: volatile[kind])
    whole = _Family()
    for (kind, _), family in families.items():
        if volatile[usual] and kind in (*VOLATILE, *_OF_WORDS):
            whole.add(family)
    if volatile[usual] and (usual != "counter" or len(whole.values) >= _MIN_VALUES):
        yield usual, whole
        families = {key: family for key, family in families.items() if key[0] not in (*VOLATILE, *_OF_WORDS)}
    for (kind, in_session), family in families.items():
        if kind == "counter" and (place in _LEADING or len(family.values) < _MIN_VALUES):
            kind = "system_prompt" if place == "system" else "other"
        # Chats may have system prompts of their own; where one is made from a template, there are many.
        if in_session or kind not in _OF_WORDS or len(family.values) >= _MIN_VARIANTS:
            yield kind, family


def _finding(kind: str, place: str, family: _Family) -> Finding:
    where = f"{_PLACES[place]}, token {family.first:,}" + (f" to {family.last:,}" if family.last > family.first else "")
    before, num_requests = max(family.before.items(), key=lambda item: item[1])
    if 2 * num_requests < family.requests:
        before = ""
    if before:
        where += f", behind {before!r}"
    examples = tuple(value for value in family.values if value)[:3]
    return Finding(kind, family.requests, family.lost_tokens, where, ADVICE[kind], examples, place, before)


def _one_line(text: str) -> str:
    return " ".join(text.split())
