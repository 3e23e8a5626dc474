"""The errors that a caller can act on. Everything else is a `ValueError` or `TypeError` at the door."""


class OutOfBlocksError(RuntimeError):
    """The pool cannot give the blocks that a call needs, even if every evictable one went; nothing has changed.

    What helps: free or preempt a running request, then try again. All counts are in blocks.
    """

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        super().__init__(f"needed {needed} blocks, but only {free} are free and {evictable} evictable")
        self.needed = needed
        self.free = free
        self.evictable = evictable

    def __reduce__(self) -> tuple[type["OutOfBlocksError"], tuple[int, int, int]]:
        return type(self), (self.needed, self.free, self.evictable)


class TraceError(ValueError):
    """A trace file cannot be read. The message names file, line (1-based; 0: the file as a whole) and field."""

    def __init__(self, file: str, line: int, message: str) -> None:
        super().__init__(f"{file}:{line}: {message}" if line else f"{file}: {message}")
        self.file = file
        self.line = line
        self.message = message

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, int, str]]:
        return type(self), (self.file, self.line, self.message)
