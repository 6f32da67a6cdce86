"""Earlier turns of a conversation as segments: where the history of a prompt is cut, and its pieces' keys.

    head │ facts │ piece 0 │ piece 1 │ … │ tail │ question

The facts in front change with every question, so behind them vLLM's own prefix cache finds nothing, and all
earlier turns would be prefilled again. As segments they come from the pool. Piece 0 stands between the facts
and the first user's text (the end of the system message, the user's header); piece j is question j, all that
answered it, and the header of the next question. Each is tokenized by itself and depends on nothing behind
it, so its ids are the same in every request that repeats the conversation.

Decided here:

- A piece's KV is computed by a pass of its own, behind the head and the pieces before it and *without facts*
  (`encode_jobs.JobChooser.for_turns`). It is not captured from the pages of the request that answered: there
  it has seen facts, and deleting one of them would leave something of it in every turn behind it. So a turn's
  KV is right whatever is deleted. What was *said* may still be what is deleted, or quote it: a deletion
  therefore drops the turns of its scopes too (`encode_jobs.TurnBook`), and the next answer brings them back.
- The key mixes in the digest of the scope, and the caller's own cache salt where there is one: nobody can
  find out by timing whether somebody else had the same conversation.
- Pieces are cut where tokenizing them one by one gives the ids of the whole text: at the question's text, or
  where the tokenizer joins what meets there ("[INST] Hello"), at the control token in front of it. Where
  neither does, two turns are one piece; where a template drops or reorders turns, all of them are.

Knows neither tokenizers nor templates nor the engine.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from inferscale.facts import Scope
from inferscale.plan import Segment, segment_key

_SEAM_CHARS = 128
"""Text on each side of a cut that decides whether it changes the ids; longer than any user header."""
_QUESTION = "Hello"
"""Stands for the question behind a history. A header that would join it is a piece of its own, so that the
turn in front of it is the same piece in later requests."""


class TurnMarks:
    """Marks where the texts of earlier questions begin, for one rendering of a chat template.

    name: begins every mark; a text that stands nowhere else.
    """

    def __init__(self, name: str) -> None:
        self._opening = f"{name}T"
        self._marks: list[str] = []

    def place(self, messages: Iterable[dict[str, Any]]) -> None:
        """Put a mark into each message from the user; contents are lists of texts, and are replaced.

        Behind leading white space, which templates strip. No mark where there is no text, and none in front
        of a tag, which templates look for ("<tool_response>").
        """
        for message in messages:
            content = message["content"] if message["role"] == "user" else []
            part = next((number for number, text in enumerate(content) if text.strip()), None)
            if part is None:
                continue
            text = content[part].lstrip()
            if text.startswith("<"):
                continue
            mark = f"{self._opening}{len(self._marks)}X"
            self._marks.append(mark)
            marked = content[part][: -len(text)] + mark + text
            message["content"] = [*content[:part], marked, *content[part + 1 :]]

    def split(self, before: str, history: str, after: str) -> tuple[str, list[str], str]:
        """A rendered prompt without the marks, its history cut at them.

        In one piece where they do not stand in it once each and in order.
        """
        pieces, rest = [], history
        for mark in self._marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                break
            pieces.append(piece)
        pieces.append(rest)
        if len(pieces) == len(self._marks) + 1 and not any(
            self._opening in text for text in (before, after, *pieces)
        ):
            return before, pieces, after
        marks = re.compile(re.escape(self._opening) + r"\d+X")
        before, history, after = (marks.sub("", text) for text in (before, history, after))
        return before, [history], after


class HistoryCutter:
    """Cuts a history so that its pieces' ids make up the ids of the whole.

    ids_of: tokenizes a text. control: strings that are a token of their own wherever they stand.
    """

    def __init__(self, ids_of: Callable[[str], tuple[int, ...]], control: Iterable[str]) -> None:
        self._ids_of = ids_of
        longest_first = sorted((text for text in control if text.strip()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._seam = lru_cache(maxsize=4096)(self._find_seam)

    def cut(self, pieces: Sequence[str]) -> tuple[str, ...]:
        """Pieces as `TurnMarks.split` gives them, with their cuts moved or taken back; none is empty."""
        done = [pieces[0]]
        for piece in [*pieces[1:], _QUESTION]:
            last = done.pop()
            num_back = self._seam(last[-_SEAM_CHARS:], piece[:_SEAM_CHARS])
            if num_back is None:
                done.append(last + piece)
            else:
                at = len(last) - num_back
                done += [last[:at], last[at:] + piece]
        done[-1] = done[-1].removesuffix(_QUESTION)
        return tuple(filter(None, done))

    def _find_seam(self, before: str, after: str) -> int | None:
        """How many characters of `before` belong behind the cut; None where there is no place for one."""
        whole = self._ids_of(before + after)
        starts = [found.start() for found in self._control.finditer(before)]
        for at in (len(before), *starts[-1:]):
            if self._ids_of(before[:at]) + self._ids_of(before[at:] + after) == whole:
                return len(before) - at
        return None


def turn_segments(
    model: str, scope: str, caller_salt: str, head_ids: Sequence[int], pieces: Iterable[tuple[int, ...]]
) -> list[Segment]:
    """The pieces of a history as segments. model, scope, caller_salt: as in the chat's plan."""
    owner = f"{model}+{scope}"
    if caller_salt:
        salt = caller_salt.encode("utf-8", "surrogatepass")
        owner += f"+{hashlib.blake2b(salt, digest_size=16).hexdigest()}"
    segments = []
    prefix = array("i", head_ids)  # it is hashed for every key: packing it must be cheap
    for piece in pieces:
        segments.append(Segment(segment_key(owner, prefix, piece), piece, "turn"))
        prefix.extend(piece)
    return segments


class Conversation(NamedTuple):
    """What opens the prompts of a conversation, but for the facts. segments: the head, then the turns.

    epoch: of the scope when its last chat was planned.
    """

    scope: Scope
    segments: tuple[Segment, ...]
    epoch: int = 0

    @property
    def name(self) -> str:
        """The same for the same conversation."""
        return self.segments[-1].key
