"""Where an English sentence ends: by rules, without a trained model.

A sentence ends with . ! ? or …, and the quotes and brackets that close after it, where white space
and a capital, a digit or an opening sign follow; with an ideographic full stop; and at an empty
line. It does not end after a usual abbreviation or a person's initial.
"""

import re

CLOSING = "\"'”’)\\]»"
OPENING = "\"'“‘(\\[«¿¡"
END = re.compile(rf"[.!?…]+[{CLOSING}]*(?=\s)|[。！？]+[」』）]*|\n[^\S\n]*\n")
BEGINNING = re.compile(rf"[{OPENING}]*[^\W_a-zß-öø-ÿ]")
LAST_WORD = re.compile(r"[\w.]+\Z")
LONGEST_WORD = 12  # characters that may belong to an abbreviation
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st gen col capt lt sgt rev hon sen rep gov pres jr sr vs etc e.g i.e cf al "
    "approx dept est fig figs eq eqs sec ch vol no nos p pp ed eds inc ltd co corp jan feb mar apr "
    "jun jul aug sep sept oct nov dec u.s u.k a.m p.m".split()
)
NEEDS_MORE = frozenset("etc al inc ltd co corp jr sr a.m p.m u.s u.k".split())  # may end one


def sentences(text: str, keep_newlines: bool) -> list[str]:
    """The sentences of a text, without the white space around them.

    With `keep_newlines` each keeps the white space that follows it if there is a line end in it.
    """
    found, start = [], 0
    for end in _ends(text):
        found.append(text[start:end])
        start = end
    found.append(text[start:])
    return [_trimmed(sentence, keep_newlines) for sentence in found if sentence.strip()]


def _ends(text: str) -> list[int]:
    """Places at which a new sentence begins."""
    places = []
    for match in END.finditer(text):
        place = _next_word(text, match.end())
        if match[0][0] in "\n。！？" or _is_end(text, match, place):
            places.append(place)
    return places


def _next_word(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _is_end(text: str, match: re.Match[str], place: int) -> bool:
    if not BEGINNING.match(text, place):
        return False
    if match[0][0] != "." or len(match[0]) > 1:
        return True
    word = LAST_WORD.search(text[max(0, match.start() - LONGEST_WORD) : match.start()])
    if word is None:
        return True
    initial = len(word[0]) == 1 and word[0].isupper() and word[0] != "I"
    known = word[0].lower()
    return not initial and (known not in ABBREVIATIONS or known in NEEDS_MORE)


def _trimmed(sentence: str, keep_newlines: bool) -> str:
    core = sentence.strip()
    after = sentence[len(sentence.rstrip()) :]
    return core + after if keep_newlines and "\n" in after else core
