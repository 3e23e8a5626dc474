"""One JSON array too large to read at once, item by item. Knows nothing of what the items mean."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Protocol

_READ_BYTES = 1 << 18
_SPACE = re.compile(r"\s*")
_LONGEST_WORD = 16  # characters: an error so near to the end of what was read may come of reading no further


class Readable(Protocol):
    """A file opened for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


def array_items(stream: Readable) -> Iterator[tuple[int, bytes]]:
    """The items as UTF-8, each with the number of the line on which it begins.

    From what is no array on, the rest comes as the last item, for the caller to refuse. Memory: twice the longest item.
    """
    text = ""
    position, line = 0, 1
    decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
    scan = json.JSONDecoder().raw_decode

    def read() -> bool:
        nonlocal text, position
        chunk = stream.read(max(_READ_BYTES, len(text) - position))
        text = text[position:] + decode(chunk)
        position = 0
        return bool(chunk)

    def find() -> str:
        """Move to the next character that is no space; empty at the end of the stream."""
        nonlocal position, line
        while True:
            end = _SPACE.match(text, position).end()  # type: ignore[union-attr]
            line += text.count("\n", position, end)
            position = end
            if position < len(text):
                return text[position]
            if not read():
                return ""

    separator = "["
    while find() == separator:
        position += 1
        if find() == "]" and separator == "[":
            break
        separator = ","
        end = 0
        while not end:
            try:
                end = scan(text, position)[1]
            except RecursionError:
                break
            except ValueError as error:
                at = getattr(error, "pos", 0)
                if not (str(error).startswith("Unterminated") or at > len(text) - _LONGEST_WORD) or not read():
                    break
        if not end:
            break
        yield line, text[position:end].encode("utf-8", "surrogateescape")
        line += text.count("\n", position, end)
        position = end
    if find() == "]":
        position += 1
        if not find():
            return
    yield line, (text[position:] or "]").encode("utf-8", "surrogateescape")
