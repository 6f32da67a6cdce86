"""`inferscale bench locomo`: how right answers with injected facts are, beside those with the facts as text.

LoCoMo's questions (Maharana et al., 2024) are answered greedily in the modes of `asked`, for each number of
facts:

    none     no memory
    text     the facts are prefilled: the reference, once for each arrangement of the facts
    inject   the same prompt, the facts' KV injected; once for each policy

The modes differ in nothing but where the facts' KV comes from (see `fidelity`). All questions of a
conversation, with every number of facts, are in the engine together. Answers are kept in a file, by what
decides them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.bench import harness
from inferscale.bench.asked import (
    AskedConversation,
    Case,
    EncodeCost,
    Passes,
    check_injected,
    check_same,
    sized_for,
)
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.extracted import extract_facts
from inferscale.bench.fidelity import Arm, arms_of, asked_by
from inferscale.bench.harness import BenchRun, Row, Say
from inferscale.bench.judge import Judge
from inferscale.bench.locomo_report import write_report
from inferscale.bench.locomo_rows import LocomoRows, add_judged
from inferscale.bench.options import JudgeOptions, LocomoOptions
from inferscale.bench.policies import Policy
from inferscale.bench.questions import ADVERSARIAL, GoldConversation, GoldQuestion, spread
from inferscale.bench.record_cache import RecordCache, record_key
from inferscale.bench.spoken import prompt_builder
from inferscale.config import RetrievalConfig
from inferscale.errors import EngineError, ExtractionError
from inferscale.offline import GenerationRequest
from inferscale.prompt import PromptBuilder
from inferscale.retrieval import Embedder, open_embedder

_VERSION = 1
_SAID_EVERY = 100  # answers


class Answer(NamedTuple):
    """text: as the model gave it, stripped. is_cut: whether it ended at `max_tokens`."""

    text: str
    is_cut: bool


class Asked(NamedTuple):
    """One way to ask all questions. k: facts in a prompt, 0 for `none`."""

    arm: Arm
    k: int

    @property
    def reference(self) -> Asked:
        """The same facts in the same places, prefilled."""
        return Asked(self.arm.reference, self.k)


@dataclass
class AskedResult:
    """Of all questions in their order. costs: of each conversation's encoding."""

    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    prefilled_tokens: list[int] = field(default_factory=list)
    costs: list[EncodeCost] = field(default_factory=list)


@dataclass
class LocomoResults:
    """What was asked and answered. questions: with the number of their conversation. recalls: for each k, the
    share of a question's evidence among the facts found; None where it names no turn. num_facts, num_raw: of
    extracted facts, and of turns among them that were kept as they were said."""

    questions: list[tuple[int, GoldQuestion]] = field(default_factory=list)
    asked: dict[Asked, AskedResult] = field(default_factory=dict)
    recalls: dict[int, list[float | None]] = field(default_factory=dict)
    num_facts: int = 0
    num_raw: int = 0


class _Task(NamedTuple):
    """A question that one way asks, and where its answer goes."""

    asked: Asked
    place: int
    case: Case
    key: str


class LocomoMeasurement:
    """Asks conversations on one engine; what was answered is in `results`. total: answers of the whole run,
    for what `say` is told."""

    def __init__(
        self,
        engine: BenchEngine,
        prompts: PromptBuilder,
        policies: Sequence[Policy],
        options: LocomoOptions,
        cache: RecordCache,
        say: Say,
        embedder: Embedder,
        total: int = 0,
    ) -> None:
        self.results = LocomoResults()
        self.machine = [harness.engine(), harness.hardware()]
        self._engine = engine
        self._prompts = prompts
        self._arms = arms_of(policies)
        self._options = options
        self._cache = cache
        self._say = say
        self._embedder = embedder
        self._total = total
        self._num_done = 0

    def ask(self, conversation: GoldConversation) -> None:
        """Answer the conversation's questions in every arm. Raises InvalidInput for a k that does not fit,
        and EngineError where a request did not run as its mode says."""
        options = self._options
        questions = asked_questions(conversation, options)
        if options.facts == "extracted":
            conversation = self._extracted(conversation)
        with AskedConversation(
            self._engine,
            self._prompts,
            conversation,
            questions,
            k=max(options.ks),
            instruction=options.instruction,
            embedder=self._embedder,
            max_tokens=options.max_tokens,
        ) as asked:
            texts: dict[Asked, list[Case]] = {}
            for arm in self._arms:
                found: list[tuple[Asked, list[Case]]] = []
                passes: Passes | None = None
                for k in options.ks if arm.mode != "none" else (0,):
                    cases, passes = asked_by(asked, arm, k)
                    if arm.mode == "text":
                        texts[Asked(arm, k)] = cases
                    elif arm.mode == "inject":
                        check_same(texts[Asked(arm, k).reference], cases, conversation)
                    found.append((Asked(arm, k), cases))
                self._answer(asked, found, passes, conversation)
            for k in options.ks:
                found_by = texts[Asked(self._arms[0], k)]
                self.results.recalls.setdefault(k, []).extend(map(_recall, found_by))
            asked.forget()
        self.results.questions += [(conversation.number, question) for question in questions]

    def _extracted(self, conversation: GoldConversation) -> GoldConversation:
        """With facts in the place of turns."""
        said = {turn.text for turn in conversation.turns}
        self._say(f"{conversation.name}: extracting facts of {len(conversation.turns)} turns …")
        conversation = extract_facts(
            self._engine, self._prompts, conversation, self._embedder, self._cache, self.machine
        )
        num_raw = sum(turn.text in said for turn in conversation.turns)
        self.results.num_facts += len(conversation.turns)
        self.results.num_raw += num_raw
        self._say(f"{conversation.name}: {len(conversation.turns)} facts, {num_raw} of them turns as said")
        return conversation

    def _answer(
        self,
        asked: AskedConversation,
        found: Sequence[tuple[Asked, list[Case]]],
        passes: Passes | None,
        conversation: GoldConversation,
    ) -> None:
        """Answers to all cases; those that the cache does not have are generated, with the facts encoded."""
        answers: dict[Asked, dict[int, Answer]] = defaultdict(dict)
        left: list[_Task] = []
        for way, cases in found:
            for place, case in enumerate(cases):
                task = _Task(way, place, case, self._key(way, case))
                record = self._cache.get(task.key)
                if record is None:
                    left.append(task)
                else:
                    answers[way][place] = Answer(record["answer"], bool(record["is_cut"]))
        num = sum(len(cases) for _, cases in found)
        self._num_done += num - len(left)
        if left:
            asked.encode(passes)
            self._engine.reset_prefix_cache()
            for task, answer in self._generated(left, conversation):
                answers[task.asked][task.place] = answer
        for way, cases in found:
            result = self.results.asked.setdefault(way, AskedResult())
            result.answers += [answers[way][place] for place in range(len(cases))]
            result.prompt_tokens += [len(case.prompt) for case in cases]
            result.prefilled_tokens += [case.num_prefilled for case in cases]
            if passes is not None:
                result.costs.append(passes.cost)
        self._say(
            f"{conversation.name}, {found[0][0].arm.name}: {num} answers, {num - len(left)} of them from the "
            f"cache{self._progress()}"
        )

    def _generated(
        self, tasks: Sequence[_Task], conversation: GoldConversation
    ) -> Iterator[tuple[_Task, Answer]]:
        """Answers as they are done; each is in the cache before it comes out. Long prompts come last."""
        tasks = sorted(tasks, key=lambda task: task.asked.k)
        requests = (
            GenerationRequest(task.case.prompt, self._options.max_tokens, task.case.plan) for task in tasks
        )
        stream = self._engine.offline.stream(requests, max_in_flight=self._options.in_flight)
        with closing(stream) as finished:
            for num, (place, generation) in enumerate(finished, start=1):
                task = tasks[place]
                if generation.finish_reason == "error":
                    raise EngineError("The engine failed a request; its log (--verbose) says why.")
                check_injected(task.case, generation)
                answer = Answer(generation.text.strip(), generation.finish_reason == "length")
                record = {
                    "conversation": conversation.name,
                    "question": task.case.question.number,
                    "arm": task.asked.arm.name,
                    "k": task.asked.k,
                    "answer": answer.text,
                    "is_cut": answer.is_cut,
                }
                self._cache.put(task.key, record)
                self._num_done += 1
                if num % _SAID_EVERY == 0:
                    said = f"{conversation.name}, {task.asked.arm.name}: {num} of {len(tasks)}"
                    self._say(f"{said}{self._progress()}")
                yield task, answer

    def _progress(self) -> str:
        return f" ({self._num_done} of {self._total} in all)" if self._total else ""

    def _key(self, asked: Asked, case: Case) -> str:
        """Retriever, facts, order and instruction decide the prompt."""
        offline, arm = self._engine.offline, asked.arm
        parts = {
            "machine": self.machine,
            "model": offline.fingerprint,
            "pool_dtype": offline.connector.pool_dtype if arm.mode == "inject" else None,
            "mode": arm.mode,
            "policy": None if arm.policy is None else str(arm.policy),
            "k": asked.k,
            "question": case.question.text,
            "prompt": case.prompt,
            "segments": [] if case.plan is None else list(case.plan.table.keys),
            "max_tokens": self._options.max_tokens,
        }
        return record_key(_VERSION, parts)


class LocomoFiles(NamedTuple):
    """out: where rows are appended; cache: answers and verdicts; report: an HTML page. None: not written."""

    out: Path | None = None
    cache: Path | None = None
    report: Path | None = None


def asked_questions(conversation: GoldConversation, options: LocomoOptions) -> tuple[GoldQuestion, ...]:
    """The questions with what is said behind them besides the instruction."""
    return tuple(
        question._replace(note=options.adversarial_note) if question.category == ADVERSARIAL else question
        for question in spread(conversation.questions, options.num_questions)
    )


def num_answers(
    conversations: Sequence[GoldConversation], policies: Sequence[Policy], options: LocomoOptions
) -> int:
    """How many answers a run asks for."""
    ways = sum(1 if arm.mode == "none" else len(options.ks) for arm in arms_of(policies))
    return ways * sum(len(asked_questions(conversation, options)) for conversation in conversations)


def run_locomo(
    spec: EngineSpec,
    conversations: Sequence[GoldConversation],
    policies: Sequence[Policy],
    options: LocomoOptions,
    files: LocomoFiles,
    judging: JudgeOptions | None,
    say: Say,
) -> list[Row]:
    """Start the engine, ask all conversations, append rows and return them. Raises what `ask` raises.

    Facts are found with the default embedder, on the CPU: its vectors are the same beside every engine. A
    judge that fails costs the judged rows only.
    """
    embedder = open_embedder(None, "cpu", say)
    prompts = prompt_builder(spec.tokenizer or spec.model)
    spec = sized_for(spec, prompts, conversations, max(options.ks))
    cache = RecordCache(files.cache, "answer")
    run = BenchRun("locomo", spec.name, files.out)
    total = num_answers(conversations, policies, options)
    say(f"{total} answers are asked for. Starting the engine with {spec.name} …")
    with spec.open() as engine:
        run.config |= engine.describe()
        pool_dtype = engine.offline.connector.pool_dtype
        measurement = LocomoMeasurement(engine, prompts, policies, options, cache, say, embedder, total)
        for conversation in conversations:
            measurement.ask(conversation)
    results = measurement.results
    run.config |= _config(conversations, options, results, pool_dtype)
    LocomoRows(run, results).add_all()
    if judging is not None:
        _judge(run, results, Judge(judging, cache), say)
    if files.report is not None:
        write_report(run.rows, files.report)
        say(f"Report in {files.report}.")
    return run.rows


def _config(
    conversations: Sequence[GoldConversation],
    options: LocomoOptions,
    results: LocomoResults,
    pool_dtype: str,
) -> dict[str, Any]:
    """What all rows say of the run."""
    numbers = [question.category for _, question in results.questions]
    extracted = {"facts": results.num_facts, "turns_as_said": results.num_raw}
    return {
        "conversations": ",".join(str(conversation.number) for conversation in conversations),
        "file": conversations[0].name.partition("#")[0],
        "questions": sum(category != ADVERSARIAL for category in numbers),
        "adversarial_questions": numbers.count(ADVERSARIAL),
        "questions_per_conversation": options.num_questions,
        "categories": list(options.categories),
        "instruction": options.instruction,
        "adversarial_note": options.adversarial_note,
        "max_tokens": options.max_tokens,
        "facts": options.facts,
        "extracted": extracted if options.facts == "extracted" else None,
        "pool_dtype": pool_dtype,
        "retrieval": asdict(RetrievalConfig()),
        "baseline": "mode text of the same command: the same prompt ids, facts prefilled",
    }


def _judge(run: BenchRun, results: LocomoResults, judge: Judge, say: Say) -> None:
    def progress(num: int, of: int) -> None:
        if num % _SAID_EVERY == 0 or num == of:
            say(f"{num} of {of} answers judged")

    for style in judge.options.styles:
        say(f"Judging answers ({style}) …")
        try:
            add_judged(run, results, judge, style, progress)
        except ExtractionError as error:
            say(
                f"No rows of the judge ({style}): {error} Run the same command again: it goes on with the "
                "answers and verdicts that are in the cache."
            )
            return


def _recall(case: Case) -> float | None:
    evidence = case.question.evidence
    if not evidence:
        return None
    found = {str((fact.metadata or {}).get("dia_id")) for fact in case.found}
    return len(evidence & found) / len(evidence)
