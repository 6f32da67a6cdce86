"""`bench locomo` on an engine without vLLM whose answers say where the facts' KV came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fake_engine import FakeOffline
from fakes import WordEmbedder
from inferscale.bench import locomo
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.fidelity import Arm
from inferscale.bench.harness import BenchRun, Row
from inferscale.bench.judge import Judge
from inferscale.bench.locomo import Asked, LocomoFiles, LocomoMeasurement, num_answers, run_locomo
from inferscale.bench.locomo_report import locomo_table, write_report
from inferscale.bench.locomo_rows import LocomoRows, add_judged
from inferscale.bench.options import JudgeOptions, LocomoOptions
from inferscale.bench.plots import plot_runs
from inferscale.bench.policies import Policy, parse_policies
from inferscale.bench.questions import GoldConversation, read_gold
from inferscale.bench.record_cache import RecordCache
from inferscale.bench.report import report
from inferscale.errors import EngineError, InvalidInput
from inferscale.offline import Finished, Generation, GenerationRequest
from inferscale.prompt import PromptBuilder
from locomo_file import SAID, write_locomo
from test_prompt import CHATML, tokenizer_with

DECODE = tokenizer_with(CHATML).decode
POLICIES = "alone; sliding(2,2)+tail1"
KS = (2, 4)
ANSWERS = {
    "Where does Ana live?": {"none": "Paris", "text": "Oslo", "inject": "Oslo"},
    "How many dogs has Ben?": {"none": "2", "text": "two", "inject": "2"},
    "When did Ana move?": {"none": "May", "text": "8 May 2023", "inject": "May 2023"},
    "When was Ben in Rome?": {"none": "1999", "text": "Not mentioned.", "inject": "in 1999"},
    "What might Ben like?": {"none": "cats", "text": "dogs", "inject": "snow"},
}
NUM = len(ANSWERS)


def is_in_time(ids: Sequence[int]) -> bool:
    prompt = DECODE(list(ids))
    places = [prompt.find(text) for _, text in SAID if text in prompt]
    return places == sorted(places)


class Killed(BaseException):
    """Ends a run in the middle."""


class AnsweringOffline(FakeOffline):
    """killed_after: answers until the end comes."""

    def __init__(self, *, killed_after: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.step_tokens = 64
        self.answered: list[GenerationRequest] = []
        self.encoded: list[GenerationRequest] = []
        self.spoils: Callable[[Sequence[int]], bool] = lambda ids: False
        self.bounds: list[Any] = []
        self._killed_after = killed_after
        self._decode = tokenizer_with(CHATML).decode

    def stream(self, requests: Iterable[GenerationRequest], **bounds: Any) -> Generator[Finished, None, None]:
        self.bounds.append(bounds.get("max_in_flight"))
        for place, request in enumerate(requests):
            yield Finished(place, self._answer(request))

    def order(self, order: Any) -> dict[str, Any]:
        for key in order.keys:
            self.pool.pop(key, None)
        return super().order(order)

    def _answer(self, request: GenerationRequest) -> Generation:
        done = super()._answer(request)
        if request.plan is not None and request.plan.captures:
            self.encoded.append(request)
            return done
        if request.plan is not None and request.plan.order is not None:
            return done
        if len(self.answered) == self._killed_after:
            raise Killed
        self.answered.append(request)
        said = self._decode(list(request.token_ids))
        (question,) = (text for text in ANSWERS if text in said)
        mode = "inject" if request.plan is not None else "text" if len(request.token_ids) > 150 else "none"
        if mode == "text" and self.spoils(request.token_ids):
            mode = "none"
        is_cut = mode == "none" and question.startswith("Where")
        reason = "length" if is_cut else "stop"
        return replace(done, text=f" {ANSWERS[question][mode]}\n", finish_reason=reason)


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(tokenizer_with(CHATML))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two conversations whose first question has evidence that the search finds, the third one half of it."""
    path = write_locomo(tmp_path)
    samples = json.loads(path.read_text())
    for sample in samples:
        for place, evidence in enumerate((["D1:1"], ["D9:9"], ["D1:1", "D1:4"], ["D1:6"])):
            sample["qa"][place]["evidence"] = evidence
    path.write_text(json.dumps(samples))
    return path


@pytest.fixture
def conversations(file: Path) -> list[GoldConversation]:
    return [read_gold(file, number, LocomoOptions().categories, with_adversarial=True) for number in (1, 2)]


def engine_of(**options: Any) -> tuple[AnsweringOffline, BenchEngine]:
    offline = AnsweringOffline(**options)
    return offline, BenchEngine(offline, EngineSpec("some/tiny", pool_size_bytes=2**20))  # type: ignore[arg-type]


def measurement(
    engine: BenchEngine, prompts: PromptBuilder, cache: RecordCache | None = None, **options: Any
) -> LocomoMeasurement:
    policies = parse_policies(options.pop("policies", POLICIES))
    chosen = LocomoOptions(**{"ks": KS, **options})
    cache = RecordCache(None, "answer") if cache is None else cache
    return LocomoMeasurement(engine, prompts, policies, chosen, cache, lambda text: None, WordEmbedder())


def arm_of(policy: str) -> Arm:
    chosen = Policy.parse(policy)
    return Arm("inject", chosen)


def test_every_way_answers_every_question(
    prompts: PromptBuilder, conversations: list[GoldConversation]
) -> None:
    offline, engine = engine_of()
    one = measurement(engine, prompts, in_flight=7)
    for conversation in conversations:
        one.ask(conversation)
    results = one.results
    assert [number for number, _ in results.questions] == [1] * NUM + [2] * NUM
    assert set(results.asked) == {
        Asked(Arm("none"), 0),
        *(Asked(Arm("text"), k) for k in KS),
        *(Asked(arm_of(policy), k) for policy in ("alone", "sliding(2,2)+tail1") for k in KS),
    }
    num = num_answers(conversations, parse_policies(POLICIES), LocomoOptions(KS))
    assert len(offline.answered) == num - NUM  # without memory both conversations have the same prompts
    for asked, result in results.asked.items():
        expected = [ANSWERS[question.text][asked.arm.mode] for _, question in results.questions]
        assert [answer.text for answer in result.answers] == expected
        assert len(result.prompt_tokens) == len(result.prefilled_tokens) == 2 * NUM
        assert any(answer.is_cut for answer in result.answers) == (asked.arm.mode == "none")
    assert 7 in offline.bounds
    # Each policy's facts are encoded once a conversation, whatever the numbers of facts.
    captured = [span.key for request in offline.encoded for span in request.plan.captures[1:]]  # type: ignore[union-attr]
    assert len(captured) == 2 * 2 * 6
    assert offline.pool == {}


def test_an_order_has_text_of_its_own(prompts: PromptBuilder, conversations: list[GoldConversation]) -> None:
    """Each injected answer is beside the one behind the same prompt as text."""
    offline, engine = engine_of()
    policies = "alone; alone+tail1+chronological; sliding(2,2)+tail1+chronological"
    offline.spoils = is_in_time
    one = measurement(engine, prompts, policies=policies)
    one.ask(conversations[0])
    texts = {asked.arm.name for asked in one.results.asked if asked.arm.mode == "text"}
    assert texts == {"text", "text tail1+chronological"}
    for asked in one.results.asked:
        assert asked.reference in one.results.asked or asked.arm.mode == "none"
    shared = {"questions": 4, "adversarial_questions": 1, "conversations": "1", "facts": "turns"}
    made = BenchRun("locomo", "tiny", None, shared)
    LocomoRows(made, one.results).add_all()
    found = {
        (row["metric"], config.get("policy") or config.get("arrangement")): row
        for row in made.rows
        for config in (row["config"],)
        if row["k"] == 4
    }
    f1 = {name: row["p50"] for (metric, name), row in found.items() if metric == "f1"}
    other = "tail1+chronological"
    assert f1[None] != f1[other]
    for policy, text in (("alone", None), (f"alone+{other}", other), (f"sliding(2,2)+{other}", other)):
        row = found["delta_f1", policy]
        assert row["p50"] == pytest.approx(f1[policy] - f1[text], abs=2e-4)
        assert row["config"].get("compared_with") == (None if text is None else f"text {other}")
    num = num_answers(conversations[:1], parse_policies(policies), LocomoOptions(KS))
    assert num == NUM * (1 + 5 * len(KS))
    shown = locomo_table(made.rows)
    assert f"| 4 | text {other} |" in shown


def test_category_5_may_decline(prompts: PromptBuilder, conversations: list[GoldConversation]) -> None:
    offline, engine = engine_of()
    measurement(engine, prompts, instruction="Briefly.", adversarial_note="Or decline.").ask(conversations[0])
    decode = tokenizer_with(CHATML).decode
    for request in offline.answered:
        said = decode(list(request.token_ids))
        assert ("Ben in Rome?\nBriefly. Or decline." in said) == ("Ben in Rome?" in said)
        assert "?\nBriefly." in said
        assert request.max_tokens == 32
        assert request.temperature == 0


def test_recall_of_the_evidence(prompts: PromptBuilder, conversations: list[GoldConversation]) -> None:
    _, engine = engine_of()
    one = measurement(engine, prompts, ks=(1, 6))
    one.ask(conversations[0])
    where, dogs, when, rome, like = one.results.recalls[6]
    assert (where, dogs, when, rome, like) == (1.0, None, 1.0, 1.0, None)
    assert one.results.recalls[1][2] in (0.0, 0.5)  # one fact is half of the evidence at most


def test_a_run_that_was_killed_goes_on_where_it_was(
    prompts: PromptBuilder, conversations: list[GoldConversation], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    _, engine = engine_of(killed_after=23)
    with pytest.raises(Killed):
        measurement(engine, prompts, RecordCache(path, "answer")).ask(conversations[0])
    assert len(path.read_text().splitlines()) == 23
    path.write_text(path.read_text()[:-9])  # in the middle of a line
    total = num_answers(conversations[:1], parse_policies(POLICIES), LocomoOptions(KS))

    offline, engine = engine_of()
    one = measurement(engine, prompts, RecordCache(path, "answer"))
    one.ask(conversations[0])
    assert len(offline.answered) == total - 22
    _, fresh = engine_of()
    whole = measurement(fresh, prompts)
    whole.ask(conversations[0])
    assert one.results == whole.results

    offline, engine = engine_of()
    measurement(engine, prompts, RecordCache(path, "answer"), policies=f"{POLICIES}; window(1)").ask(
        conversations[0]
    )
    assert {str(request.plan.caller_salt) for request in offline.answered if request.plan} == {"window(1)"}
    assert len(offline.answered) == NUM * len(KS)


@pytest.mark.parametrize(
    "changed", [{"max_tokens": 8}, {"instruction": "Be brief."}, {"ks": (2, 3)}, {"adversarial_note": ""}]
)
def test_what_decides_an_answer_is_in_its_key(
    prompts: PromptBuilder, conversations: list[GoldConversation], changed: dict[str, Any]
) -> None:
    cache = RecordCache(None, "answer")
    _, engine = engine_of()
    measurement(engine, prompts, cache).ask(conversations[0])
    offline, engine = engine_of()
    measurement(engine, prompts, cache, **changed).ask(conversations[0])
    assert offline.answered


def test_a_fact_that_is_not_injected_is_an_error(
    prompts: PromptBuilder, conversations: list[GoldConversation]
) -> None:
    _, engine = engine_of(loses=True)
    with pytest.raises(EngineError, match="fell back to text"):
        measurement(engine, prompts).ask(conversations[0])
    _, engine = engine_of()
    with pytest.raises(InvalidInput, match="k=9 was asked for"):
        measurement(engine, prompts, ks=(2, 9)).ask(conversations[0])


class FakeExtraction:
    """Finds one fact in every part: what its first line says."""

    num_asked = 0

    def __init__(self, *_: Any) -> None:
        pass

    def complete(self, messages: Any, schema: Any, max_tokens: int, temperature: float = 0.0) -> Any:
        type(self).num_asked += 1
        return {"facts": [{"text": "Ana lives in Oslo.", "line": 1}], "nothing": False}


def test_extracted_facts_take_the_place_of_turns(
    prompts: PromptBuilder, conversations: list[GoldConversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale.bench.extracted.EngineExtraction", FakeExtraction)
    cache = RecordCache(None, "answer")
    for num_asked in (1, 1):  # the second time, the answer is known
        _, engine = engine_of()
        one = measurement(engine, prompts, cache, ks=(1,), facts="extracted", policies="alone")
        one.ask(conversations[0])
        assert FakeExtraction.num_asked == num_asked
    assert one.results.recalls[1][0] == 1.0  # a fact has the evidence id of its turn
    assert (one.results.num_facts, one.results.num_raw) == (1, 0)
    with_fact = [text for text in one.results.asked if text.k == 1]
    assert len(with_fact) == 2


# rows and reports ---------------------------------------------------------------------------------


@pytest.fixture
def run(prompts: PromptBuilder, conversations: list[GoldConversation]) -> tuple[BenchRun, Any]:
    _, engine = engine_of()
    one = measurement(engine, prompts)
    for conversation in conversations:
        one.ask(conversation)
    shared = {
        "questions": 8, "adversarial_questions": 2, "conversations": "1,2", "facts": "turns",
        "command": "inferscale bench <locomo>", "pool_dtype": "auto",
    }  # fmt: skip
    made = BenchRun("locomo", "tiny & small", None, shared)
    LocomoRows(made, one.results).add_all()
    return made, one.results


def rows_of(run: BenchRun, policy: str | None, k: int) -> dict[str, Row]:
    return {
        row["metric"]: row
        for row in run.rows
        if row["k"] == k and row["config"].get("policy") == policy and row["config"].get("tail") == "0"
    }


def test_rows(run: tuple[BenchRun, Any]) -> None:
    made, _ = run
    text, none, inject = rows_of(made, None, 4), rows_of(made, None, 0), rows_of(made, "alone", 4)
    assert text["f1"]["p50"] == pytest.approx((1 + 0 + 1 + 1) / 4)
    assert none["f1"]["p50"] == pytest.approx((0 + 1 + 2 * 1 / 4 + 0) / 4)
    assert inject["f1"]["p50"] == pytest.approx((1 + 1 + 2 * 2 / 5 + 0) / 4, abs=1e-4)
    assert inject["f1"]["config"]["by_category"] == {"2": 0.8, "3": 0.0, "4": 1.0}  # 5 is not among them
    assert inject["delta_f1"]["p50"] == pytest.approx((0 + 1 - 0.2 - 1) / 4, abs=1e-4)
    low, high = inject["delta_f1"]["ci95"]
    assert low < inject["delta_f1"]["p50"] < high
    # Both conversations have the same answers, so drawing conversations changes nothing.
    assert inject["delta_f1"]["config"]["ci95_by_conversation"] == [inject["delta_f1"]["p50"]] * 2
    assert "mcnemar" not in inject["delta_f1"]["config"]
    mcnemar = inject["delta_exact_match"]["config"]["mcnemar"]
    assert mcnemar == {"only_inject": 2, "only_text": 4, "p_value": 0.6875}
    assert "delta_f1" not in text
    assert inject["same_answers"]["p50"] == 0.2
    assert none["cut_answers"]["p50"] == 0.2
    assert 0 < inject["prefilled_share"]["p50"] < 1
    assert inject["tokens_per_stored_token"]["p50"] > 1
    (tailed,) = (
        row
        for row in made.rows
        if row["config"].get("policy") == "sliding(2,2)+tail1"
        and (row["metric"], row["k"]) == ("prefilled_share", 4)
    )
    assert inject["prefilled_share"]["p50"] < tailed["p50"]


def test_category_5_is_reported_apart(run: tuple[BenchRun, Any]) -> None:
    made, _ = run
    found = {key: rows_of(made, *key) for key in ((None, 4), (None, 0), ("alone", 4))}
    rights = {key: rows["adversarial_accuracy"]["p50"] for key, rows in found.items()}
    assert rights == {(None, 4): 1.0, (None, 0): 0.0, ("alone", 4): 0.0}
    delta = found["alone", 4]["delta_adversarial_accuracy"]
    assert delta["config"]["mcnemar"] == {"only_inject": 0, "only_text": 2, "p_value": 0.5}


def test_recall_rows_leave_out_what_has_no_evidence(run: tuple[BenchRun, Any]) -> None:
    made, _ = run
    recall = {row["k"]: row for row in made.rows if row["metric"] == "recall"}
    assert set(recall) == set(KS)
    assert recall[4]["config"]["recall_questions"] == 4
    assert recall[4]["config"]["without_evidence"] == 4


def test_rows_of_the_default_say_so(
    prompts: PromptBuilder, conversations: list[GoldConversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale.bench.locomo_rows.ServerConfig", lambda: SimpleNamespace(top_k=4))
    _, engine = engine_of()
    one = measurement(engine, prompts, policies=f"{Policy.default()};alone")
    one.ask(conversations[0])

    def defaults(**config: Any) -> set[tuple[str, int]]:
        made = BenchRun("locomo", "tiny", None, config)
        LocomoRows(made, one.results).add_all()
        return {(row["config"]["policy"], row["k"]) for row in made.rows if row["config"].get("default")}

    assert defaults() == {(str(Policy.default()), 4)}
    assert defaults(pool_dtype="int8") == defaults(facts="extracted") == set()


def server() -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        said = json.loads(request.content)["messages"][1]["content"]
        expected, answer = (line.partition(": ")[2] for line in said.splitlines()[1:])
        text = json.dumps({"reason": "", "correct": expected.lower() == answer.lower() or answer == "two"})
        return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})

    return httpx.Client(transport=httpx.MockTransport(handle))


def test_judged_rows_and_the_page(
    run: tuple[BenchRun, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, results = run
    judge = Judge(JudgeOptions("http://there/v1", "big"), RecordCache(None, "answer"), http_client=server())
    for style in judge.options.styles:
        add_judged(made, results, judge, style)
    text, inject = rows_of(made, None, 4), rows_of(made, "alone", 4)
    assert text["judged_strict"]["p50"] == 1.0
    assert inject["judged_generous"]["p50"] == 0.5
    assert inject["delta_judged_strict"]["config"]["mcnemar"]["only_text"] == 4
    assert inject["judged_strict"]["config"]["judge"] == "big"

    shown = locomo_table(made.rows)
    assert "| 4 | inject alone |" in shown
    assert "F1, inject − text" in shown
    assert "Judge: big." in shown
    assert shown in report(made.rows)
    page = tmp_path / "new" / "page.html"
    write_report(made.rows, page)
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 2
    assert "tiny &amp; small" in html
    assert "&lt;locomo&gt;" in html
    assert [path.read_text() for path in plot_runs(made.rows, tmp_path)] == [html]
    monkeypatch.setattr("inferscale.bench.locomo_report.find_spec", lambda name: None)
    write_report(made.rows, page)
    assert "data:image" not in page.read_text()
    for heading in ("Scores", "Injected beside text", "F1 by category", "Recall of the evidence", "Cost"):
        assert f"<h2>{heading}</h2>" in html


def test_a_run_that_was_cut_off_has_no_table() -> None:
    made = BenchRun("locomo", "tiny", None)
    made.add("recall", "share", [0.5], k=4, ci95=(0.4, 0.6))
    with pytest.raises(InvalidInput, match="run it again"):
        locomo_table(made.rows)


@pytest.mark.parametrize("categories", [(5,), (4,)])
def test_some_categories_alone(
    prompts: PromptBuilder, file: Path, tmp_path: Path, categories: tuple[int, ...]
) -> None:
    _, engine = engine_of()
    one = measurement(engine, prompts, categories=categories)
    one.ask(read_gold(file, 1, categories, with_adversarial=True))
    shared = {"questions": 1, "adversarial_questions": 1, "conversations": "1", "facts": "turns"}
    made = BenchRun("locomo", "tiny", None, shared)
    LocomoRows(made, one.results).add_all()
    metrics = {row["metric"] for row in made.rows}
    assert ("adversarial_accuracy" in metrics, "f1" in metrics) == (categories == (5,), categories == (4,))
    assert "| 4 | inject alone |" in locomo_table(made.rows)
    write_report(made.rows, tmp_path / "page.html")


def test_the_whole_run(
    prompts: PromptBuilder,
    conversations: list[GoldConversation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a judge that answers, all else is there, and the next run judges."""
    files = LocomoFiles(tmp_path / "rows", tmp_path / "cache", tmp_path / "page")
    monkeypatch.setattr(locomo, "open_embedder", lambda *_: WordEmbedder())
    monkeypatch.setattr(locomo, "prompt_builder", lambda _: prompts)
    monkeypatch.setattr(BenchEngine, "describe", lambda self: {"command": "x"})
    monkeypatch.setattr("inferscale.bench.judge.time.sleep", lambda _: None)
    said: list[str] = []

    def go(client: httpx.Client) -> tuple[AnsweringOffline, list[Row]]:
        offline, engine = engine_of()
        monkeypatch.setattr(EngineSpec, "open", lambda self: engine)
        monkeypatch.setattr("inferscale.extraction.openai_model.httpx.Client", lambda **_: client)
        rows = run_locomo(
            EngineSpec("some/tiny"),
            conversations,
            parse_policies("alone"),
            LocomoOptions(ks=(4,)),
            files,
            JudgeOptions("http://there/v1", "big", ("strict",), in_flight=1),
            said.append,
        )
        return offline, rows

    failing = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(500)))
    working = server()
    offline, rows = go(failing)
    assert offline.is_closed
    assert len(offline.answered) == 5 * NUM  # those without memory once
    assert not [row for row in rows if "judged" in row["metric"]]
    assert any("No rows of the judge (strict): the judge answered with HTTP 500" in text for text in said)
    assert any(f"({6 * NUM} of {6 * NUM} in all)" in text for text in said)
    assert files.report.exists()  # type: ignore[union-attr]
    assert rows[0]["config"]["adversarial_questions"] == 2
    assert len(files.out.read_text().splitlines()) == len(rows)  # type: ignore[union-attr]

    offline, rows = go(working)
    assert not offline.answered
    assert [row["p50"] for row in rows if row["metric"] == "judged_strict"]
