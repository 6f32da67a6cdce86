"""Earlier turns as segments: marks, cuts, keys, and the pass that captures what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import add, open_catalog
from inferscale.catalog import Catalog
from inferscale.conversation import Conversation, HistoryCutter, TurnMarks, turn_segments
from inferscale.encode_jobs import JobChooser, TurnBook
from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Scope
from inferscale.plan import Segment, Span, salt_of, scope_digest, segment_key
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

# --- marks ----------------------------------------------------------------------------------------


def read(role: str, *content: str) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def marked(*messages: dict[str, Any]) -> tuple[TurnMarks, list[list[str]]]:
    marks = TurnMarks("#")
    marks.place(messages)
    return marks, [message["content"] for message in messages]


def test_marks_stand_at_the_texts_of_users() -> None:
    _, contents = marked(read("user", "a"), read("assistant", "b"), read("tool", "c"), read("user", "d", "e"))
    assert contents == [["#T0Xa"], ["b"], ["c"], ["#T1Xd", "e"]]


def test_marks_leave_alone_what_templates_look_at() -> None:
    """White space is stripped at the edges only, and a message may be told by the tag it opens with."""
    _, contents = marked(read("user", " \n", "\n  a "), read("user"), read("user", " "), read("user", " <t>"))
    assert contents == [[" \n", "\n  #T0Xa "], [], [" "], [" <t>"]]


def test_the_callers_list_is_left_alone() -> None:
    content = ["a"]
    message = {"role": "user", "content": content}
    TurnMarks("#").place([message])
    assert (content, message["content"]) == (["a"], ["#T0Xa"])


@pytest.mark.parametrize(
    ("before", "history", "after", "pieces"),
    [
        ("s", "0#T0X1#T1X2", "q", ["0", "1", "2"]),
        ("s", "#T0X#T1X", "q", ["", "", ""]),
        ("s", "0#T1X1#T0X2", "q", ["012"]),  # reordered
        ("s", "0#T1X2", "q", ["02"]),  # one was dropped
        ("s", "0#T0X1#T1X2#T0X1", "q", ["0121"]),  # one is shown twice
        ("s", "0#T0X1", "#T1Xq", ["01"]),
        ("s#T0X", "0#T0X1#T1X2", "q", ["012"]),
        ("s", "02", "q", ["02"]),
    ],
)
def test_a_history_is_cut_at_marks_that_stand_once_each_and_in_order(
    before: str, history: str, after: str, pieces: list[str]
) -> None:
    marks, _ = marked(read("user", "a"), read("user", "b"))
    assert marks.split(before, history, after) == ("s", pieces, "q")


def test_a_history_without_questions_is_one_piece() -> None:
    assert marked(read("assistant", "a"))[0].split("s", "h", "q") == ("s", ["h"], "q")


# --- cuts -----------------------------------------------------------------------------------------


def words_of(text: str) -> tuple[int, ...]:
    """A tokenizer that joins a blank with the word behind it, and knows the control token `|`."""
    ids: list[int] = []
    for part in text.replace("|", "\0|\0").split("\0"):
        word = ""
        for char in part:
            if char == " ":
                ids += [hash(word)] if word else []
                word = ""
            word += char
        ids += [hash(word)] if word else []
    return tuple(ids)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["|h:|", "Hello|a:|", "Bye|a:|"], ["|h:|", "Hello|a:|", "Bye|a:|"]),
        (["x|h: ", "Hello|h: ", "Bye|"], ["x", "|h: Hello", "|h: Bye|"]),  # back to the control token
        (["|h: ", "Hello|h: ", "Bye|"], ["|h: Hello", "|h: Bye|"]),  # nothing is left of the first
        (["h: ", "Hello|a:|", "Bye|"], ["h: Hello|a:|", "Bye|"]),  # no place for a cut
        (["x|h: ", "Hello|h: "], ["x", "|h: Hello", "|h: "]),  # the question's header would join it
        ([""], []),
        (["h: "], ["h: "]),
        (["", "Hello|"], ["Hello|"]),
        (["x" * 300 + "|" + "y" * 200, "Hello"], ["x" * 300 + "|" + "y" * 200 + "Hello"]),
    ],
)
def test_cuts_do_not_change_the_ids(pieces: list[str], expected: list[str]) -> None:
    cutter = HistoryCutter(words_of, ["|", " "])
    assert list(cutter.cut(pieces)) == expected
    assert "".join(expected) == "".join(pieces)
    assert sum((words_of(piece) for piece in expected), ()) == words_of("".join(pieces))


def test_a_tokenizer_without_control_tokens() -> None:
    assert HistoryCutter(words_of, []).cut(["a", " b", "c "]) == ("a", " bc ")


# --- keys -----------------------------------------------------------------------------------------

HEAD, PIECES = (1, 2, 3), ((4,), (5, 6), (7, 8, 9))


def keys(
    model: str = "m",
    scope: str = "s",
    salt: str = "",
    head: Sequence[int] = HEAD,
    pieces: tuple[tuple[int, ...], ...] = PIECES,
) -> list[str]:
    return [segment.key for segment in turn_segments(model, scope, salt, head, pieces)]


def test_a_turn_is_named_by_all_before_it_and_its_scope() -> None:
    assert turn_segments("m", "s", "", HEAD, PIECES) == [
        Segment(segment_key("m+s", (1, 2, 3), (4,)), (4,), "turn"),
        Segment(segment_key("m+s", (1, 2, 3, 4), (5, 6)), (5, 6), "turn"),
        Segment(segment_key("m+s", (1, 2, 3, 4, 5, 6), (7, 8, 9)), (7, 8, 9), "turn"),
    ]
    assert keys(pieces=PIECES[:2]) == keys()[:2], "what comes later changes nothing"
    assert keys(pieces=((4,), (5, 0), (7, 8, 9)))[0] == keys()[0]
    others = [
        keys(model="n"),
        keys(scope="t"),
        keys(salt="x"),
        keys(salt="y"),
        keys(salt="\ud800"),
        keys(head=(1, 2)),
        keys(pieces=((0,), *PIECES[1:])),
    ]
    assert len({key for each in (keys(), *others) for key in each}) == 3 * 8


# --- passes ---------------------------------------------------------------------------------------

ANA = Scope("ana")


class Pool:
    """A `ResidencyClient` as far as `JobChooser.resident` asks it."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def resident(self, asked: Sequence[str]) -> list[bool]:
        return [key in self.keys for key in asked]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def chooser(catalog: Catalog, pool: Pool) -> Callable[[int], JobChooser]:
    prompts = PromptBuilder(tokenizer_with(CHATML))

    def make(max_tokens: int = 100) -> JobChooser:
        encoder = Encoder(catalog, prompts, "m", WindowPolicy(2, 3), max_tokens)
        return JobChooser(encoder, pool)  # type: ignore[arg-type]

    return make


def conversation(num_turns: int = 3) -> Conversation:
    head = Segment(segment_key("m", (), HEAD), HEAD, "text")
    digest = scope_digest("ana", None, None)
    return Conversation(ANA, (head, *turn_segments("m", digest, "", HEAD, PIECES[:num_turns])))


def spans(given: Conversation) -> list[Span]:
    ends = [3, 4, 6, 9]
    return [Span(s.key, e - len(s.token_ids), e) for s, e in zip(given.segments, ends, strict=False)]


def test_a_pass_injects_what_leads_and_captures_the_rest(
    chooser: Callable[[int], JobChooser], pool: Pool
) -> None:
    given = conversation()
    head, first, second, third = spans(given)
    segments, ids = given.segments, (1, 2, 3, 4, 5, 6, 7, 8, 9)
    choose = chooser(100).for_turns

    def job(num_leading: int, *captures: Span) -> list[EncodeJob]:
        return [EncodeJob(ANA, ids[: captures[-1].end], captures, 0, segments[:num_leading], False)]

    assert choose(given) == job(0, head, first, second, third)
    pool.keys = {head.key, first.key}
    assert choose(given) == job(2, second, third)
    pool.keys = {head.key, second.key}
    assert choose(given) == job(1, first, third), "what stands behind a gap is computed, and not taken again"
    pool.keys = {head.key, first.key, third.key}
    assert choose(given) == job(2, second), "nothing behind the last gap is computed"
    pool.keys = {first.key, second.key, third.key}
    assert choose(given) == job(0, head)
    pool.keys = {head.key, first.key, second.key, third.key}
    assert choose(given) == []


@pytest.mark.parametrize(("max_tokens", "num_captured"), [(9, 4), (8, 3), (5, 2), (3, 1), (2, 0)])
def test_a_pass_fits_the_model(
    chooser: Callable[[int], JobChooser], max_tokens: int, num_captured: int
) -> None:
    jobs = chooser(max_tokens).for_turns(conversation())
    assert [list(job.captures) for job in jobs] == [spans(conversation())[:num_captured]][
        : bool(num_captured)
    ]
    assert all(len(job.token_ids) == job.captures[-1].end for job in jobs)


def test_turns_are_no_facts_and_follow_the_scopes_epoch(
    chooser: Callable[[int], JobChooser], pool: Pool, catalog: Catalog
) -> None:
    chosen = chooser(100)
    pool.keys = {conversation().segments[0].key}
    [job] = chosen.for_turns(conversation())
    assert (job.num_facts, job.num_fact_tokens) == (0, 0)
    plan = chosen.encoder.plan_of(job)
    assert (plan.scope, plan.epoch, plan.captures) == (scope_digest("ana", None, None), 0, job.captures)
    assert list(plan.segments) == list(job.segments)
    assert salt_of(plan, b"secret")
    [fact] = add(catalog, ANA, "a fact")
    catalog.delete(fact.id)
    assert chosen.encoder.is_outdated(job), "what was deleted may have been said in it"
    [again] = chosen.for_turns(conversation()._replace(epoch=1))
    assert not chosen.encoder.is_outdated(again)
    assert (again.epoch, again.captures) == (1, job.captures), "a deletion leaves the turns as they are"


def one_of(scope: str, *keys: str) -> Conversation:
    head = Segment("head", (0,), "text")
    return Conversation(Scope(scope), (head, *(Segment(key, (1,), "turn") for key in keys)))


def test_waiting_conversations_latest_first() -> None:
    book = TurnBook()
    assert book.take() is None
    first, others = conversation(2), [one_of("bob", str(n)) for n in range(100)]
    book.put(first)
    book.put(others[0])
    book.put(conversation(3))
    assert book.num_waiting == 2, "a later turn takes the earlier one's place"
    book.put(others[0])
    assert [book.take(), book.take(), book.take()] == [others[0], conversation(3), None]
    for one in others:
        book.put(one)
    assert book.num_waiting == 64
    assert book.take() == others[99]


def test_keys_that_a_deletion_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    book = TurnBook()
    for one in (one_of("ana", "a"), one_of("bob", "b"), one_of("ana", "a", "c"), one_of("ana", "d")):
        book.put(one)
        book.take()
    book.put(one_of("ana", "e"))
    assert sorted(book.forget([Scope("ana"), Scope("carl")])) == ["a", "c", "d"], "not the head, nor others'"
    assert book.forget([Scope("ana")]) == []
    assert book.forget([Scope("bob")]) == ["b"]
    monkeypatch.setattr("inferscale.encode_jobs._MAX_KEYS", 4)
    for name in ("ana", "bob", "carl", "ana"):
        book.put(one_of(name, f"{name} 1", f"{name} 2"))
        book.take()
    assert [len(book.forget([Scope(name)])) for name in ("ana", "bob", "carl")] == [2, 0, 2]
