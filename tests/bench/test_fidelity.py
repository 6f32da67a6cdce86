"""`bench fidelity` on an engine without vLLM whose probabilities say where the facts' KV came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import FakeOffline
from fakes import WordEmbedder
from inferscale.bench.asked import AskedConversation
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.fidelity import Arm, FidelityMeasurement, arms_of
from inferscale.bench.fidelity_rows import FidelityRows, fidelity_table
from inferscale.bench.forced import NUM_COMPARED, NUM_RETURNED
from inferscale.bench.harness import BenchRun, Row
from inferscale.bench.options import FidelityOptions
from inferscale.bench.policies import Policy, parse_policies
from inferscale.bench.questions import GoldConversation, read_gold
from inferscale.bench.score_cache import ScoreCache
from inferscale.errors import EngineError, InvalidInput
from inferscale.offline import Finished, Generation, GenerationRequest
from inferscale.prompt import PromptBuilder
from locomo_file import SAID, write_locomo
from test_prompt import CHATML, tokenizer_with

GOLD = {"none": 0.05, "text": 0.5, "inject": 0.4}
"""Probability of each token of an answer by where the facts are."""
DECODE = tokenizer_with(CHATML).decode
POLICIES = "alone; sliding(2,2)+tail2; sliding(2,2)"
ARRANGED = "alone+tail1; alone; alone+tail1+session; sliding(2,2)+chronological; alone+chronological"
K = 4


class ScoringOffline(FakeOffline):
    """Facts in the prompt are noticed by its length."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.step_tokens = 64
        self.forced: list[GenerationRequest] = []
        self.encoded: list[GenerationRequest] = []
        self.is_surer: Callable[[Sequence[int]], bool] = lambda ids: False

    def stream(self, requests: Iterable[GenerationRequest], **bounds: Any) -> Generator[Finished, None, None]:
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
        if "allowed_token_ids" not in request.sampling:
            return done
        self.forced.append(request)
        (gold,) = request.sampling["allowed_token_ids"]
        has_facts = len(request.token_ids) > 150
        mode = "inject" if request.plan is not None else "text" if has_facts else "none"
        num, p = request.sampling["logprobs"], GOLD[mode]
        if mode == "text" and self.is_surer(request.token_ids):
            p = 0.8
        others = [p, *([(1 - p) / (2 * num)] * (num - 1))]
        ids = [gold, *(1000 + place for place in range(num - 1))]
        if mode == "none":
            ids[0], ids[1], others[1] = ids[1], ids[0], p / 2
        logprobs = [math.log(value) for value in others]
        flat = SimpleNamespace(
            token_ids=[gold, *ids], logprobs=[math.log(others[ids.index(gold)]), *logprobs]
        )
        return Generation(**{**vars(done), "token_ids": (gold,), "logprobs": flat})


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(tokenizer_with(CHATML))


@pytest.fixture
def conversation(tmp_path: Path) -> GoldConversation:
    return read_gold(write_locomo(tmp_path), 1)


def engine_of(**options: Any) -> tuple[ScoringOffline, BenchEngine]:
    offline = ScoringOffline(**options)
    spec = EngineSpec("some/tiny", pool_size_bytes=2**20)
    return offline, BenchEngine(offline, spec)  # type: ignore[arg-type]


def measurement(
    engine: BenchEngine, prompts: PromptBuilder, cache: ScoreCache | None = None, **options: Any
) -> FidelityMeasurement:
    policies = parse_policies(options.pop("policies", POLICIES))
    chosen = FidelityOptions(**{"k": K, "num_timed": 2, "num_checked": 1, **options})
    cache = ScoreCache(None) if cache is None else cache
    return FidelityMeasurement(engine, prompts, policies, chosen, cache, lambda text: None, WordEmbedder())


def test_the_reference_is_measured_first() -> None:
    alone, tailed = Policy.parse("alone"), Policy.parse("alone+tail2")
    assert arms_of([tailed, alone]) == (
        Arm("text"),
        Arm("none"),
        Arm("inject", tailed),
        Arm("inject", alone),
    )
    assert [str(arm.tail) for arm in arms_of([tailed, alone])] == ["0", "0", "2", "0"]


def test_the_arms_differ_in_nothing_but_where_the_kv_comes_from(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    _, engine = engine_of()
    policy = Policy.parse("sliding(2,2)+tail2")
    with AskedConversation(
        engine,
        prompts,
        conversation,
        conversation.questions,
        k=K,
        instruction="Briefly.",
        embedder=WordEmbedder(),
    ) as asked:
        text, inject, none = asked.plain("text"), asked.injected(policy), asked.plain("none")
    assert [case.prompt for case in text.cases] == [case.prompt for case in inject.cases]
    assert [case.answer_ids for case in text.cases] == [case.answer_ids for case in inject.cases]
    assert all(case.plan is None and case.num_prefilled == len(case.prompt) for case in text.cases)
    for case in inject.cases:
        assert case.plan is not None
        assert len(case.plan.table.keys) == 1 + K - 2  # the head, and the facts that are not in the tail
        assert case.num_prefilled == len(case.prompt) - sum(case.plan.table.lengths)
    decode = tokenizer_with(CHATML).decode
    first = decode(list(text.cases[0].prompt))
    assert "Where does Ana live?\nBriefly." in first
    assert sum(said in first for _, said in SAID) == K
    assert not any(said in decode(list(none.cases[0].prompt)) for _, said in SAID)


def test_the_best_facts_can_be_recomputed_where_they_stand(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    _, engine = engine_of()
    with AskedConversation(
        engine, prompts, conversation, conversation.questions, k=K, embedder=WordEmbedder()
    ) as asked:
        text, whole, last, all_of_them = (
            asked.plain("text").cases,
            *(asked.injected(Policy.parse(f"alone{last}")).cases for last in ("", "+tail1", "+tail9")),
        )
    for cases in zip(text, whole, last, all_of_them, strict=True):
        assert len({case.prompt for case in cases}) == 1
        keys = [[] if case.plan is None else list(case.plan.table.keys) for case in cases[1:]]
        assert [len(of) for of in keys] == [1 + K, K, 0]
        assert keys[0][:-1] == keys[1]
        assert cases[1].num_prefilled < cases[2].num_prefilled < cases[3].num_prefilled


def test_an_arrangement_has_a_reference_of_its_own() -> None:
    texts = [arm for arm in arms_of(parse_policies(ARRANGED)) if arm.mode == "text"]
    assert [arm.name for arm in texts] == ["text", "text tail1+session", "text chronological"]
    reference = {arm.name: arm.reference.name for arm in arms_of(parse_policies(ARRANGED))}
    assert reference == {
        **{arm.name: arm.name for arm in texts},
        "none": "text",
        "inject alone+tail1": "text",
        "inject alone": "text",
        "inject alone+tail1+session": "text tail1+session",
        "inject sliding(2,2)+chronological": "text chronological",
        "inject alone+chronological": "text chronological",
    }
    only = arms_of(parse_policies("alone+session"))
    assert [arm.name for arm in only] == ["text session", "none", "inject alone+session"]
    assert {arm.reference for arm in only} == {only[0]}


@pytest.mark.parametrize("suffix", ["+chronological", "+tail1+chronological", "+tail2+session"])
def test_text_has_the_same_facts_in_the_same_order(
    prompts: PromptBuilder, conversation: GoldConversation, suffix: str
) -> None:
    _, engine = engine_of()
    with AskedConversation(
        engine, prompts, conversation, conversation.questions, k=K, embedder=WordEmbedder()
    ) as asked:
        policy = Policy.parse(f"alone{suffix}")
        best_last, text = asked.plain("text").cases, asked.plain("text", None, policy.arrangement).cases
        inject = asked.injected(policy).cases
    decode = tokenizer_with(CHATML).decode
    for case, other, usual in zip(text, inject, best_last, strict=True):
        assert case.prompt == other.prompt
        assert sorted(case.prompt) == sorted(usual.prompt)
        assert other.plan is not None
        said = decode(list(case.prompt))
        num_last = policy.tail.facts or 0
        assert len(other.plan.table.keys) == 1 + K - num_last
        if not num_last:
            assert is_in_time(said)
    assert [case.prompt for case in text] != [case.prompt for case in best_last]


def test_the_search_does_not_see_the_instruction(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    _, engine = engine_of()
    found = []
    for instruction in ("", "violin violin violin"):
        with AskedConversation(
            engine,
            prompts,
            conversation,
            conversation.questions,
            k=1,
            instruction=instruction,
            embedder=WordEmbedder(),
        ) as asked:
            found.append(
                [case.plan.table.keys for case in asked.injected(Policy.default()).cases if case.plan]
            )
    assert found[0] == found[1]


def test_scores_costs_and_times(prompts: PromptBuilder, conversation: GoldConversation) -> None:
    offline, engine = engine_of()
    one = measurement(engine, prompts)
    one.ask(conversation)
    results = one.results
    num = len(conversation.questions)
    assert [question for _, question in results.questions] == list(conversation.questions)
    expected = {"none": math.log(2 / GOLD["none"]), "text": -math.log(0.5), "inject": -math.log(0.4)}
    for arm, result in results.arms.items():
        assert [score.nll for score in result.scores] == pytest.approx([expected[arm.mode]] * num)
        assert len(result.ttfts_ms) == 2
        assert all(not score.tops for score in result.scores)
    injected = results.arms[Arm("inject", Policy.parse("sliding(2,2)"))]
    # The gold token, the 255 behind it, and the rest.
    p, q = (0.5, 0.5 / 512), (0.4, 0.6 / 2048)
    rest = 1 - p[0] - 255 * p[1], 1 - q[0] - 255 * q[1]
    parts = zip((1, 255, 1), (*p, rest[0]), (*q, rest[1]), strict=True)
    kl = sum(times * a * math.log(a / b) for times, a, b in parts)
    assert [score.kl for score in injected.scores] == pytest.approx([kl] * num, abs=1e-5)
    assert [(check.mode, check.policy) for check in results.checks] == [("text", None), ("inject", "alone")]
    captured = {span.key for job in results.checks[1].jobs for span in job.captures}
    assert captured.issuperset(results.checks[1].case.plan.table.keys)  # type: ignore[union-attr]
    logprobs = {request.sampling["logprobs"] for request in offline.forced if request.plan is None}
    assert logprobs == {NUM_COMPARED, NUM_RETURNED}
    assert offline.pool == {}  # the next conversation finds it empty


def test_encoding_is_told_before_it_is_done(prompts: PromptBuilder, conversation: GoldConversation) -> None:
    offline, engine = engine_of()
    told: list[tuple[str, bool]] = []
    one = measurement(engine, prompts, policies="sliding(2,2)", num_timed=0)
    one._say = lambda text: told.append((text, bool(offline.encoded)))
    one.ask(conversation)
    [(text, was_done)] = [each for each in told if "encoding" in each[0]]
    assert text == f"{conversation.name}: encoding {len(SAID)} facts in {len(offline.encoded)} passes …"
    assert not was_done


def test_policies_of_one_window_share_its_passes_and_no_two_the_prefix_cache(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    offline, engine = engine_of()
    measurement(engine, prompts, policies="sliding(2,2);sliding(2,2)+tail2", num_timed=0).ask(conversation)
    captured = [span.key for request in offline.encoded for span in request.plan.captures[1:]]  # type: ignore[union-attr]
    assert len(captured) == len(set(captured)) == len(SAID)
    salts = {request.plan.caller_salt for request in offline.forced if request.plan is not None}
    assert salts == {"sliding(2,2)", "sliding(2,2)+tail2"}


def test_both_directions_of_mixed_passes_are_paid_for(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    offline, engine = engine_of()
    one = measurement(engine, prompts, policies="mixed(6);sliding(2,2)", num_timed=0)
    one.ask(conversation)
    arms = one.results.arms
    mixed, sliding = (arms[Arm("inject", Policy.parse(name))] for name in ("mixed(6)", "sliding(2,2)"))
    [cost], [other] = mixed.costs, sliding.costs
    assert cost.stored_tokens == other.stored_tokens, "each fact is stored once"
    anchor = len(prompts.anchor_ids)
    assert cost.computed_tokens == 2 * (anchor + cost.stored_tokens)
    parts = [{span.part for span in request.plan.captures} for request in offline.encoded]  # type: ignore[union-attr]
    assert parts[:2] == [{0, 1}, {0, 2}]
    check = one.results.checks[-1]
    assert check.policy == "mixed(6)"
    assert {span.part for job in check.jobs for span in job.captures} == {0, 1, 2}


def test_an_interrupted_run_goes_on_where_it_was(
    prompts: PromptBuilder, conversation: GoldConversation, tmp_path: Path
) -> None:
    path = tmp_path / "scores.jsonl"
    offline, engine = engine_of()
    whole = measurement(engine, prompts, ScoreCache(path), num_timed=0)
    whole.ask(conversation)
    num_requests = len(offline.forced)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    offline, engine = engine_of()
    again = measurement(engine, prompts, ScoreCache(path), num_timed=0)
    again.ask(conversation)
    assert (
        len({tuple(request.plan.table.keys) for request in offline.forced if request.plan}) == 1
    )  # one question of one policy
    assert 0 < len(offline.forced) < num_requests
    assert again.results.arms == whole.results.arms
    assert path.read_text() == "".join(lines)

    offline, engine = engine_of()
    more = measurement(engine, prompts, ScoreCache(path), num_timed=0, policies=f"{POLICIES}; window(1)")
    more.ask(conversation)
    assert {request.plan.caller_salt for request in offline.forced if request.plan} == {"window(1)"}
    assert all(request.plan for request in offline.forced)  # text and none are not computed again


def test_a_fact_that_is_not_injected_is_an_error(
    prompts: PromptBuilder, conversation: GoldConversation
) -> None:
    _, engine = engine_of(loses=True)
    with pytest.raises(EngineError, match="fell back to text"):
        measurement(engine, prompts).ask(conversation)
    _, engine = engine_of(pool_tokens=100)
    with pytest.raises(EngineError, match="--pool-size"):
        measurement(engine, prompts).ask(conversation)


def test_more_facts_than_turns_are_refused(prompts: PromptBuilder, conversation: GoldConversation) -> None:
    _, engine = engine_of()
    with pytest.raises(InvalidInput, match=r"k=7 was asked for; .* has 6 turns"):
        measurement(engine, prompts, k=7).ask(conversation)
    engine.offline.max_model_len = 150
    with pytest.raises(InvalidInput, match="do not fit into max_model_len=150"):
        measurement(engine, prompts, k=6).ask(conversation)


def test_a_text_is_embedded_once(prompts: PromptBuilder, conversation: GoldConversation) -> None:
    _, engine = engine_of()
    embedder = WordEmbedder()
    questions = conversation.questions
    with AskedConversation(engine, prompts, conversation, questions, k=K, embedder=embedder) as asked:
        for _ in range(2):
            asked.plain("text")
    assert embedder.num_texts == len(SAID) + len(questions)


SHARED = {"questions": 8, "conversations": "1,2"}


def name_of(row: Row) -> str:
    config = row["config"]
    return f"{row['mode']} {config.get('policy') or config.get('arrangement', '')}".strip()


def is_in_time(prompt: str) -> bool:
    places = [prompt.find(text) for _, text in SAID if text in prompt]
    return places == sorted(places)


def rows_of(prompts: PromptBuilder, file: Path, **options: Any) -> list[Row]:
    _, engine = engine_of()
    one = measurement(engine, prompts, **options)
    for number in (1, 2):
        one.ask(read_gold(file, number))
    run = BenchRun("fidelity", "tiny", None, SHARED)
    return FidelityRows(run, one.results, options.get("k", K), "auto").add_all()


def test_rows(prompts: PromptBuilder, tmp_path: Path) -> None:
    rows = rows_of(prompts, write_locomo(tmp_path))
    found = {
        (row["metric"], row["config"].get("policy") or (row["mode"], row["config"]["tail"])): row
        for row in rows
    }
    text, none = -math.log(0.5), math.log(2 / GOLD["none"])
    inject = -math.log(0.4)

    def value(metric: str, arm: Any) -> float:
        return float(found[metric, arm]["p50"])

    assert value("nll", ("text", "0")) == pytest.approx(text, abs=1e-4)
    assert value("nll", ("none", "0")) == pytest.approx(none, abs=1e-4)
    assert value("delta_nll", ("none", "0")) == pytest.approx(none - text, abs=1e-4)
    for policy in ("alone", "sliding(2,2)+tail2", "sliding(2,2)"):
        assert value("delta_nll", policy) == pytest.approx(inject - text, abs=1e-4)
        assert found["delta_nll", policy]["ci95"] == pytest.approx([inject - text] * 2, abs=1e-4)
        assert value("recovered", policy) == pytest.approx((none - inject) / (none - text), abs=1e-4)
        assert value("top1_agreement", policy) == 1
        assert 0 < value("prefilled_share", policy) < 1
        assert found["delta_nll", policy]["config"]["by_category"].keys() == {"2", "3", "4"}
        assert found["kl", policy]["config"]["missing_probability"] == 0
    assert value("top1_agreement", ("none", "0")) == 0
    assert value("prefilled_share", "alone") < value("prefilled_share", "sliding(2,2)+tail2")
    assert (
        1 < value("tokens_per_stored_token", "sliding(2,2)") < value("tokens_per_stored_token", "alone") + 2
    )
    assert found["ttft", "alone"]["n"] == 2
    assert not any(row["config"].get("default") for row in rows)

    shown = fidelity_table(rows)
    assert "| inject | sliding(2,2)+tail2 |" in shown
    assert f"{inject - text:+.3f} ({inject - text:+.3f} to {inject - text:+.3f})" in shown
    assert "8 questions of conversations 1,2" in shown


def test_rows_are_compared_with_text_in_the_same_order(prompts: PromptBuilder, tmp_path: Path) -> None:
    """On an engine that is surer of its answers behind facts as they were said."""
    offline, engine = engine_of()
    offline.is_surer = lambda ids: is_in_time(DECODE(list(ids)))
    one = measurement(engine, prompts, policies="alone; alone+tail1+chronological; alone+chronological")
    one.ask(read_gold(write_locomo(tmp_path), 1))
    rows = FidelityRows(BenchRun("fidelity", "tiny", None, SHARED), one.results, K, "auto").add_all()
    found = {(row["metric"], name_of(row)): row for row in rows}
    nll = {name: row["p50"] for (metric, name), row in found.items() if metric == "nll"}
    last, tailed, in_time = (nll[f"text{name}"] for name in ("", " tail1+chronological", " chronological"))
    assert in_time < min(tailed, last)
    for policy, text, name in (
        ("alone", last, None),
        ("alone+tail1+chronological", tailed, "text tail1+chronological"),
        ("alone+chronological", in_time, "text chronological"),
    ):
        row = found["delta_nll", f"inject {policy}"]
        assert row["p50"] == pytest.approx(nll[f"inject {policy}"] - text, abs=2e-4)
        assert row["config"].get("compared_with") == name
        share = (nll["none"] - nll[f"inject {policy}"]) / (nll["none"] - text)
        assert found["recovered", f"inject {policy}"]["p50"] == pytest.approx(share, abs=2e-4)
    shown = fidelity_table(rows)
    assert shown.count("| text |") == 3
    assert "| text | tail1+chronological |" in shown


def test_rows_of_the_default_say_so(
    prompts: PromptBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale.bench.fidelity_rows.ServerConfig", lambda: SimpleNamespace(top_k=K))
    rows = rows_of(prompts, write_locomo(tmp_path), policies=f"{Policy.default()};alone", num_timed=0)
    defaults = {row["config"]["policy"]: row["config"]["default"] for row in rows if row["mode"] == "inject"}
    assert defaults == {str(Policy.default()): True, "alone": False}
    assert "(default)" in fidelity_table(rows)


def test_a_run_that_was_cut_off_has_no_table() -> None:
    run = BenchRun("fidelity", "tiny", None)
    row = run.add("ttft", "ms", [1.0], mode="text", k=1, config={"tail": 0})
    with pytest.raises(InvalidInput, match="run it again"):
        fidelity_table([row])
