"""What the answers of a check say: distances of distributions, and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple, get_args

State = Literal["exact", "insensitive", "refused", "off", "unknown"]

COMPARED = 10
"""Most likely tokens behind text, whose log-probabilities are compared."""

_ROUNDING = {"float32": 0.001, "float16": 0.03, "bfloat16": 0.15}
"""What the rounding of moved keys may cost, in nats, as `distance` measures it. Of SmolLM2-135M it costs
0.00001 in float32 and 0.07 in bfloat16, where the 8 bits of a key are rounded once more; keys that are not
turned cost 0.4 there, turned half as far 0.25. One position off (0.06 in float32) is lost in bfloat16."""
_TIMES_NOISE = 2.0
"""`moved` may be so many times as far as `own`, which is rounded in the same formats, but not turned."""
_OF_WRONG = 0.2
"""In 16 bits, less than this share of a wrong turn is rounding."""
_TIMES_ALLOWED = 1.5
"""`wrong` is so many times as far as is allowed, or the comparison sees too little."""


class Distances(NamedTuple):
    """From text, in nats: of the run injected where it was captured, of moved KV, of wrongly moved KV.
    position: of what follows a run from what follows a shorter one."""

    own: float
    moved: float
    wrong: float
    position: float


@dataclass(frozen=True)
class Verdict:
    """exact: moved KV says what text says. insensitive: so it seems, but a wrong turn would not be seen.
    refused: it does not; nothing may be injected. `why`: a second round could not make sure of it. off: the
    engine was started without injection. unknown: the check was not carried out, `why` says it; nothing is
    known against the model.

    Distances in nats, as of `Distances`; allowed: of `moved`. is_new: found at this start, not remembered.
    """

    state: State
    own: float = 0.0
    moved: float = 0.0
    wrong: float = 0.0
    position: float = 0.0
    allowed: float = 0.0
    why: str = ""
    seconds: float = 0.0
    is_new: bool = True

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise ValueError(f"a verdict is {self.state!r}")

    @property
    def is_refusal(self) -> bool:
        """Whether nothing may be injected."""
        return self.state in ("refused", "off")

    @property
    def is_lasting(self) -> bool:
        """Whether the next start need not look again."""
        return self.state not in ("off", "unknown")

    @property
    def refusal(self) -> str | None:
        """Why nothing is injected, for the outcome of a request; None where it may be."""
        if not self.is_refusal:
            return None
        if self.state == "off":
            return "the engine was started without injection (--injection-path none)"
        return "the self-check refused injection: for this model moved KV does not say what text says"

    def __str__(self) -> str:
        """A line for who started the engine."""
        if self.state == "unknown":
            return f"Self-check: not carried out, since {self.why}. Facts are injected."
        if self.state == "off":
            return (
                "Injection is off (--injection-path none): facts are prefilled as text, which is exact, and "
                "nothing is encoded."
            )
        far = f"{self.moved:.2g} nats from text; allowed {self.allowed:.2g}, turned wrongly {self.wrong:.2g}"
        when = f"{self.seconds:.1f} s" if self.is_new else "found at an earlier start"
        if self.state == "exact":
            return f"Self-check: KV can be moved in this model ({far}; {when})."
        if self.state == "insensitive":
            return (
                "Self-check: nothing speaks against moving KV in this model, but a wrong turn would hardly be"
                f" seen ({far}; {when}). Facts are injected."
            )
        because = ""
        if self.why:
            because = f" It was not made sure with other tokens, since {self.why}."
            because += " `--self-check always` checks again."
        if self.position > self.allowed:
            because += " What follows a repeated token changes with its position: no rotation can mend that."
        return (
            "Self-check: injection is refused, since answers behind moved KV differ from those behind text "
            f"in this model ({far}; {when}).{because} Facts are prefilled as text, which is exact, and "
            "nothing is encoded. See 'The check at first start' in docs/operations.md."
        )


def passed_over(why: str) -> Verdict:
    """Of a check that was not carried out."""
    return Verdict("unknown", why=why)


def distance(
    text: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]], num_told: int
) -> float:
    """Root mean square of the differences in log-probability, over steps and tokens.

    num_told: tokens that the engine tells of a step; a token that was forced comes on top of them. One that
    `other` does not tell is there at most as likely as the last that it tells. Infinite where one tells what
    is no number. Raises ValueError where one has no step, or more than the other.
    """
    squares: list[float] = []
    for step, given in zip(text, other, strict=True):
        known = sorted(step, key=step.__getitem__, reverse=True)[:COMPARED]
        told = sorted(given.values(), reverse=True)[:num_told]
        squares += [
            (step[token] - given[token]) ** 2 if token in given else max(0.0, step[token] - told[-1]) ** 2
            for token in known
        ]
    if not squares:
        raise ValueError("the engine told no log-probabilities")
    if any(math.isnan(value) for step in (*text, *other) for value in step.values()):
        return math.inf
    return math.sqrt(sum(squares) / len(squares))


def judge(found: Sequence[Distances], dtype: str) -> Verdict:
    """The verdict on the medians of several trials. dtype: of the model, such as `bfloat16`.

    One trial in which injected KV is no finite distance from text refuses: no rounding does that.
    """
    own, moved, wrong, position = (
        median(column) if all(map(math.isfinite, column)) else math.inf for column in zip(*found, strict=True)
    )
    rounding = _ROUNDING.get(dtype.removeprefix("torch."), _ROUNDING["bfloat16"])
    allowed = max(rounding, _TIMES_NOISE * own)
    if dtype.removeprefix("torch.") != "float32":
        allowed = max(allowed, _OF_WRONG * wrong)
    state: State = "exact"
    if moved > allowed or math.isinf(max(own, moved, wrong)):
        state = "refused"
    elif wrong < _TIMES_ALLOWED * allowed:
        state = "insensitive"
    return Verdict(state, own, moved, wrong, position, allowed)
