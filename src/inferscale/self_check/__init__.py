"""The check at the first start with a model: does KV that was moved say what prefilled text says?

Segments are captured at one place of a pass and injected at another of a prompt. `rope` reads from the
configuration how keys have to be turned for that, and checks it against the engine's tables. This check asks
the engine itself, with real requests, before any fact is encoded. Where the answers differ, nothing is
injected: facts are prefilled as text, which is exact, and everybody is told.

The difficulty: KV depends on what stood before it, so KV from elsewhere is not the KV of a prefill, however
well it is moved. The way around it: a prompt of one token, repeated. Every position attends to positions
that are all the same, and the mean of equal values is that value, whatever the weights. So in every layer
all positions have the same state; their values are equal, and so are their keys but for the rotation. In such
a run moved KV and prefilled KV must agree, and only the rotation can be wrong:

    pass     x x x x x x x x x x x x        captured: all of it; a span of it; the same span, noted wrongly
    text     x x x x x x x x x x x x q…     prefilled
    own                                     all of it injected where it was captured
    moved    └span┘└span┘└span┘└span┘       the span injected at 0, n, 2n, …, each time turned otherwise
    wrong                                   the span as if it stood some blocks further on

The question q… is different words, whose queries weigh the x's by their turned keys. Compared are the most
likely next tokens and their log-probabilities behind it. `own` differs from text by the engine's rounding,
and by that of an int8 or E4M3 pool: the noise. `moved` must not differ by much more. `wrong` must: else the
comparison cannot see a wrong turn, and says so ("insensitive"; so it is for random weights, say). Three
tokens and lengths, and the median of the three, so that no single accident decides, unless it is no finite
number: that refuses. A refusal is made sure with three other tokens, and stays where they cannot be asked.

Where states depend on the position itself, as with learned positions, the premise does not hold, `moved`
differs and the model is refused; behind x·n and x·4n other tokens then follow, and the reason says so. An
attention sink does the same: its share falls with every further x, so a run's states are not equal, although
keys can be moved. Such models are refused as well: nothing here can tell them from those whose keys cannot be
moved.

The verdict is kept in the data folder (`remembered`), so that only the first start pays. Knows plans and
token ids. `conduct` yields requests and is sent what came back, so that the offline engine and the server's
event loop carry it out alike.
"""

from inferscale.self_check.trials import Probe, Seen, Subject, conduct
from inferscale.self_check.verdict import State, Verdict, passed_over

__all__ = ["Probe", "Seen", "State", "Subject", "Verdict", "conduct", "passed_over"]
