"""Text → token ids, for template text (control tokens parsed) and for data (never any).

Works on copies of the tokenizer's backend, so that the tokenizer passed in is left alone and several
threads may tokenize. Knows nothing of messages and facts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from inferscale.errors import EngineError, EngineMissing


def load_tokenizer(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of a folder or hub name. Raises EngineMissing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise EngineMissing(
            f"The tokenizer of {name!r} cannot be loaded; give a folder with a model and its tokenizer, "
            f"or the name of one on a hub that can be reached. ({str(error).splitlines()[0]})"
        ) from error


class SegmentTokenizer:
    """Two copies of a tokenizer's backend: one that parses control tokens and one without them.

    The backend's `encode_special_tokens` does not do for data: it leaves added tokens that are not
    flagged as special, such as Qwen's `<tool_call>`, and it is shared state.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise EngineError(
                f"{type(tokenizer).__name__} has no fast backend; memory needs a tokenizer of the "
                "`tokenizers` library (a tokenizer.json beside the model)."
            )
        serialized = backend.to_str()
        spec = json.loads(serialized)
        added = {str(token["content"]): token for token in spec["added_tokens"]}
        # Runs of blanks are added tokens in some vocabularies; they are text.
        blanks = [t for t in spec["added_tokens"] if not (t["content"].strip() or t["special"])]
        self._data = Tokenizer.from_str(json.dumps({**spec, "added_tokens": blanks}))
        if any(self._data.token_to_id(t["content"]) != t["id"] for t in blanks):
            self._data = Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        control = [t for t, token in added.items() if token["special"] or (t.strip() and t in template)]
        unknown = _unknown_token(spec["model"])
        self._control_ids = frozenset(int(added[text]["id"]) for text in control if text != unknown)
        # The place behind the first character of a control string: cut there, it is none.
        longer = [t for t in control if t[1:]]
        cuts = (f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in longer)
        self._cuts = re.compile("|".join(cuts) or "(?!)")
        self._any_control = re.compile("|".join(map(re.escape, longer)) or "(?!)")
        self._text = Tokenizer.from_str(serialized)
        for copy in (self._text, self._data):
            copy.no_truncation()
            copy.no_padding()

    def text(self, text: str) -> tuple[int, ...]:
        """Ids as vLLM tokenizes a rendered prompt: control tokens parsed, none added."""
        return tuple(self._text.encode(_valid(text), add_special_tokens=False).ids)

    def data(self, text: str) -> tuple[int, ...]:
        """Ids in which no control token occurs."""
        text = _valid(text)
        ids = self._data.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        pieces = [piece for piece in self._cuts.split(text) if piece]
        ids = [i for piece in pieces for i in self._data.encode(piece, add_special_tokens=False).ids]
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        # No way to write it as it is: a space in every control string, so that it is none.
        ids = self._data.encode(" ".join(pieces), add_special_tokens=False).ids
        return tuple(i for i in ids if i not in self._control_ids)

    def neutral(self, text: str) -> str:
        """`text` with a space in every control string, so that a parser of control tokens finds none."""
        text = _valid(text)
        if self._any_control.search(text) is None:  # as nearly always; `_cuts` looks at every character
            return text
        return " ".join(piece for piece in self._cuts.split(text) if piece)


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    """The token for characters outside the vocabulary; data may hold it."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _valid(text: str) -> str:
    """`text` with half surrogate pairs, which no tokenizer takes, as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
