"""Questions of a conversation as prompts, the way `MemoryLLM` makes them, in every mode on one engine.

All modes have the same facts in the same order from the same retriever: the default one, asked for the
question alone. Prompts of mode `text` are those of every policy with the same arrangement, token by token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.harness import Say
from inferscale.bench.policies import USUAL, Arrangement, Policy
from inferscale.bench.questions import GoldConversation, GoldQuestion
from inferscale.bench.workload import Ids
from inferscale.catalog_url import IN_FOLDER
from inferscale.chat_plan import ChatPlanner, Mode, Residents
from inferscale.config import MemoryConfig
from inferscale.encode_jobs import without_repetitions
from inferscale.encode_runner import EncodeRunner
from inferscale.encoder import EncodeJob, Encoder
from inferscale.errors import EngineError, InvalidInput
from inferscale.facts import Fact, Scope
from inferscale.memory import Memory
from inferscale.offline import Generation
from inferscale.plan import Order, Plan
from inferscale.prompt import PromptBuilder
from inferscale.retrieval import Embedder
from inferscale.windows import WindowPolicy

_USER = "bench"
_SCOPE = Scope(user_id=_USER)
_QUESTION_TOKENS = 1024  # of a question, its instruction and its answer, with a margin


class Case(NamedTuple):
    """A question in one mode. answer_ids: of its gold answer. num_prefilled: tokens that must be computed.
    found: facts that the search found, best first."""

    question: GoldQuestion
    prompt: Ids
    answer_ids: Ids
    plan: Plan | None
    num_prefilled: int
    found: tuple[Fact, ...] = ()


class EncodeCost(NamedTuple):
    """computed_tokens: of all passes, stored_tokens: of the facts that they capture."""

    computed_tokens: int
    stored_tokens: int


class RememberingEmbedder:
    """Embeds a text once: every mode and policy searches for the same questions."""

    def __init__(self, embedder: Embedder) -> None:
        self.name = embedder.name
        self.dim = embedder.dim
        self._embedder = embedder
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors.update(zip(new, self._embedder.embed(new), strict=True))
        return np.stack([self._vectors[text] for text in texts])


class Passes(NamedTuple):
    """What brings the facts of a conversation into the pool, in the way of one window policy."""

    encoder: Encoder
    jobs: list[EncodeJob]

    @property
    def cost(self) -> EncodeCost:
        """Of the facts' passes, as if each computed all of its tokens; of a mixed one both directions."""
        of_facts = [job for job in self.jobs if job.num_fact_tokens or job.part]
        return EncodeCost(
            sum(len(job.token_ids) for job in of_facts), sum(job.num_fact_tokens for job in of_facts)
        )

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(span.key for job in self.jobs for span in job.captures))


class AskedCases(NamedTuple):
    """Questions in one mode. passes: what must be encoded before they are asked, if anything."""

    cases: list[Case]
    passes: Passes | None


def sized_for(
    spec: EngineSpec, prompts: PromptBuilder, conversations: Sequence[GoldConversation], k: int
) -> EngineSpec:
    """An engine with room for the largest conversation and the longest prompt."""
    head = len(prompts.anchor_ids)
    segments: list[int] = []
    longest = 0
    for conversation in conversations:
        facts = (Fact("", 0, Scope(), turn.text, turn.speaker, turn.said_at) for turn in conversation.turns)
        lengths = [head, *(len(prompts.fact_ids(fact)) for fact in facts)]
        segments = max(segments, lengths, key=sum)
        longest = max(longest, head + sum(sorted(lengths)[-k:] if k else ()) + _QUESTION_TOKENS)
    return spec.sized(segments, longest)


def check_injected(case: Case, generation: Generation) -> None:
    """Raise EngineError where facts of a plan were prefilled."""
    if case.plan is None:
        return
    outcome = generation.outcome or {}
    supplied = int(outcome.get("injected_tokens", 0)) + int(outcome.get("cached_tokens", 0))
    planned = len(case.prompt) - case.num_prefilled
    if supplied < planned:
        reason = outcome.get("reason") or outcome.get("rejected") or "not all is in the pool"
        raise EngineError(
            f"Of {planned} memory tokens {supplied} were injected or found again ({reason}); nothing is "
            "reported of requests that fell back to text. Raise --pool-size."
        )


def check_same(text: Sequence[Case], inject: Sequence[Case], conversation: GoldConversation) -> None:
    """Raise EngineError unless the prompts are the same: the comparison is of KV alone."""
    if [case.prompt for case in text] != [case.prompt for case in inject]:
        raise EngineError(
            f"Prompts of {conversation.name} differ between text and inject; this is a mistake in InferScale."
        )


class AskedConversation:
    """A conversation whose turns are facts of one scope, and questions about it.

    k: most facts of a prompt. instruction: put behind every question, on a line of its own, in front of the
    question's own note; the retriever sees neither. max_tokens: room for an answer; None: for the gold one.
    """

    def __init__(
        self,
        engine: BenchEngine,
        prompts: PromptBuilder,
        conversation: GoldConversation,
        questions: Sequence[GoldQuestion],
        *,
        k: int,
        embedder: Embedder,
        instruction: str = "",
        max_tokens: int | None = None,
    ) -> None:
        if k > len(conversation.turns):
            raise InvalidInput(
                f"k={k} was asked for; {conversation.name} has {len(conversation.turns)} turns. Lower --k."
            )
        self.conversation = conversation
        self.questions = tuple(questions)
        self._engine = engine
        self._prompts = prompts
        self._k = k
        self._instruction = instruction
        self._max_tokens = max_tokens
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="inferscale-bench-"))
        self._memory = Memory(MemoryConfig(folder, catalog=IN_FOLDER), embedder=RememberingEmbedder(embedder))
        self._stack.callback(self._memory.close)
        self._memory.add(list(conversation.turns), user_id=_USER)
        self._passes: dict[WindowPolicy, Passes] = {}
        self._encoded: Passes | None = None

    def plain(self, mode: Mode, k: int | None = None, arrangement: Arrangement = USUAL) -> AskedCases:
        """All questions without injection: mode `none` or `text`. k: facts in a prompt, all k by default."""
        policy = Policy(Policy.default().window, arrangement.tail, arrangement.order)
        return AskedCases(self._cases(self._encoder(policy), mode, policy, k), None)

    def injected(self, policy: Policy, k: int | None = None) -> AskedCases:
        """All questions with facts injected; nothing is encoded yet. Policies of one window share its KV."""
        if policy.window not in self._passes:
            encoder = self._encoder(policy)
            jobs = [*encoder.new_jobs(_SCOPE), encoder.head_job(self._prompts.head_ids())]
            self._passes[policy.window] = Passes(encoder, jobs)
        passes = self._passes[policy.window]
        return AskedCases(self._cases(passes.encoder, "inject", policy, k), passes)

    def encode(self, passes: Passes | None, say: Say | None = None) -> None:
        """Bring the KV of these passes into the pool, and take out what was brought there before.

        say: told how much there is to do, before it is done. Raises EngineError where it does not fit.
        """
        if passes is None or passes is self._encoded:
            return
        self.forget()
        self._encoded = passes
        if say is not None:
            jobs = without_repetitions(passes.jobs)
            num_facts, name = sum(job.num_facts for job in jobs), self.conversation.name
            say(f"{name}: encoding {num_facts} facts in {len(jobs)} passes …")
        offline = self._engine.offline
        done = EncodeRunner(offline, passes.encoder).run(passes.jobs)
        offline.order(Order("stats"))  # a worker's last report may come with the next step
        keys = passes.keys
        there = offline.residency.resident(keys)
        if done.num_failed or not all(there):
            raise EngineError(
                f"{max(done.num_failed, there.count(False))} of {len(keys)} segments are not in the pool "
                "after encoding; raise --pool-size."
            )

    def forget(self) -> None:
        """Empty the pool of what was encoded here."""
        if self._encoded is not None:
            self._engine.offline.order(Order("forget", tuple(self._encoded.keys)))
            self._encoded = None

    def _encoder(self, policy: Policy) -> Encoder:
        engine = self._engine.offline
        encoder = Encoder(
            self._memory.catalog, self._prompts, engine.fingerprint, policy.window, engine.max_model_len - 1
        )
        encoder.encodings_of += f"+{policy.window}"  # the catalog has one encoding of a fact for each name
        return encoder

    def _cases(self, encoder: Encoder, mode: Mode, policy: Policy, k: int | None) -> list[Case]:
        max_model_len = self._engine.offline.max_model_len
        planner = ChatPlanner(
            self._memory, encoder, max_model_len, lambda _, __, keys: Residents(frozenset(keys))
        )
        num = self._k if k is None else k
        return [self._case(planner, question, mode, policy, num) for question in self.questions]

    def _case(self, planner: ChatPlanner, question: GoldQuestion, mode: Mode, policy: Policy, k: int) -> Case:
        answer = self._prompts.data_ids(question.answer)
        room = len(answer) if self._max_tokens is None else self._max_tokens
        told = " ".join(part for part in (self._instruction, question.note) if part)
        said = f"{question.text}\n{told}" if told else question.text
        draft = self._prompts.draft([{"role": "user", "content": said}])
        draft.question = question.text
        prepared = planner.prepare(
            draft, _SCOPE, k, mode, policy.tail, room, caller_salt=str(policy), order=policy.order
        )
        choice, plan = prepared.choice, prepared.plan
        if choice.num_left_out:
            raise InvalidInput(
                f"{k} facts do not fit into max_model_len={planner.max_model_len} with a question of "
                f"{self.conversation.name}. Lower --k or raise --max-model-len."
            )
        if choice.missing:
            raise EngineError(f"{len(choice.missing)} turns of {self.conversation.name} cannot be encoded.")
        num_injected = 0 if plan is None else sum(plan.table.lengths)
        prompt = tuple(prepared.prompt.token_ids)
        found = tuple(hit.fact for hit in prepared.hits)
        return Case(question, prompt, answer, plan, len(prompt) - num_injected, found)

    def close(self) -> None:
        """May be called twice; the pool is emptied by `forget`, which needs a running engine."""
        self._stack.close()

    def __enter__(self) -> AskedConversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
