"""Exactness with a real model in bfloat16 on a GPU, as vLLM runs it by default.

CUDA graphs, chunked prefill, steps scheduled before the last is done, the fused kernels, the engine in a
process of its own. Low precision makes every answer a little wrong, so that nothing here is compared with
a fixed number: the measure is what the engine does without any injection, on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from real_engine import (
    CACHE_TOKENS,
    ON_CPU,
    STEP_TOKENS,
    Ask,
    Distance,
    Library,
    RealEngine,
    Served,
    distance,
    log_softmax,
    together,
)

from harness.mixes import Part, Stored, expected_parts, ids_of
from harness.protocol import FloatArray
from harness.reference import Injected, Text
from inferscale.plan import salt_of

pytestmark = [
    pytest.mark.gpu,
    # vLLM's front end runs in this process, and leaves a ZeroMQ context open when it ends.
    pytest.mark.filterwarnings("default"),
]

FACTOR = 2
"""How much further than without injection an answer may be: rotated keys are rounded once more."""
TELLING = 10
"""How much further than the tolerance a mistake must be, for a test that would have found it."""
NUM_TOP = 500
"""Log-probabilities a step of crowds: all 49,152 of every step are too many for the way between processes."""


def test_what_runs(engine: RealEngine) -> None:
    """The other tests are about what they say they are about."""
    runs = engine.what_runs()
    print(runs)
    assert runs["is_chunked"]
    if ON_CPU:
        return
    import torch

    assert runs["mover"] == "FusedMover"
    assert runs["is_async"]
    assert runs["graphs"] == "FULL_AND_PIECEWISE"
    if torch.cuda.get_device_capability()[0] == 9:
        assert (runs["attention"], runs["flash_attention"]) == ("FlashAttentionImpl", 3)


# same position ----------------------------------------------------------------------------------

NUM_STEPS = 5


def test_same_position_equals_the_prefix_cache(engine: RealEngine, library: Library) -> None:
    """Injected where it was captured, and served by vLLM from the very blocks that were captured from."""
    repeats, injections, others = [], [], []
    for num_tokens in (160, 320, 640):
        memory, spans = passage(engine, library, num_tokens)
        # The same facts said behind another head: the same tokens at the same positions, another KV.
        strange = library.talk(spans[0][1]) + memory[spans[0][1] :]
        capture, strange_capture = engine.capturing(memory, spans), engine.capturing(strange, spans)
        engine.alone([capture, strange_capture])
        assert capture.plan is not None
        salt = salt_of(capture.plan, engine.offline.secret)  # finds the pass's blocks
        right = engine.segments(memory, spans)
        wrong = right[:1] + engine.segments(strange, spans)[1:]
        for number in range(3):
            # Short, so that it fills no block, and the second time finds no more than the first.
            ids = memory + library.talk(8 + number)
            hit = Ask(ids, salt=salt, max_tokens=NUM_STEPS)
            plans = [engine.plan(segments=segments) for segments in (right, wrong)]
            asks = [Ask(ids, plan, max_tokens=NUM_STEPS) for plan in plans]
            first, injected, second, mistaken = engine.alone([hit, asks[0], hit, asks[1]])
            assert (first.num_cached_tokens, second.num_cached_tokens) == (num_tokens, num_tokens)
            for answer in (injected, mistaken):
                assert injected_of(answer) == num_tokens
                assert answer.outcome["prefilled_tokens"] == 8 + number
            repeats.append(distance(second.logprobs(), first.logprobs()))
            injections.append(distance(injected.logprobs(), first.logprobs()))
            others.append(distance(mistaken.logprobs(), first.logprobs()))
    repeat, injection, other_kv = together(repeats), together(injections), together(others)
    report("hit again", repeat)
    report("injected", injection)
    report("another KV", other_kv)
    engine.stats()
    assert injection.is_within(repeat)
    assert other_kv.kl > TELLING * max(repeat.kl, 1e-9)  # a difference of zero is one of rounding


def passage(
    engine: RealEngine, library: Library, num_tokens: int
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A text of whole blocks with a head and facts in it: its ids and their spans."""
    assert num_tokens % engine.block_size == 0
    ids = library.talk(num_tokens)
    cuts = [0, 25, 60, 61, 100, num_tokens]
    return ids, list(zip(cuts, cuts[1:], strict=False))


# elsewhere --------------------------------------------------------------------------------------


def test_relocated_facts_equal_the_reference(engine: RealEngine, library: Library) -> None:
    """Facts of other passes, in another order and elsewhere, each behind a window that is not there."""
    prompts = scattered(library)
    answers = engine.serve([engine.with_memory(parts, NUM_STEPS) for parts in prompts])
    plain = engine.serve([Ask(ids_of(parts), max_tokens=NUM_STEPS) for parts in prompts])
    engine.stats()
    for parts, answer in zip(prompts, answers, strict=True):
        assert injected_of(answer) == num_stored(parts)
        assert answer.outcome["covered_segments"] == sum(isinstance(part, Stored) for part in parts)

    def error(answers: Sequence[Served], read: Callable[[list[Part]], list[Text | Injected]]) -> Distance:
        """Of answers, where the prompts are read in that way."""
        return together([off(library, read(p), answer) for p, answer in zip(prompts, answers, strict=True)])

    baseline = error(plain, as_text)
    found = error(answers, as_told)
    mistakes = {read.__name__: error(answers, read) for read in (not_rotated, out_of_order, as_text)}
    report("plain", baseline)
    report("injected", found)
    for name, mistake in mistakes.items():
        report(name, mistake)
    tolerance = baseline.times(FACTOR)
    assert found.is_within(tolerance)
    for name, mistake in mistakes.items():
        assert mistake.kl > TELLING * tolerance.kl, name


def scattered(library: Library) -> list[list[Part]]:
    """Prompts over one chunk and over several."""
    head = library.head
    ends = [
        library.retelling("first"),
        library.retelling("last"),
        library.question("Which of these facts was said last?"),
        library.talk(STEP_TOKENS + 60) + library.retelling("first"),
    ]
    prompts: list[list[Part]] = [
        [head, *library.chosen(24), ends[0]],
        [head, *library.facts[17::-1], ends[1]],
        [head, *library.chosen(6), ends[0]],
        [*library.chosen(12), head, *library.chosen(1), ends[2]],
        [head, *library.chosen(12), ends[3]],
        [head, *library.chosen(40), ends[1]],
    ]
    return prompts


def off(
    library: Library, parts: Sequence[Text | Injected], answer: Served, num_steps: int | None = None
) -> Distance:
    """How far the last steps of an answer are from the reference, behind the tokens that the engine chose."""
    num_steps = num_steps or len(answer.token_ids)
    known = [*parts, Text(answer.token_ids[:-1])]
    return distance(answer.logprobs(-num_steps), log_softmax(library.reference.logits_of(known, num_steps)))


def as_text(parts: Sequence[Part]) -> list[Text | Injected]:
    return [Text(ids_of(parts))]


def as_told(parts: Sequence[Part]) -> list[Text | Injected]:
    return expected_parts(parts, num_stored(parts))


def not_rotated(parts: Sequence[Part]) -> list[Text | Injected]:
    """Keys as they were captured."""
    wrong: list[Text | Injected] = []
    at = 0
    for part in as_told(parts):
        if isinstance(part, Injected):
            wrong.append(part._replace(origin=at))
            at += part.kv.keys.shape[2]
        else:
            wrong.append(part)
    return wrong


def out_of_order(parts: Sequence[Part]) -> list[Text | Injected]:
    """Each fact in another's place."""
    right = as_told(parts)
    places = [index for index, part in enumerate(right) if isinstance(part, Injected)]
    wrong = list(right)
    for place, source in zip(places, places[::-1], strict=True):
        wrong[place] = right[source]
    return wrong


# many at once -----------------------------------------------------------------------------------

NUM_CROWD = 64
NUM_BETWEEN = 32


def test_a_crowd_answers_as_each_alone(engine: RealEngine, library: Library) -> None:
    prompts = crowd(library, NUM_CROWD)
    plain = [ids_of(parts) for parts in crowd(library, NUM_BETWEEN)]
    alone = firsts(engine.alone(engine.with_memory(parts) for parts in prompts))
    alone_plain = firsts(engine.alone(Ask(ids) for ids in plain))
    error = engine_error(library, plain, alone_plain)
    for _ in range(2):
        answers, between = serve_crowd(engine, prompts, plain, 16)
        for parts, answer in zip(prompts, answers, strict=True):
            assert injected_of(answer) == num_stored(parts)
            assert answer.outcome["resumes"] == 0
        check_firsts(answers, alone, error)
        report("plain, against alone", apart(firsts(between), alone_plain))
        assert {len(answer.token_ids) for answer in answers + between} == {16}
    engine.stats()


def crowd(library: Library, num: int) -> list[list[Part]]:
    """The same question about different facts: what is answered depends on whose facts were read."""
    end = library.retelling("last")
    return [[library.head, *library.chosen(library.random.randint(3, 6)), end] for _ in range(num)]


def serve_crowd(
    engine: RealEngine, prompts: Sequence[Sequence[Part]], plain: Sequence[tuple[int, ...]], max_tokens: int
) -> tuple[list[Served], list[Served]]:
    """All at once, plain requests between those with memory. Returns both kinds, in order."""
    asks = [engine.with_memory(parts, max_tokens) for parts in prompts]
    every = len(asks) // len(plain)
    mixed = []
    for number, ids in enumerate(plain):
        mixed += [*asks[number * every : (number + 1) * every], Ask(ids, max_tokens=max_tokens)]
    mixed += asks[len(plain) * every :]
    served = engine.serve(mixed, NUM_TOP)
    with_memory = [one for one, ask in zip(served, mixed, strict=True) if ask.plan is not None]
    return with_memory, [one for one, ask in zip(served, mixed, strict=True) if ask.plan is None]


def firsts(answers: Sequence[Served]) -> list[FloatArray]:
    return [answer.logprobs(0, 1) for answer in answers]


def engine_error(library: Library, plain: Sequence[tuple[int, ...]], alone: Sequence[FloatArray]) -> Distance:
    """How far first tokens are from the reference without injection."""
    known = [log_softmax(library.reference.logits(ids)) for ids in plain[:16]]
    return apart(alone[:16], known)


def check_firsts(answers: Sequence[Served], alone: Sequence[FloatArray], error: Distance) -> None:
    """First tokens of every request are those of the same request alone.

    Two answers that are each as far from the right one as `error` may be twice as far from each other.
    """
    found = apart(firsts(answers), alone)
    # What the next request read, for one that was mixed up with it.
    mixed_up = [distance(a, e) for a, e in zip(firsts(answers), [*alone[1:], alone[0]], strict=True)]
    report("plain, against the reference", error)
    report("injected, against alone", found)
    report("injected, against the next one", together(mixed_up))
    tolerance = error.times(FACTOR)
    assert found.is_within(tolerance)  # `largest` of every request, by itself
    assert sorted(one.kl for one in mixed_up)[len(mixed_up) // 10] > TELLING * tolerance.kl


def apart(found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> Distance:
    return together([distance(f, e) for f, e in zip(found, expected, strict=True)])


# pressure ---------------------------------------------------------------------------------------

NUM_LONG = 96
"""Output tokens with which the crowd outgrows the paged cache."""
LAST = 16
"""Of its tokens, how many are compared with the reference; they were computed after the resume."""


def test_preempted_requests_inject_again(engine: RealEngine, library: Library) -> None:
    prompts = crowd(library, NUM_CROWD)
    plain = [ids_of(parts) for parts in crowd(library, NUM_BETWEEN)]
    num_tokens = sum(len(ids_of(parts)) + NUM_LONG for parts in prompts)
    assert num_tokens + sum(len(ids) + NUM_LONG for ids in plain) > 1.2 * CACHE_TOKENS
    before = engine.stats()
    alone = firsts(engine.alone(engine.with_memory(parts) for parts in prompts))
    alone_plain = firsts(engine.alone(Ask(ids) for ids in plain))
    error = engine_error(library, plain, alone_plain)
    answers, between = serve_crowd(engine, prompts, plain, NUM_LONG)
    stats = engine.stats()
    assert {len(answer.token_ids) for answer in answers + between} == {NUM_LONG}
    for parts, answer in zip(prompts, answers, strict=True):
        assert injected_of(answer) == num_stored(parts)
    check_firsts(answers, alone, error)
    report("plain, against alone", apart(firsts(between), alone_plain))

    resumed = [place for place, answer in enumerate(answers) if answer.outcome["resumes"]]
    again = stats["tokens_injected"] - before["tokens_injected"] - 2 * sum(num_stored(p) for p in prompts)
    print(
        f"{stats['preemptions'] - before['preemptions']} preemptions; of requests with memory "
        f"{len(resumed)} resumed, {again} tokens were injected once more"
    )
    assert resumed
    assert again > 0
    baseline = together([off(library, [Text(plain[n])], between[n], LAST) for n in range(8)])
    found = together([off(library, as_told(prompts[n]), answers[n], LAST) for n in resumed[:8]])
    report("plain, last tokens against the reference", baseline)
    report("resumed, last tokens against the reference", found)
    assert found.is_within(baseline.times(FACTOR))


def test_evicted_facts_are_text_from_there_on(engine: RealEngine, library: Library) -> None:
    """The pool overflows before and while requests read from it; each answers for what it was given."""
    kept, lost = library.facts[:50], library.facts[50:]
    for facts in (lost, kept):  # in the order in which they will go
        engine.serve([engine.with_memory([library.head, *facts, library.talk(5)])], 0)
    prompts: list[list[Part]] = [
        [library.head, *kept[4 * n : 4 * n + 4], *lost[18 + n :: -6], library.retelling("last")]
        for n in range(6)
    ]
    asks = [engine.with_memory(parts, NUM_STEPS) for parts in prompts]
    before = engine.stats()
    size = before["page_size_tokens"]
    num_quarter = sum(-(-len(fact.ids) // size) for fact in lost) // 4
    engine.serve([filler(engine, library, n * size) for n in chunks(before["free_pages"] + num_quarter)], 0)
    answers = engine.serve([filler(engine, library, num_quarter * size), *asks])[1:]
    plain = engine.serve([Ask(ids_of(parts), max_tokens=NUM_STEPS) for parts in prompts])
    num_evicted = engine.stats()["evictions"] - before["evictions"]
    numbers = [
        (injected_of(answer), num_stored(parts)) for parts, answer in zip(prompts, answers, strict=True)
    ]
    print(f"{num_evicted} evictions; injected of stored tokens: {numbers}")
    assert num_evicted
    assert all(0 < injected < stored for injected, stored in numbers)

    def error(injected: Sequence[int], answers: Sequence[Served]) -> Distance:
        """Of answers, where so many tokens of each prompt are injected."""
        known = [expected_parts(parts, num) for parts, num in zip(prompts, injected, strict=True)]
        return together([off(library, parts, answer) for parts, answer in zip(known, answers, strict=True)])

    baseline = error([0] * len(prompts), plain)
    found = error([injected for injected, _ in numbers], answers)
    mistake = error([stored for _, stored in numbers], answers)
    report("plain", baseline)
    report("injected as far as it went", found)
    report("as if all were injected", mistake)
    assert found.is_within(baseline.times(FACTOR))
    assert mistake.kl > TELLING * FACTOR * baseline.kl


def filler(engine: RealEngine, library: Library, num_tokens: int) -> Ask:
    """Takes so many tokens of the pool with one segment."""
    return engine.capturing(library.talk(num_tokens), [(0, num_tokens)])


def chunks(num_pages: int, size: int = 100) -> list[int]:
    return [min(size, num_pages - start) for start in range(0, num_pages, size)]


# small ------------------------------------------------------------------------------------------


def num_stored(parts: Sequence[Part]) -> int:
    return sum(len(part.ids) for part in parts if isinstance(part, Stored))


def injected_of(answer: Served) -> int:
    assert "reason" not in answer.outcome, answer.outcome
    assert answer.outcome["cached_tokens"] == 0 or answer.outcome["resumes"], answer.outcome
    return int(answer.outcome["injected_tokens"])


def report(name: str, value: Distance) -> None:
    print(f"{name}: {value}")
