"""How right a short answer is, without a model: token F1, BLEU-1, exact match, and whether it declines.

Texts are compared as SQuAD's script does it (Rajpurkar et al., 2016): lower case, punctuation removed (all
of Unicode's, and ASCII symbols such as `$`; nothing takes its place), the articles a, an and the removed,
split at white space. `and` is removed too, as in LoCoMo's script (Maharana et al., 2024). Unlike there,
words are not stemmed, and lists in answers of category 1 are not matched item by item.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter

_SKIPPED = frozenset({"a", "an", "the", "and"})
_SYMBOLS = frozenset(string.punctuation)
_OPEN_DOMAIN = 3

_DECLINING = (
    "(?:not|never) (?:explicitly |specifically )?(?:mentioned|said|stated|specified|provided|given|known)",
    "not available",
    "no (?:information|mention|record)",
    "(?:do|does|did) not (?:explicitly |specifically )?(?:mention|say|state|specify)",
    "(?:do|does|did)nt (?:explicitly |specifically )?(?:mention|say|state|specify)",
    "i (?:do not|dont|cannot|cant) (?:know|say|tell)",
    "cannot be determined",
    "unknown",
)
_DECLINES = re.compile(rf"\b(?:{'|'.join(_DECLINING)})\b")


def words(text: str) -> list[str]:
    """The words of a text that are compared."""
    kept = "".join(char for char in text.lower() if not _is_punctuation(char))
    return [word for word in kept.split() if word not in _SKIPPED]


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it is there. Two texts
    without words agree; one without words agrees with no other."""
    said, meant = words(answer), words(gold)
    if not said or not meant:
        return float(said == meant)
    num_same = (Counter(said) & Counter(meant)).total()
    return 2 * num_same / (len(said) + len(meant))


def bleu1(answer: str, gold: str) -> float:
    """Share of the answer's words that are in the gold answer, each at most as often as there, times
    exp(1 - gold/answer) where the answer is shorter (Papineni et al., 2002, for single words)."""
    said, meant = words(answer), words(gold)
    if not said or not meant:
        return float(said == meant)
    precision = (Counter(said) & Counter(meant)).total() / len(said)
    return precision * math.exp(min(0.0, 1 - len(meant) / len(said)))


def exact_match(answer: str, gold: str) -> bool:
    """Whether both have the same words in the same order."""
    return words(answer) == words(gold)


def scored_gold(gold: str, category: int) -> str:
    """What an answer is compared with. In category 3 a reason may follow behind a semicolon, which is not
    asked for; LoCoMo's script cuts it off as well."""
    return gold.partition(";")[0] if category == _OPEN_DOMAIN else gold


def declines(answer: str) -> bool:
    """Whether the answer says that it is not known, as `not mentioned` does."""
    plain = " ".join(words(answer))
    return plain in ("none", "no answer") or _DECLINES.search(plain) is not None


def resists(answer: str, gold: str) -> bool:
    """Whether an answer to a question of category 5, which asks for what nobody said, is right: it declines,
    or, where there is a gold answer (two have `No`), begins with its words."""
    if declines(answer):
        return True
    meant = words(gold)
    return bool(meant) and words(answer)[: len(meant)] == meant


def _is_punctuation(char: str) -> bool:
    return char in _SYMBOLS or unicodedata.category(char).startswith("P")
