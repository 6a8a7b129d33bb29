"""Tokens in, pieces of text out: whole characters only, and nothing of a text that ends it.

A token may hold part of a character, and some tokenizers spell a token differently at the beginning
of a text. So a window of the last tokens is decoded, the end of the prompt at first among them, and
what it shows more than before is new. The pieces put together are the text after the prompt.
"""

from collections.abc import Sequence
from os.path import commonprefix

from megatron_zpp.tokenizer import Tokenizer

WINDOW = 32  # tokens decoded again for each new one, at most
CONTEXT = 8  # of these, tokens whose text is known already
BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text that follows `prompt`, as its tokens come; `stopped` once one of `stops` came."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = list(prompt[-CONTEXT:])
        self._prompt = tokenizer.decode(self._window)  # which may end in a broken character
        self._shown = self._prompt.rstrip(BROKEN)  # the window's known text
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain now; empty in the middle of a character, or of a stop."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(BROKEN)
        self._leave_prompt(whole)
        if whole == text:
            self._allow_change(text)
        new = ""
        if whole.startswith(self._shown):
            new, self._shown = whole[len(self._shown) :], whole
        if len(self._window) >= WINDOW and whole == text:
            self._window = self._window[-CONTEXT:]
            self._prompt = ""
            self._shown = self._tokenizer.decode(self._window)
        return self._released(new)

    def finish(self) -> str:
        """What is left when no more tokens come; broken characters show as U+FFFD."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._window)
        self._leave_prompt(text)
        self._allow_change(text)
        released = self._released(text[len(self._shown) :])
        left, self._held = self._held, ""
        return released + left

    def _leave_prompt(self, text: str) -> None:
        """A character that the prompt ends in, and that stayed broken, is the prompt's."""
        if text.startswith(self._prompt):
            self._shown = max(self._shown, self._prompt, key=len)

    def _allow_change(self, text: str) -> None:
        """Bytes spelled one by one are decoded together: a broken one breaks those before it."""
        if not text.startswith(self._shown):
            self._shown = commonprefix((self._shown, text))

    def _released(self, new: str) -> str:
        """Of the text held back and `new` what cannot be part of a stop."""
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
