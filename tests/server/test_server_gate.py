"""When passes run: their order, who gives way to whom, and what happens to errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from inferscale.server import gate as gate_module
from inferscale.server.gate import AT_ONCE, Gate


class Passes:
    """Runs jobs for a gate. log: what ran, in order. Jobs of `blocks` wait for their event."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.blocks: dict[str, asyncio.Event] = {}
        self.fails: dict[str, BaseException] = {}
        self.num_running = 0
        self.most_at_once = 0
        self.gate: Gate[str] = Gate(self.run)

    async def run(self, job: str) -> None:
        self.log.append(job)
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            await asyncio.sleep(0)
            if job in self.blocks:
                await self.blocks[job].wait()
            if job in self.fails:
                raise self.fails[job]
        finally:
            self.num_running -= 1

    def put(self, name: str, *jobs: str, is_urgent: bool = False) -> None:
        async def choose() -> Sequence[str]:
            return jobs or (name,)

        self.gate.put(name, choose, is_urgent=is_urgent)

    async def until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < end_s, self.log
            await asyncio.sleep(0.001)


def in_loop(test: Callable[[Passes], Coroutine[Any, Any, None]]) -> Passes:
    """Run a test and close its gate."""

    async def run() -> Passes:
        passes = Passes()
        await test(passes)
        await passes.gate.close()
        return passes

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_work_runs_in_the_order_it_was_asked_for() -> None:
    async def test(passes: Passes) -> None:
        for name in "abc":
            passes.put(name, f"{name}1", f"{name}2")
        assert passes.gate.num_waiting == 3
        assert not passes.gate.is_idle
        await passes.gate.drained()
        assert passes.gate.num_waiting == 0
        assert passes.gate.is_idle

    assert in_loop(test).log == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_an_idle_gate_is_drained() -> None:
    async def test(passes: Passes) -> None:
        await passes.gate.drained()
        await passes.gate.close()
        await passes.gate.close()

    assert in_loop(test).log == []


def test_the_same_name_waits_once_and_can_be_asked_for_again() -> None:
    async def test(passes: Passes) -> None:
        passes.put("a")
        passes.put("a", "never")
        assert passes.gate.num_waiting == 1
        await passes.gate.drained()
        passes.put("a", "again")
        await passes.gate.drained()

    assert in_loop(test).log == ["a", "again"]


def test_what_is_asked_for_while_it_is_chosen_is_chosen_once_more() -> None:
    """What came meanwhile may not be in it."""

    async def test(passes: Passes) -> None:
        chosen = asyncio.Event()

        async def slow() -> Sequence[str]:
            await chosen.wait()
            return ["first"]

        passes.gate.put("a", slow)
        await asyncio.sleep(0.01)
        assert not passes.gate.is_idle, "it is being chosen"
        passes.put("a", "second")
        chosen.set()
        await passes.gate.drained()

    assert in_loop(test).log == ["first", "second"]


def test_urgent_work_goes_before_what_was_chosen() -> None:
    async def test(passes: Passes) -> None:
        passes.blocks["a1"] = asyncio.Event()
        with passes.gate.chatting():  # one at a time
            passes.put("a", "a1", "a2", "a3")
            passes.put("b")
            await passes.until(lambda: "a1" in passes.log)
            passes.put("urgent", "u1", "u2", is_urgent=True)
            passes.put("urgent", "never", is_urgent=True)
            passes.blocks["a1"].set()
        await passes.gate.drained()

    assert in_loop(test).log == ["a1", "u1", "u2", "a2", "a3", "b"]


def test_urgent_work_goes_before_what_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HOLD_S", 0.3)

    async def test(passes: Passes) -> None:
        with passes.gate.chatting():
            passes.put("a")
            await asyncio.sleep(0.01)
            assert passes.log == []
            passes.put("urgent", is_urgent=True)
            await passes.gate.drained()

    assert in_loop(test).log == ["urgent", "a"]


def test_the_same_name_can_be_urgent_and_not() -> None:
    async def test(passes: Passes) -> None:
        passes.put("a", "plain")
        passes.put("a", "urgent", is_urgent=True)
        await passes.gate.drained()

    assert in_loop(test).log == ["urgent", "plain"]


# chats ------------------------------------------------------------------------------------------


def test_without_chats_several_run_at_once() -> None:
    async def test(passes: Passes) -> None:
        passes.put("a", *(str(n) for n in range(2 * AT_ONCE + 1)))
        await passes.gate.drained()

    passes = in_loop(test)
    assert passes.most_at_once == AT_ONCE
    assert len(passes.log) == 2 * AT_ONCE + 1


def test_a_pass_waits_for_chats_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HOLD_S", 10)

    async def test(passes: Passes) -> None:
        with passes.gate.chatting():
            with passes.gate.chatting():
                passes.put("a")
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)
            assert passes.log == [], "one chat still runs"
            assert passes.gate.num_waiting == 1
        await passes.gate.drained()

    start_s = time.monotonic()
    assert in_loop(test).log == ["a"]
    assert time.monotonic() - start_s < 5


def test_a_pass_does_not_wait_for_ever_and_then_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HOLD_S", 0.02)

    async def test(passes: Passes) -> None:
        with passes.gate.chatting():
            passes.put("a", "1", "2", "3")
            start_s = time.monotonic()
            await passes.gate.drained()
            assert time.monotonic() - start_s >= 3 * 0.02

    passes = in_loop(test)
    assert passes.log == ["1", "2", "3"]
    assert passes.most_at_once == 1


def test_while_chats_come_and_go_passes_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(passes: Passes) -> None:
        assert not passes.gate.has_company
        with passes.gate.chatting():
            assert passes.gate.has_company
        assert passes.gate.has_company, "the next one is expected"
        passes.put("a", "1", "2", "3")
        await passes.gate.drained()
        assert passes.most_at_once == 1
        monkeypatch.setattr(gate_module, "RECENT_S", 0.0)
        assert not passes.gate.has_company
        passes.put("b", "4", "5", "6")
        await passes.gate.drained()

    assert in_loop(test).most_at_once == 3


def test_a_chat_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "RECENT_S", 0.0)

    async def test(passes: Passes) -> None:
        with pytest.raises(ValueError, match="chat"), passes.gate.chatting():
            raise ValueError("chat")
        passes.put("a", "1", "2")
        await passes.gate.drained()

    assert in_loop(test).most_at_once == 2


# errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
def test_a_pass_that_fails_is_told_and_the_next_ones_run(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The second: an engine that aborts a request cancels what waits for it, not the gate."""

    async def test(passes: Passes) -> None:
        passes.fails["2"] = error
        passes.put("a", "1", "2", "3")
        passes.put("b")
        await passes.gate.drained()

    with caplog.at_level(logging.ERROR):
        assert in_loop(test).log == ["1", "2", "3", "b"]
    assert [record.message.split(";")[1] for record in caplog.records] == [" its facts stay text"]


def test_a_choice_that_fails_is_told_and_the_next_ones_run(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> Sequence[str]:
        raise ValueError("broken")

    async def test(passes: Passes) -> None:
        passes.gate.put("a", failing)
        passes.gate.put("b", failing, is_urgent=True)
        passes.put("c")
        await passes.gate.drained()

    assert in_loop(test).log == ["c"]
    assert len(caplog.records) == 2


def test_a_choice_of_nothing() -> None:
    async def test(passes: Passes) -> None:
        async def nothing() -> Sequence[str]:
            return []

        passes.gate.put("a", nothing)
        passes.gate.put("b", nothing, is_urgent=True)
        await passes.gate.drained()
        passes.put("c")
        await passes.gate.drained()

    assert in_loop(test).log == ["c"]


def test_a_gate_whose_task_was_ended_begins_again() -> None:
    async def test(passes: Passes) -> None:
        async def aborted() -> Sequence[str]:
            raise asyncio.CancelledError

        passes.gate.put("a", aborted)
        await asyncio.sleep(0.01)
        passes.put("b")
        await passes.gate.drained()

    assert in_loop(test).log == ["b"]


# the end ----------------------------------------------------------------------------------------


def test_closing_in_the_middle() -> None:
    async def test(passes: Passes) -> None:
        passes.blocks["1"] = asyncio.Event()
        passes.put("a", *(str(n) for n in range(2 * AT_ONCE)))
        passes.put("b")
        passes.put("c", is_urgent=True)
        await passes.until(lambda: "1" in passes.log)
        await passes.gate.close()
        assert passes.num_running == 0, "what ran was ended"
        ran = list(passes.log)
        passes.put("d")
        passes.put("e", is_urgent=True)
        await asyncio.sleep(0.02)
        assert passes.log == ran
        assert (passes.gate.is_idle, passes.gate.num_waiting) == (True, 0)
        await passes.gate.drained()

    assert "b" not in in_loop(test).log


def test_closing_while_it_gives_way_or_chooses() -> None:
    async def test(passes: Passes) -> None:
        with passes.gate.chatting():
            passes.put("a")
            await asyncio.sleep(0.01)
            await passes.gate.close()

    assert in_loop(test).log == []

    async def never() -> Sequence[str]:
        await asyncio.Event().wait()
        return ["x"]

    async def choosing(passes: Passes) -> None:
        passes.gate.put("a", never)
        await asyncio.sleep(0.01)
        await passes.gate.close()
        assert passes.gate.is_idle

    assert in_loop(choosing).log == []


def test_many_at_a_time() -> None:
    """Everything that is asked for runs once, whatever chats come and go."""

    async def chat(passes: Passes, wait: Callable[[], Awaitable[None]]) -> None:
        for _ in range(20):
            with passes.gate.chatting():
                await wait()
            await wait()

    async def test(passes: Passes) -> None:
        chats = [asyncio.create_task(chat(passes, lambda: asyncio.sleep(0.001))) for _ in range(3)]
        for n in range(50):
            passes.put(f"n{n}", is_urgent=n % 3 == 0)
            if n % 10 == 0:
                await asyncio.sleep(0.002)
        await asyncio.gather(*chats)
        await passes.gate.drained()

    assert sorted(in_loop(test).log) == sorted(f"n{n}" for n in range(50))


def test_work_that_is_being_chosen_still_waits() -> None:
    """Else whoever waits for the end of encoding goes on before it has begun."""

    async def test(passes: Passes) -> None:
        chosen, is_choosing = asyncio.Event(), asyncio.Event()

        async def choose() -> Sequence[str]:
            is_choosing.set()
            await chosen.wait()
            return ("a",)

        passes.gate.put("slow", choose)
        await is_choosing.wait()
        assert passes.gate.num_waiting == 1
        chosen.set()
        await passes.gate.drained()
        assert passes.gate.num_waiting == 0

    assert in_loop(test).log == ["a"]
