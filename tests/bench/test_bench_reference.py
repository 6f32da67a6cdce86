"""The reference of scores: transformers over the whole prompt, and behind KV that was computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferscale.bench.asked import Case
from inferscale.bench.harness import BenchRun
from inferscale.bench.questions import GoldQuestion
from inferscale.bench.reference import Check, Reference, add_reference_checks
from inferscale.bench.score_cache import AnswerScore
from inferscale.encoder import EncodeJob
from inferscale.facts import Scope
from inferscale.plan import Plan, Segment, Span

QUESTION = GoldQuestion(0, "?", "!", 4)
HEAD, FIRST, SECOND, REST = (1, 2, 3), (20, 21, 22, 23, 24), (30, 31), (40, 41)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folder of a small model with so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    known: dict[int, Path] = {}

    def find(num_layers: int) -> Path:
        if num_layers not in known:
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.5,
            )
            known[num_layers] = tmp_path_factory.mktemp("model")
            LlamaForCausalLM(config).save_pretrained(known[num_layers])
        return known[num_layers]

    return find


def injected_case(order: tuple[str, ...]) -> tuple[Case, list[EncodeJob]]:
    """Head and facts in this order, which were captured as head, first, second."""
    texts = {"head": HEAD, "first": FIRST, "second": SECOND}
    whole = EncodeJob(
        Scope(),
        (*HEAD, *FIRST, *SECOND),
        (Span("head", 0, 3), Span("first", 3, 8), Span("second", 8, 10)),
    )
    plan = Plan("model", "scope", segments=tuple(Segment(key, texts[key], "fact") for key in order))
    prompt = (*(token for key in order for token in texts[key]), *REST)
    return Case(QUESTION, prompt, (9, 8), plan, len(REST)), [whole]


def test_each_token_is_scored_behind_those_before_it(model: Callable[[int], Path]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model(2), dtype=torch.float32).eval()
    with torch.inference_mode():
        first = loaded(torch.tensor([[5, 6, 7, 9]])).logits[0].log_softmax(-1)
        second = loaded(torch.tensor([[1, 2]])).logits[0].log_softmax(-1)
    reference = Reference(str(model(2)))
    found = reference.logprobs(Case(QUESTION, (5, 6, 7), (9, 8), None, 3))
    assert found == pytest.approx([float(first[2, 9]), float(first[3, 8])], abs=1e-5)
    assert reference.logprobs(Case(QUESTION, (1, 2), (3,), None, 2)) == pytest.approx(
        [float(second[1, 3])], abs=1e-5
    )


def test_facts_in_the_order_of_their_pass_are_as_text(model: Callable[[int], Path]) -> None:
    reference = Reference(str(model(2)))
    case, jobs = injected_case(("head", "first", "second"))
    assert reference.logprobs(case, jobs) == pytest.approx(
        reference.logprobs(case._replace(plan=None)), abs=1e-4
    )


def test_keys_move_with_their_facts(model: Callable[[int], Path]) -> None:
    """In a single layer keys and values know nothing of what stands before them, so only positions count."""
    case, jobs = injected_case(("head", "second", "first"))
    text = case._replace(plan=None)
    shallow, deep = Reference(str(model(1))), Reference(str(model(2)))
    assert shallow.can_inject
    assert shallow.logprobs(case, jobs) == pytest.approx(shallow.logprobs(text), abs=1e-4)
    assert deep.logprobs(case, jobs) != pytest.approx(deep.logprobs(text), abs=1e-2)


def test_what_two_passes_capture_is_the_mean_of_both(model: Callable[[int], Path]) -> None:
    """Two passes that say the same are as one; of two that differ, neither is what is injected."""
    reference = Reference(str(model(2)))
    case, [whole] = injected_case(("head", "second", "first"))

    def parted(*jobs: EncodeJob) -> list[EncodeJob]:
        return [
            job._replace(captures=tuple(replace(span, part=number) for span in job.captures))
            for number, job in enumerate(jobs, start=1)
        ]

    other = EncodeJob(
        Scope(),
        (*HEAD, *SECOND, *FIRST),
        (Span("head", 0, 3), Span("second", 3, 5), Span("first", 5, 10)),
    )
    one, two = reference.logprobs(case, [whole]), reference.logprobs(case, [other])
    assert reference.logprobs(case, parted(whole, whole)) == pytest.approx(one, abs=1e-4)
    mean = reference.logprobs(case, parted(whole, other))
    assert mean == pytest.approx(reference.logprobs(case, parted(other, whole)), abs=1e-4)
    assert mean != pytest.approx(one, abs=1e-2)
    assert mean != pytest.approx(two, abs=1e-2)


def test_keys_are_turned_to_one_place_before_their_mean(model: Callable[[int], Path]) -> None:
    """In a single layer both passes hold the same key but for its position."""
    shallow = Reference(str(model(1)))
    case, [whole] = injected_case(("head", "first", "second"))
    other = EncodeJob(
        Scope(), (*HEAD, *SECOND, *FIRST), (Span("second", 3, 5, part=2), Span("first", 5, 10, part=2))
    )
    first = whole._replace(captures=(whole.captures[0], *(replace(s, part=1) for s in whole.captures[1:])))
    text = shallow.logprobs(case._replace(plan=None))
    assert shallow.logprobs(case, [first, other]) == pytest.approx(text, abs=1e-4)


def test_rows_say_how_far_the_engine_is_from_it(model: Callable[[int], Path]) -> None:
    folder = str(model(2))
    case, jobs = injected_case(("head", "second", "first"))
    text = case._replace(plan=None)
    reference = Reference(folder)
    run = BenchRun("fidelity", "tiny", None)
    checks = [
        Check(text, score_of(reference.logprobs(text), 0.25), "text"),
        Check(case, score_of(reference.logprobs(case, jobs), -0.5), "inject", "alone", jobs),
    ]
    add_reference_checks(run, folder, checks, 50)
    assert [(row["mode"], row["p50"], row["config"]["policy"]) for row in run.rows] == [
        ("text", 0.25, None),
        ("inject", 0.5, "alone"),
    ]
    assert [row["config"]["mean_difference"] for row in run.rows] == [0.25, -0.5]


def score_of(logprobs: list[float], added: float) -> AnswerScore:
    """A score with an NLL that is so much above that of the log-probabilities."""
    return AnswerScore([one - added for one in logprobs], [0, 0], [], [], [])
