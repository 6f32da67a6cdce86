"""`inferscale bench fidelity`: how close answers behind injected facts are to answers behind the same text.

Gold answers of LoCoMo are forced token by token (see `forced`) in the modes of `asked`:

    none     no memory
    text     the facts are prefilled: the reference, once for each arrangement of the facts
    inject   the same prompt, the facts' KV injected; once for each policy

A question's NLL is the mean over the tokens of its answer (without the end of turn); a row has the mean over
questions, so does KL(text ‖ mode). The modes differ in nothing but where the facts' KV comes from: the prefix
cache is emptied between them, and every injected request is checked to have had all of its facts injected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from inferscale.bench import harness
from inferscale.bench.asked import (
    AskedCases,
    AskedConversation,
    Case,
    EncodeCost,
    check_injected,
    check_same,
    sized_for,
)
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.fidelity_rows import FidelityRows
from inferscale.bench.forced import (
    ENGINE_ARGS,
    NUM_COMPARED,
    NUM_RETURNED,
    TokenScore,
    divergence,
    forced_requests,
    read_score,
)
from inferscale.bench.harness import BenchRun, Row, Say
from inferscale.bench.load import SAMPLING
from inferscale.bench.options import FidelityOptions
from inferscale.bench.policies import USUAL, Arrangement, Policy
from inferscale.bench.questions import GoldConversation, GoldQuestion, spread
from inferscale.bench.reference import Check, add_reference_checks
from inferscale.bench.score_cache import AnswerScore, ScoreCache, cache_key
from inferscale.bench.spoken import prompt_builder
from inferscale.chat_plan import Mode
from inferscale.config import RetrievalConfig
from inferscale.offline import GenerationRequest
from inferscale.prompt import PromptBuilder
from inferscale.retrieval import Embedder, open_embedder
from inferscale.tail import NO_TAIL, Tail


class Arm(NamedTuple):
    """One way to ask all questions. policy: of mode `inject`. arrangement: of mode `text`; of mode `none`
    that of the text which it is compared with."""

    mode: Mode
    policy: Policy | None = None
    arrangement: Arrangement = USUAL

    @property
    def name(self) -> str:
        if self.policy is not None:
            return f"inject {self.policy}"
        is_plain = self.mode != "text" or self.arrangement == USUAL
        return self.mode if is_plain else f"text {self.arrangement}"

    @property
    def reference(self) -> Arm:
        """The same facts in the same places, prefilled."""
        return Arm("text", None, self.arrangement if self.policy is None else self.policy.arrangement)

    @property
    def tail(self) -> Tail:
        """Facts that are recomputed."""
        return NO_TAIL if self.policy is None else self.policy.tail


@dataclass
class ArmResult:
    """Of all questions in their order. prompt_tokens, prefilled_tokens: of each prompt. ttfts_ms: of the
    first few. costs: of each conversation's encoding."""

    scores: list[AnswerScore] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    prefilled_tokens: list[int] = field(default_factory=list)
    ttfts_ms: list[float] = field(default_factory=list)
    costs: list[EncodeCost] = field(default_factory=list)


@dataclass
class FidelityResults:
    """What was measured. questions: with the number of their conversation. arms: with a score for each
    question. checks: what a reference shall compute as well: of the first `text` and of the first policy."""

    questions: list[tuple[int, GoldQuestion]] = field(default_factory=list)
    arms: dict[Arm, ArmResult] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)


def arms_of(policies: Sequence[Policy]) -> tuple[Arm, ...]:
    """The references, `none`, and the policies: the order in which they are measured. With `best-last` a
    question alone has the same prompt whatever the tail, so one reference serves all of these."""
    injected = [Arm("inject", policy) for policy in policies]
    texts = list(dict.fromkeys(arm.reference for arm in injected))
    return (*texts, Arm("none", None, texts[0].arrangement), *injected)


def asked_by(asked: AskedConversation, arm: Arm, k: int | None = None) -> AskedCases:
    """All questions in this way. k: facts in a prompt, all k by default."""
    if arm.policy is not None:
        return asked.injected(arm.policy, k)
    return asked.plain(arm.mode, k, arm.arrangement)


class FidelityMeasurement:
    """Asks conversations on one engine; what was measured is in `results`."""

    def __init__(
        self,
        engine: BenchEngine,
        prompts: PromptBuilder,
        policies: Sequence[Policy],
        options: FidelityOptions,
        cache: ScoreCache,
        say: Say,
        embedder: Embedder,
    ) -> None:
        self.results = FidelityResults()
        self._engine = engine
        self._prompts = prompts
        self._arms = arms_of(policies)
        self._options = options
        self._cache = cache
        self._say = say
        self._embedder = embedder
        self._machine = [harness.engine(), harness.hardware()]

    def ask(self, conversation: GoldConversation) -> None:
        """Score the conversation's questions in every arm. Raises InvalidInput for a k that does not fit, and
        EngineError where a request did not run as its mode says."""
        options = self._options
        questions = spread(conversation.questions, options.num_questions)
        is_first = not self.results.questions
        with AskedConversation(
            self._engine,
            self._prompts,
            conversation,
            questions,
            k=options.k,
            instruction=options.instruction,
            embedder=self._embedder,
        ) as asked:
            references: dict[Arm, _Reference] = {}
            for arm in self._arms:
                cases = asked_by(asked, arm)
                reference = None if arm.mode == "text" else references[arm.reference]
                if arm.mode == "inject":
                    assert reference is not None
                    check_same(reference.cases, cases.cases, conversation)
                scores = self._scores(asked, arm, cases, reference)
                if arm.mode == "text":
                    references[arm] = _Reference(cases.cases, scores)
                self._note(arm, cases, scores)
                if is_first:
                    self.results.arms[arm].ttfts_ms = self._timed(asked, cases)
                    self._choose_checks(arm, cases, scores)
                self._say(f"{conversation.name}, {arm.name}: {len(scores)} questions")
            asked.forget()
        self.results.questions += [(conversation.number, question) for question in questions]

    def _note(self, arm: Arm, cases: AskedCases, scores: Sequence[AnswerScore]) -> None:
        result = self.results.arms.setdefault(arm, ArmResult())
        result.scores += [replace(score, tops=[]) for score in scores]  # a megabyte for ten questions
        result.prompt_tokens += [len(case.prompt) for case in cases.cases]
        result.prefilled_tokens += [case.num_prefilled for case in cases.cases]
        if cases.passes is not None:
            result.costs.append(cases.passes.cost)

    def _choose_checks(self, arm: Arm, cases: AskedCases, scores: Sequence[AnswerScore]) -> None:
        """The first questions of `text` and of one policy; a reference takes long for those."""
        if arm.mode == "none" or any(check.mode == arm.mode for check in self.results.checks):
            return
        policy = None if arm.policy is None else str(arm.policy)
        jobs = () if cases.passes is None else tuple(cases.passes.jobs)
        pairs = list(zip(cases.cases, scores, strict=True))[: self._options.num_checked]
        self.results.checks += [
            Check(case, replace(score, tops=[]), arm.mode, policy, jobs) for case, score in pairs
        ]

    def _scores(
        self, asked: AskedConversation, arm: Arm, cases: AskedCases, reference: _Reference | None
    ) -> list[AnswerScore]:
        """Of all cases; those that the cache does not have are computed, with the facts encoded before."""
        compared: Sequence[Case | None] = [None] * len(cases.cases) if reference is None else reference.cases
        keys = [self._key(arm, *pair) for pair in zip(cases.cases, compared, strict=True)]
        scores = {place: score for place, key in enumerate(keys) if (score := self._cache.get(key))}
        wanted = [place for place in range(len(keys)) if place not in scores]
        if wanted:
            asked.encode(cases.passes, self._say)
            self._engine.reset_prefix_cache()
            for place, parts in self._forced(cases.cases, wanted, arm.mode):
                tops = None if reference is None else reference.scores[place].tops
                scores[place] = _answer_score(cases.cases[place], parts, tops)
                self._cache.put(keys[place], scores[place])
        return [scores[place] for place in range(len(keys))]

    def _key(self, arm: Arm, case: Case, reference: Case | None) -> str:
        offline = self._engine.offline
        return cache_key(
            machine=self._machine,
            model=offline.fingerprint,
            pool_dtype=offline.connector.pool_dtype if arm.mode == "inject" else None,
            mode=arm.mode,
            policy=None if arm.policy is None else str(arm.policy),
            prompt=case.prompt,
            answer=case.answer_ids,
            segments=[] if case.plan is None else list(case.plan.table.keys),
            reference=None if reference is None else reference.prompt,
        )

    def _forced(
        self, cases: Sequence[Case], places: Sequence[int], mode: Mode
    ) -> Iterator[tuple[int, list[TokenScore]]]:
        """The scores of each answer's tokens, as the answers are done."""
        num = NUM_COMPARED if mode == "text" else NUM_RETURNED
        sent: list[tuple[int, int]] = []

        def requests() -> Iterator[GenerationRequest]:
            for place in places:
                case = cases[place]
                for number, request in enumerate(
                    forced_requests(case.prompt, case.answer_ids, case.plan, num)
                ):
                    sent.append((place, number))
                    yield request

        parts: dict[int, dict[int, TokenScore]] = {}
        stream = self._engine.offline.stream(requests(), max_in_flight=self._options.in_flight)
        with closing(stream) as finished:
            for index, generation in finished:
                place, number = sent[index]
                case = cases[place]
                check_injected(case, generation)
                done = parts.setdefault(place, {})
                done[number] = read_score(generation, case.answer_ids[number])
                if len(done) == len(case.answer_ids):
                    yield place, [done[number] for number in range(len(done))]
                    del parts[place]

    def _timed(self, asked: AskedConversation, cases: AskedCases) -> list[float]:
        """Milliseconds to the first token of the first questions, each alone, with an empty prefix cache."""
        timed = cases.cases[: self._options.num_timed]
        if not timed:
            return []
        asked.encode(cases.passes, self._say)
        times = []
        for case in (timed[0], *timed):  # the first one warms up
            self._engine.reset_prefix_cache()
            request = GenerationRequest(case.prompt, 1, case.plan, sampling=SAMPLING)
            (generation,) = self._engine.offline.generate([request])
            check_injected(case, generation)
            times.append(generation.ttft_s * 1e3)
        return times[1:]


def run_fidelity(
    spec: EngineSpec,
    conversations: Sequence[GoldConversation],
    policies: Sequence[Policy],
    options: FidelityOptions,
    out: Path | None,
    cache_path: Path | None,
    say: Say,
) -> list[Row]:
    """Start the engine, ask all conversations, append rows and return them. Raises what `ask` raises.

    Facts are found with the default embedder, on the CPU: its vectors are the same beside every engine.
    """
    embedder = open_embedder(None, "cpu", say)
    prompts = prompt_builder(spec.tokenizer or spec.model)
    spec = replace(spec, extra={**ENGINE_ARGS, **spec.extra})
    spec = sized_for(spec, prompts, conversations, options.k)
    cache = ScoreCache(cache_path)
    run = BenchRun("fidelity", spec.name, out)
    say(f"Starting the engine with {spec.name} …")
    with spec.open() as engine:
        run.config |= engine.describe()
        pool_dtype = engine.offline.connector.pool_dtype
        measurement = FidelityMeasurement(engine, prompts, policies, options, cache, say, embedder)
        for conversation in conversations:
            measurement.ask(conversation)
    results = measurement.results
    run.config |= {
        "conversations": ",".join(str(conversation.number) for conversation in conversations),
        "file": conversations[0].name.partition("#")[0],
        "questions": len(results.questions),
        "questions_per_conversation": options.num_questions,
        "categories": list(options.categories),
        "instruction": options.instruction,
        "pool_dtype": pool_dtype,
        "retrieval": asdict(RetrievalConfig()),
        "baseline": "mode text of the same command: the same prompt ids, facts prefilled",
    }
    FidelityRows(run, results, options.k, pool_dtype).add_all()
    if results.checks:
        say(f"Computing {len(results.checks)} answers with transformers …")
        add_reference_checks(run, spec.model, results.checks, options.k)
    return run.rows


class _Reference(NamedTuple):
    cases: list[Case]
    scores: list[AnswerScore]


def _answer_score(
    case: Case, parts: Sequence[TokenScore], references: Sequence[TokenScore] | None
) -> AnswerScore:
    compared = (
        []
        if references is None
        else [
            divergence(reference, part, token)
            for reference, part, token in zip(references, parts, case.answer_ids, strict=True)
        ]
    )
    return AnswerScore(
        [part.logprob for part in parts],
        [part.best_id for part in parts],
        [one.kl for one in compared],
        [one.missing for one in compared],
        list(parts) if references is None else [],
    )
