"""Which words of a sentence must not change for it to say the same: numbers, names, negations."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+(?:['’.,:-][^\W_]+)*")
_NEGATIONS = frozenset(
    ("no", "not", "never", "none", "nobody", "nothing", "nowhere", "neither", "nor", "without", "cannot",
     "can't", "won't", "don't", "doesn't", "didn't", "isn't", "aren't", "wasn't", "weren't", "hasn't",
     "haven't", "hadn't", "wouldn't", "couldn't", "shouldn't", "longer", "stopped", "quit")
)  # fmt: skip
_YEAR = re.compile(r"(?<!\d)(?:1[89]|20|21)\d\d(?!\d)")


def plain(text: str) -> str:
    """`text` without what does not matter for what it says: case, space, a full stop at the end."""
    return " ".join(text.casefold().split()).strip(" .!\"'")


def anchors(text: str) -> frozenset[str]:
    """Numbers and names of a sentence. Its first word counts where it has a number in it or all capitals."""
    return frozenset(
        _bare(word)
        for place, word in enumerate(_WORD.findall(text))
        if any(char.isdigit() for char in word)
        or (len(word) > 1 and word.isupper())
        or (place and word[0].isupper())
    )


def negations(text: str) -> int:
    return sum(word.replace("’", "'") in _NEGATIONS for word in map(str.casefold, _WORD.findall(text)))


def years(text: str) -> frozenset[str]:
    return frozenset(_YEAR.findall(text))


def words(text: str) -> frozenset[str]:
    return frozenset(map(_bare, _WORD.findall(text)))


def _bare(word: str) -> str:
    """`ana` of `Ana's`."""
    return re.sub(r"['’]s$", "", word.casefold())


def differ_in_detail(one: str, other: str) -> bool:
    """Whether two sentences that are alike may still contradict each other.

    Their numbers and names are others or stand in another order (who gave what to whom), or one denies.
    """
    known = anchors(one) | anchors(other)
    in_order = [[word for word in map(_bare, _WORD.findall(text)) if word in known] for text in (one, other)]
    return in_order[0] != in_order[1] or negations(one) != negations(other)


def is_merged(merged: str, old: str, new: str) -> bool:
    """Whether `merged` may stand for two sentences: it keeps what is certain of the new one, and makes up
    no number and no name."""
    told, kept = words(old) | words(new), words(merged)
    return (
        bool(plain(merged))
        and anchors(new) <= kept
        and anchors(merged) <= told
        and years(merged) <= years(old) | years(new)
        and len(merged) <= len(old) + len(new) + 20
    )
