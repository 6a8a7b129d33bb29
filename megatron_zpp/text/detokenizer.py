"""Tokens in, pieces of text out: whole characters only, and nothing from a stop text on.

One token may hold part of a character, and some tokenizers decode a token differently at the
beginning of a text. So each new token is decoded together with a window of the tokens before it,
which at first holds the end of the prompt; the new text is what the decoded window gained. The
pieces concatenated are the text after the prompt.
"""

from collections.abc import Sequence
from os.path import commonprefix

from megatron_zpp.tokenizer import Tokenizer

WINDOW = 32  # most tokens that are decoded again for each new one
CONTEXT = 8  # tokens of a window whose text was returned before
BROKEN = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Decodes the tokens that follow `prompt`; `stopped` is true once one of `stops` appeared."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = list(prompt[-CONTEXT:])
        self._prompt = tokenizer.decode(self._window)  # may end in a broken character
        self._decoded = self._prompt.rstrip(BROKEN)  # the window's text up to here is finished
        self._held_back = ""  # text that may be the beginning of a stop text
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is final now; empty inside a character or a possible stop text."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(BROKEN)
        self._skip_prompt(whole)
        if whole == text:
            self._accept_changed_text(text)
        new = ""
        if whole.startswith(self._decoded):
            new, self._decoded = whole[len(self._decoded) :], whole
        if len(self._window) >= WINDOW and whole == text:
            self._window = self._window[-CONTEXT:]
            self._prompt = ""
            self._decoded = self._tokenizer.decode(self._window)
        return self._without_stops(new)

    def finish(self) -> str:
        """The remaining text after the last token; broken characters become U+FFFD."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._window)
        self._skip_prompt(text)
        self._accept_changed_text(text)
        released = self._without_stops(text[len(self._decoded) :])
        rest, self._held_back = self._held_back, ""
        return released + rest

    def _skip_prompt(self, text: str) -> None:
        """A broken character at the end of the prompt that stays broken belongs to the prompt."""
        if text.startswith(self._prompt):
            self._decoded = max(self._decoded, self._prompt, key=len)

    def _accept_changed_text(self, text: str) -> None:
        """Some decoders decode a run of bytes at once: a broken byte breaks those before it."""
        if not text.startswith(self._decoded):
            self._decoded = commonprefix((self._decoded, text))

    def _without_stops(self, new: str) -> str:
        """The part of the text held back and of `new` that cannot belong to a stop text."""
        text = self._held_back + new
        positions = [text.find(stop) for stop in self._stops if stop in text]
        if positions:
            self.stopped, self._held_back = True, ""
            return text[: min(positions)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - length :]
        return text[: len(text) - length]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    for size in range(longest, 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
