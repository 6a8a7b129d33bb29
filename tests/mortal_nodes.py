"""Nodes that are threads of a test, and that end as processes do that are killed."""


class Killed(BaseException):
    """Ends a thread, as SIGKILL ends a process."""


class Lives:
    """Who lives, as all know at once."""

    def __init__(self) -> None:
        self.ended: set[str] = set()

    def is_alive(self, name: str) -> bool:
        return name not in self.ended

    def end(self, name: str) -> None:
        """Let all know that a node has ended."""
        self.ended = self.ended | {name}
