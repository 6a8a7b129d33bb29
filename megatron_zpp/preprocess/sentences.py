"""Split English text into sentences by rules, without a trained model.

A sentence ends with . ! ? or …, and the quotes and brackets that close after it, if white space
and then a capital letter, a digit or an opening quote or bracket follow. It also ends with an
ideographic full stop, and at an empty line. It does not end after a common abbreviation or a
person's initial.
"""

import re

CLOSING = "\"'”’)\\]»"
OPENING = "\"'“‘(\\[«¿¡"
END = re.compile(rf"[.!?…]+[{CLOSING}]*(?=\s)|[。！？]+[」』）]*|\n[^\S\n]*\n")
BEGINNING = re.compile(rf"[{OPENING}]*[^\W_a-zß-öø-ÿ]")
WHITE_SPACE = re.compile(r"\s*")
LAST_WORD = re.compile(r"[\w.]+\Z")
LONGEST_WORD = 12  # characters before a full stop that are searched for an abbreviation
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st gen col capt lt sgt rev hon sen rep gov pres jr sr vs etc e.g i.e cf al "
    "approx dept est fig figs eq eqs sec ch vol no nos p pp ed eds inc ltd co corp jan feb mar apr "
    "jun jul aug sep sept oct nov dec u.s u.k a.m p.m".split()
)
# Abbreviations after which a sentence may end.
FINAL_ABBREVIATIONS = frozenset("etc al inc ltd co corp jr sr a.m p.m u.s u.k".split())


def split_sentences(text: str, keep_newlines: bool) -> list[str]:
    """Return the sentences of a text, without the white space around them.

    With `keep_newlines` a sentence keeps the white space after it if that contains a newline.
    """
    sentences, start = [], 0
    for end in _sentence_ends(text):
        sentences.append(text[start:end])
        start = end
    sentences.append(text[start:])
    return [_strip(sentence, keep_newlines) for sentence in sentences if sentence.strip()]


def _sentence_ends(text: str) -> list[int]:
    """Return the offsets in `text` at which the next sentence begins."""
    offsets = []
    for match in END.finditer(text):
        offset = WHITE_SPACE.match(text, match.end()).end()
        if match[0][0] in "\n。！？" or _is_end(text, match, offset):
            offsets.append(offset)
    return offsets


def _is_end(text: str, match: re.Match[str], next_word: int) -> bool:
    """Return whether a sentence ends at `match`; `next_word` is the offset of the next word."""
    if not BEGINNING.match(text, next_word):
        return False
    if match[0][0] != "." or len(match[0]) > 1:
        return True
    word = LAST_WORD.search(text[max(0, match.start() - LONGEST_WORD) : match.start()])
    if word is None:
        return True
    is_initial = len(word[0]) == 1 and word[0].isupper() and word[0] != "I"
    if is_initial:
        return False
    lower = word[0].lower()
    return lower not in ABBREVIATIONS or lower in FINAL_ABBREVIATIONS


def _strip(sentence: str, keep_newlines: bool) -> str:
    trailing_space = sentence[len(sentence.rstrip()) :]
    if keep_newlines and "\n" in trailing_space:
        return sentence.strip() + trailing_space
    return sentence.strip()
