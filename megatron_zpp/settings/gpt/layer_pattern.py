"""Flags that apply to some layers only: Megatron's frequencies and lists, and windows.

A frequency N means every N-th layer. A list has a 0 or a 1 for each layer, and may be an expression
of lists, as in [0,0,0,1]*8+[0,1].
"""

import ast
from collections.abc import Sequence
from functools import cache

from zeropp.errors import InputError

MAX_LAYERS = 10_000
QUOTED = " '\""  # as scripts leave them around patterns that they quote twice


def parse_window(text: str) -> int:
    """Return how many tokens a query sees, including its own, with `--window-size` LEFT,RIGHT.

    Raises InputError unless the text is two whole numbers and the second is 0.
    """
    words = text.strip("()[]").split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise InputError(
            f"--window-size {text}: expected the tokens that a token sees before and after it, "
            "such as 127,0"
        )
    before, after = map(int, words)
    if after:
        raise InputError(
            f"--window-size {text}: the attention is causal, so the second number can only be 0"
        )
    return before + 1


def window_text(window: int) -> str:
    """Return the text that `parse_window` turns into `window`."""
    return f"{window - 1},0"


@cache
def marks_of(text: str, num_layers: int, flag: str, *, nth: bool = True) -> tuple[bool, ...]:
    """Return each layer's mark: its 1 or 0 in a list; for a frequency, `nth` at every N-th layer.

    Raises InputError, which names the `flag`, for other text and for a list of another length.
    """
    text = text.strip(QUOTED)
    if text.isdecimal() and int(text) > 0:
        return tuple((layer % int(text) == 0) == nth for layer in range(1, num_layers + 1))
    try:
        marks = _evaluate(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError):
        marks = None
    if marks is None or any(mark not in (0, 1) for mark in marks):
        raise InputError(
            f"{flag} {text}: expected a whole number above 0, or a list of 0 and 1 such as "
            "[0,0,0,1]*8"
        )
    if len(marks) != num_layers:
        raise InputError(
            f"{flag} {text}: has {len(marks)} numbers, but there are {num_layers} layers: give "
            "one for each"
        )
    return tuple(map(bool, marks))


def pattern_text(marks: Sequence[bool], *, nth: bool = True) -> str:
    """Return the shortest text that `marks_of` turns into `marks`."""
    num_layers = len(marks)
    for frequency in range(1, num_layers + 2):
        text = str(frequency)
        if marks_of(text, num_layers, "", nth=nth) == tuple(marks):
            return text
    return str(list(map(int, marks))).replace(" ", "")


def _evaluate(node: ast.expr) -> list[int]:
    """Return the value of an expression of lists; raises ValueError for any other expression."""
    if isinstance(node, ast.List):
        return [_number(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(node.left) + _evaluate(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        marks, times = _evaluate(node.left), _number(node.right)
        if len(marks) * times <= MAX_LAYERS:
            return marks * times
    raise ValueError("not an expression of lists")


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("not a whole number")
