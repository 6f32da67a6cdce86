"""Float32 products stay float32: what happens to torch's settings, which exist without a GPU as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from inferscale.retrieval.precision import exact_products

CUDA = torch.device("cuda")
matmul: Any = torch.backends.cuda.matmul


def reset() -> None:
    torch.backends.fp32_precision = "none"  # type: ignore[assignment]
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    reset()
    yield
    reset()


def state() -> list[object]:
    """All that can be asked of the setting; reading it by an older name raises where only a newer was set."""
    questions: list[Callable[[], object]] = [
        lambda: matmul.fp32_precision,
        lambda: matmul.allow_tf32,
        torch.get_float32_matmul_precision,
        lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    ]
    answers: list[object] = []
    for question in questions:
        try:
            answers.append(question())
        except RuntimeError:
            answers.append("raises")
    return answers


def by_matmul() -> None:
    matmul.fp32_precision = "tf32"


def by_allow() -> None:
    matmul.allow_tf32 = True


def by_all() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[assignment]


WAYS = [
    by_matmul,
    by_allow,
    by_all,
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.set_float32_matmul_precision("medium"),
]


@pytest.mark.parametrize("allow", WAYS)
def test_tf32_is_refused_inside_and_allowed_again_afterwards(allow: Callable[[], None]) -> None:
    allow()
    before = state()
    assert before[0] == "tf32"
    with exact_products(CUDA):
        assert matmul.fp32_precision == "ieee"
        assert matmul.allow_tf32 is False, "reading it must not raise: torch.compile does in other threads"
        with exact_products(CUDA):
            pass
        assert matmul.fp32_precision == "ieee"
    assert state() == before
    with pytest.raises(ZeroDivisionError), exact_products(CUDA):
        _ = 1 // 0
    assert state() == before


def test_nothing_is_touched_where_tf32_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    with exact_products(CUDA):
        assert state() == before
    assert state() == before
    by_matmul()
    with exact_products(torch.device("cpu")):
        assert matmul.fp32_precision == "tf32"


def test_the_last_thread_restores_it() -> None:
    by_allow()
    before, both, left = state(), Barrier(2), Barrier(2)

    def first() -> None:
        with exact_products(CUDA):
            both.wait(10)
        left.wait(10)

    def last() -> None:
        with exact_products(CUDA):
            both.wait(10)
            left.wait(10)
            assert matmul.fp32_precision == "ieee"

    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(first), pool.submit(last)):
            done.result()
    assert state() == before


def test_who_allows_it_meanwhile_is_heard() -> None:
    by_allow()
    with exact_products(CUDA):
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    with exact_products(CUDA):
        pass
    assert torch.get_float32_matmul_precision() == "medium"
