"""A transformer of two layers in float64 that carries out the requests of a check as an engine would.

Its pool keeps rotated keys with the position they are noted under, and injection turns them. What may go
wrong is settable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inferscale.self_check.trials import Probe, Seen, Subject

Array = npt.NDArray[np.float64]

VOCAB, DIM, HEAD, LAYERS, BLOCK = 96, 24, 8, 2, 16


class Row(NamedTuple):
    """Keys and values of all layers for one token, and the position the keys are noted under."""

    keys: Array
    values: Array
    origin: int


@dataclass
class ToyEngine:
    """turn: what injection makes of a distance. learned, sink: strength of learned positions and of an
    attention sink. scale: of all weights. loses: captures find no room. noise: of what the pool keeps."""

    turn: Callable[[int], float] = float
    learned: float = 0.0
    sink: float = 0.0
    scale: float = 1.0
    noise: float = 0.0
    loses: bool = False
    pool: dict[str, list[Row]] = field(default_factory=dict)
    log: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.default_rng(3)

        def weights(*shape: int) -> Array:
            return random.normal(size=shape) * self.scale / np.sqrt(shape[-2])

        self._random = random
        self._embed = random.normal(size=(VOCAB, DIM))
        self._places = random.normal(size=(4096, DIM)) * self.learned
        self._wq, self._wk, self._wv = (weights(LAYERS, DIM, HEAD) * gain for gain in (1.5, 1.5, 1))
        self._wo, self._head = weights(LAYERS, HEAD, DIM), weights(DIM, VOCAB)

    def run(self, checking: Generator[list[Probe], list[Seen], Any]) -> Any:
        """The verdict of a check."""
        try:
            probes = next(checking)
            while True:
                self.log += probes
                try:
                    seen = [self.answer(probe) for probe in probes]
                except RuntimeError as error:
                    probes = checking.throw(error)
                else:
                    probes = checking.send(seen)
        except StopIteration as end:
            return end.value

    def answer(self, probe: Probe) -> Seen:
        plan = probe.plan
        if plan.order is not None:
            for key in plan.order.keys:
                self.pool.pop(key, None)
            return Seen(({0: 0.0},), {"answer": {}})
        rows: list[Row] = []
        for segment in plan.segments:
            assert probe.token_ids[len(rows) : len(rows) + len(segment.token_ids)] == segment.token_ids
            rows += [self._injected(row, len(rows) + i) for i, row in enumerate(self.pool[segment.key])]
        num_injected = len(rows)
        steps = []
        ids = list(probe.token_ids)
        for _ in range(probe.max_tokens):
            for token in ids[len(rows) :]:
                row, logprobs = self._step(token, rows)
                rows.append(row)
            best = np.argsort(-logprobs)[: probe.num_logprobs]
            chosen = int(best[0]) if probe.allowed is None else probe.allowed
            steps.append({int(token): float(logprobs[token]) for token in {*best.tolist(), chosen}})
            ids.append(chosen)
        captured = 0
        for span in () if self.loses else plan.captures:
            shift = span.misplaced_blocks * BLOCK
            self.pool[span.key] = [
                row._replace(origin=span.start + i + shift)
                for i, row in enumerate(rows[span.start : span.end])
            ]
            captured += 1
        return Seen(tuple(steps), {"captured": captured, "injected_tokens": num_injected})

    def _injected(self, row: Row, place: int) -> Row:
        delta = place - row.origin
        keys = _rotated(row.keys, self.turn(delta)) if delta else row.keys
        if self.noise:
            keys = keys + self._random.normal(size=keys.shape) * self.noise
        return Row(keys, row.values, place)

    def _step(self, token: int, rows: list[Row]) -> tuple[Row, Array]:
        place = len(rows)
        state = self._embed[token] + self._places[place]
        keys, values = np.zeros((LAYERS, HEAD)), np.zeros((LAYERS, HEAD))
        for layer in range(LAYERS):
            keys[layer] = _rotated(state @ self._wk[layer], place)
            values[layer] = state @ self._wv[layer]
            all_keys = np.array([*(row.keys[layer] for row in rows), keys[layer]])
            all_values = np.array([*(row.values[layer] for row in rows), values[layer]])
            weights = np.exp(all_keys @ _rotated(state @ self._wq[layer], place) / np.sqrt(HEAD))
            mixed = weights @ all_values / (weights.sum() + self.sink)
            state = state + mixed @ self._wo[layer]
            state = state / np.sqrt((state**2).mean())
        logits = state @ self._head
        return Row(keys, values, place), logits - np.log(np.exp(logits).sum())


def _rotated(vector: Array, angle: float) -> Array:
    angles = angle / 1000.0 ** (np.arange(HEAD // 2) / (HEAD // 2))
    first, second = vector[..., : HEAD // 2], vector[..., HEAD // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


SUBJECT = Subject("model", tuple(range(40)), 4096, "float32", 20, True)
