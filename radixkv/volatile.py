"""What kind of thing changes between two texts: an id, a time, a number, the order of keys. Knows nothing of tokens."""

import json
import re
from dataclasses import dataclass
from typing import Any

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b\.?)?(?:\s?(?:Z|UTC|GMT)\b|\s?[+-]\d{2}:?\d{2}\b)?"
_TIMES = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
    r"\d{1,2}[-/]\d{1,2}[-/](?:\d{4}|\d{2})\b",
    r"\d{1,2}\.\d{1,2}\.\d{4}",
    r"\d{4}年\d{1,2}月\d{1,2}日",
    rf"{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}}\b)?",
    rf"\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}(?:,?\s+\d{{4}}\b)?",
    rf"{_MONTH}\s+\d{{4}}\b",
    _DAY,
    r"\d{8}T\d{4,6}Z?",
    _CLOCK,
)
_TIME = re.compile(rf"(?<![A-Za-z0-9_.-])(?:(?:{'|'.join(_TIMES)})(?:[Tt]|,?\s+(?:at\s+)?)?)+", re.IGNORECASE)
_EPOCH = re.compile(r"(?<![A-Za-z0-9_.])1\d{9}(?:\d{3}|\.\d+)?(?![A-Za-z0-9_])")
_UUID = re.compile(r"(?<![0-9a-z])[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}(?![0-9a-z])", re.IGNORECASE)
_ID = re.compile(r"[0-9A-Za-z]{8,}")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_PATTERNS = (
    ("uuid", _UUID),
    ("timestamp", _TIME),
    ("timestamp", _EPOCH),
    ("uuid", _ID),
    ("counter", _NUMBER),
)
_THINKING = re.compile(r"\s*<(think|thinking|reasoning)>.*?</\1>\s*", re.DOTALL)
_BRACKET = re.compile(r"[\[{]")
_REACH = 80  # characters before the difference, in which what changes may begin

VOLATILE = ("uuid", "timestamp", "counter")


@dataclass(frozen=True, slots=True)
class Change:
    """What differs first between two texts: both values, from character `start` on."""

    kind: str
    start: int
    ours: str
    theirs: str


def common_prefix(ours: str, theirs: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours.startswith(theirs[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def volatile_change(ours: str, theirs: str) -> Change | None:
    """The id, the time or the number in which two texts differ first, if it is one."""
    at = common_prefix(ours, theirs)
    for kind, pattern in _PATTERNS:
        for found in pattern.finditer(ours, max(0, at - _REACH), at + _REACH):
            if found.start() > at:
                break
            other = pattern.match(theirs, found.start())
            if found.end() < at or other is None or other.end() < at or other[0] == found[0]:
                continue
            if pattern is not _ID or _are_ids(found[0], other[0]):
                return Change(kind, found.start(), found[0].rstrip(" ,"), other[0].rstrip(" ,"))
    return None


def json_change(ours: str, theirs: str) -> Change | None:
    """The first difference, if both texts have the same JSON there: other spacing, order of keys, or of the tools."""
    at = common_prefix(ours, theirs)
    scan = json.JSONDecoder().raw_decode
    position = 0
    while (found := _BRACKET.search(ours, position, at + 1)) and theirs.startswith(found[0], found.start()):
        start = position = found.start()
        position += 1
        try:
            our_value, our_end = scan(ours, start)
            their_value, _ = scan(theirs, start)
            kind = _kind_of_json(our_value, their_value) if our_end > at else ""
        except (ValueError, RecursionError):
            continue
        if kind:
            return Change(kind, at, *_excerpts(ours, theirs, at))
        position = our_end if our_end <= at else position
    return None


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values, whatever the order of keys."""
    return json.dumps(value, sort_keys=True)


def text_change(ours: str, theirs: str) -> Change:
    """The words at the first difference, of no kind."""
    at = common_prefix(ours, theirs)
    return Change("", at, *_excerpts(ours, theirs, at))


def without_thinking(text: str) -> str:
    """The text without what stands in <think> tags."""
    return _THINKING.sub("", text)


def without_volatile(text: str, numbers_behind: tuple[str, ...]) -> tuple[str, list[str]]:
    """The text without its ids and times, and without the numbers behind certain words; and what was taken out."""
    spans = [found.span() for pattern in (_UUID, _TIME, _EPOCH) for found in pattern.finditer(text)]
    spans += [found.span() for found in _ID.finditer(text) if _are_ids(found[0], found[0])]
    for words in numbers_behind:
        pattern = re.compile(r"\s+".join(map(re.escape, words.split())) + rf"\s*({_NUMBER.pattern})")
        spans += [found.span(1) for found in pattern.finditer(text)]
    kept, values, end = [], [], 0
    for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= end:
            kept.append(text[end:start])
            values.append(text[start:stop])
            end = stop
    return "".join([*kept, text[end:]]), values


def sorted_json(text: str) -> str:
    """The text with the keys of its JSON objects sorted, and its lists of objects."""
    scan = json.JSONDecoder().raw_decode
    pieces, end, position = [], 0, 0
    while found := _BRACKET.search(text, position):
        position = found.start()
        try:
            value, stop = scan(text, position)
            if type(value) is list and _are_tools(value, value):
                value.sort(key=canonical)
            written = json.dumps(value, sort_keys=True, ensure_ascii=False)
        except (ValueError, RecursionError):
            position += 1
            continue
        pieces += [text[end:position], written]
        end = position = stop
    return "".join([*pieces, text[end:]])


def _are_ids(word: str, other: str) -> bool:
    """Look drawn at random: digits and letters mixed, or hexadecimal digits of one length."""
    words = word, other
    if not all(re.search("[0-9]", one) for one in words):
        return False
    runs = max(len(re.findall("[0-9]+|[A-Za-z]+", one)) for one in words)
    is_hex = len(word) == len(other) and all(re.fullmatch("[0-9a-f]+|[0-9A-F]+", one) for one in words)
    return runs >= 3 or (is_hex and not all(map(str.isdigit, words)))


def _kind_of_json(ours: Any, theirs: Any) -> str:
    """What differs between two ways to write a JSON value; empty for two values."""
    if canonical(ours) == canonical(theirs):
        return "retokenised" if _keys(ours) == _keys(theirs) else "json_key_order"
    return "tool_order" if _are_tools(ours, theirs) else ""


def _are_tools(ours: Any, theirs: Any) -> bool:
    """The same objects in another order."""
    lists = [value for value in (ours, theirs) if type(value) is list and all(type(item) is dict for item in value)]
    return len(lists) == 2 and sorted(map(canonical, ours)) == sorted(map(canonical, theirs))


def _keys(value: Any) -> Any:
    """The order of all keys of a JSON value."""
    if type(value) is dict:
        return [(key, _keys(inner)) for key, inner in value.items()]
    return [_keys(inner) for inner in value] if type(value) is list else None


def _excerpts(ours: str, theirs: str, at: int) -> tuple[str, str]:
    while at and (ours[at - 1].isalnum() or ours[at - 1] in "_\"'<"):
        at -= 1
    return ours[at : at + _REACH], theirs[at : at + _REACH]
