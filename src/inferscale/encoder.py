"""What has to be encoded and how: from facts in the catalog to encode passes with keys.

A job is one engine request: anchor, window and facts as token ids, and the spans to capture. The
pass of a fact is recorded before it runs, so that its KV can be rebuilt in the same way after a
restart or an eviction, and so that a deletion knows every key that attended to the fact. Knows
nothing of vLLM: `MemoryLLM` (and the server) run the jobs.

With `mixed` in the policy (`windows`), a scope's facts are encoded so:

    at least mixed / 2 new facts     in mixed passes, with all that have been in sliding passes only
    fewer                            in sliding passes: a chat's turn stays cheap
    until those and the new ones     then all of them in mixed passes, which replace the sliding ones
    are `mixed`

Not mixed is what expires, since each pass goes with any of its facts, and what is too long for a pass.

A mixed pass is one pass in the catalog and two jobs with the same keys, one right behind the other: the
first captures part 1 of each fact, the second, in the other order, part 2. It counts once all of it is
captured; until then its facts keep the KV of sliding passes, and are planned again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import groupby, islice
from typing import NamedTuple

from inferscale.catalog import Catalog, NewPass
from inferscale.catalog import EncodePass as RecordedPass
from inferscale.config import MIN_MIXED
from inferscale.facts import Fact, Scope
from inferscale.pass_runs import pass_runs
from inferscale.plan import Plan, Segment, Span, scope_digest, segment_key
from inferscale.prompt import PromptBuilder
from inferscale.windows import (
    WindowPolicy,
    aligned,
    mixed_groups,
    plan_passes,
    split_group,
)

_PASSES_AT_ONCE = 64
"""Passes that are read or stored in one transaction of the catalog: each costs a write to the disk."""
_FACTS_AT_ONCE = 256


class EncodeJob(NamedTuple):
    """One encode pass. token_ids: anchor, then the facts of the pass; captures: spans of it.

    epoch: of the scope, from before its facts were read: a job that is older than a deletion must not run.
    segments: what the pass begins with, injected instead of computed. of_facts: False where it captures
    turns of a conversation. fact_ids: of the facts whose KV its pass captures.
    """

    scope: Scope
    token_ids: tuple[int, ...]
    captures: tuple[Span, ...]
    epoch: int = 0
    segments: tuple[Segment, ...] = ()
    of_facts: bool = True
    fact_ids: tuple[str, ...] = ()

    def in_parts(self, num_tokens: int) -> list[EncodeJob]:
        """Jobs of rising length, each longer than the one before by so many tokens, that capture the same.

        Each computes what it has more where it finds the one before in a prefix cache. num_tokens: whole
        blocks of that. What begins with segments stays whole: it is short.
        """
        if self.segments:
            return [self]
        first, *others = self.captures  # the anchor, which makes each part an encode pass
        parts, done = [], first.end
        for end in [*range(num_tokens, len(self.token_ids), num_tokens), len(self.token_ids)]:
            if end <= first.end:
                continue
            captures = (first, *(span for span in others if done < span.end <= end))
            parts.append(self._replace(token_ids=self.token_ids[:end], captures=captures))
            done = end
        return parts or [self]

    @property
    def part(self) -> int:
        """1 and 2 of the two jobs of a mixed pass, 0 of others."""
        return max((span.part for span in self.captures), default=0)

    @property
    def num_fact_tokens(self) -> int:
        """Tokens of the facts that can be used once it has run; a system text at the start is not one."""
        return sum(span.end - span.start for span in self._stored)

    @property
    def num_facts(self) -> int:
        """Facts that can be used once it has run."""
        return len(self._stored)

    @property
    def _stored(self) -> list[Span]:
        return [span for span in self.captures if span.start > 0 and span.part != 1] if self.of_facts else []


class Encoder:
    """Plans encode passes for one model.

    model: its fingerprint. max_tokens: the longest pass, anchor included (below `max_model_len`,
    since a request also generates one token).
    """

    def __init__(
        self, catalog: Catalog, prompts: PromptBuilder, model: str, policy: WindowPolicy, max_tokens: int
    ) -> None:
        self.catalog = catalog
        self.prompts = prompts
        self.model = model
        # What the catalog files encodings under: with another anchor all keys are others.
        self._anchor_key = self.head_key(prompts.anchor_ids)
        self.encodings_of = f"{model}+{self._anchor_key}"
        self.policy = policy
        self.max_tokens = max_tokens

    def for_model(self, model: str) -> Encoder:
        """The same for another model of this tokenizer, such as this one under an adapter."""
        return Encoder(self.catalog, self.prompts, model, self.policy, self.max_tokens)

    @property
    def anchor_key(self) -> str:
        """Key of what stands in front of every pass."""
        return self._anchor_key

    @property
    def _room(self) -> int:
        """Tokens of facts in one pass."""
        return self.max_tokens - len(self.prompts.anchor_ids)

    def head_job(self, head_ids: Sequence[int]) -> EncodeJob:
        """Capture a system text that opens prompts; an exact segment, the same for everybody."""
        span = Span(self.head_key(head_ids), 0, len(head_ids))
        return EncodeJob(Scope(), tuple(head_ids), (span,))

    def head_key(self, head_ids: Sequence[int]) -> str:
        return segment_key(self.model, (), head_ids)

    def new_jobs(
        self, filter: Scope, only: Set[str] | None = None, *, with_followers: bool = False
    ) -> list[EncodeJob]:
        """Plan and record passes for the facts under `filter` that were never encoded for this model; mixed
        ones also for those that were encoded in sliding passes only.

        only: ids of facts; passes that capture none of them are neither recorded nor returned. After a change
        of model or format no fact of a scope is encoded, and what one call plans stays small all the same.
        with_followers: also for the facts said right behind them, whose KV is gone where it had seen one of
        them.
        """
        jobs: list[EncodeJob] = []
        for scope, found, provisional in self._lacking(filter, only):
            facts = [fact for fact in found if fact.block is None]
            groups = self._groups(facts, provisional)
            if groups:
                jobs.extend(self._plan_groups(scope, groups, {fact.id for fact in facts}, only))
            runs = [facts] if only is None else self._runs(facts, only, with_followers)
            for run in runs:
                if sliding := [fact for fact in run if not groups or not self._is_mixable(fact)]:
                    jobs.extend(self._plan_scope(scope, sliding, None if with_followers else only))
            jobs.extend(self._plan_blocks(scope, [fact for fact in found if fact.block is not None], only))
        return jobs

    def _lacking(
        self, filter: Scope, only: Set[str] | None
    ) -> Iterator[tuple[Scope, list[Fact], list[Fact]]]:
        """By exact scope: its facts without KV, and those that were encoded in sliding passes only."""
        unencoded = self.catalog.unencoded(self.encodings_of, filter)
        if only is not None and only.isdisjoint(fact.id for fact in unencoded):
            return
        found = {
            scope: list(facts) for scope, facts in groupby(sorted(unencoded, key=_scope_order), _scope_of)
        }
        if only is not None:
            for scope, facts in found.items():
                if not only.isdisjoint(fact.id for fact in facts):
                    yield scope, facts, self._provisional(scope, is_exact=True)
            return
        provisional = self._provisional(filter)
        encoded = {scope: list(facts) for scope, facts in groupby(provisional, _scope_of)}
        for scope in dict.fromkeys([*found, *encoded]):
            yield scope, found.get(scope, []), encoded.get(scope, [])

    def _provisional(self, filter: Scope, *, is_exact: bool = False) -> list[Fact]:
        if not self.policy.mixed:
            return []
        facts = self.catalog.provisional(self.encodings_of, filter, is_exact=is_exact)
        return sorted(facts, key=_scope_order)

    def _groups(self, new: Sequence[Fact], provisional: Sequence[Fact]) -> list[list[Fact]]:
        """Facts of a scope for mixed passes; none where they are too few."""
        size = self.policy.mixed
        num_new = sum(map(self._is_mixable, new))
        facts = sorted(filter(self._is_mixable, [*new, *provisional]), key=_scope_order)
        if not size or (2 * num_new < size and len(facts) < size):
            return []
        names = ["\0".join((fact.speaker or "", fact.said_at or "", fact.text)) for fact in facts]
        return [
            [facts[item] for item in group] for group in mixed_groups(names, size, self.policy.neighbours)
        ]

    def _is_mixable(self, fact: Fact) -> bool:
        """Told without its tokens: a text rarely has more of them than characters."""
        return fact.expires_at is None and len(fact.text) <= self._room

    def _runs(self, facts: Sequence[Fact], wanted: Set[str], with_followers: bool) -> list[list[Fact]]:
        """Of facts without KV, in the order they were said: as many as one pass captures around each that is
        wanted, or behind it too; what stands together is one run."""
        stride = self.policy.stride
        reach = 1 + (1 + -(-self.policy.window // stride) if with_followers else 0)
        places = {index // stride for index, fact in enumerate(facts) if fact.id in wanted}
        places = {place + further for place in places for further in range(reach)}
        runs: list[list[Fact]] = []
        for place in sorted(places):
            if place - 1 not in places:
                runs.append([])
            runs[-1] += facts[place * stride : (place + 1) * stride]
        return runs

    def _plan_groups(
        self, scope: Scope, groups: Iterable[Sequence[Fact]], new: Set[str], only: Set[str] | None
    ) -> list[EncodeJob]:
        """new: ids of the facts without KV. Where long texts leave few of a group for one pass, it is a
        sliding one."""
        epoch, room, neighbours = self.catalog.epoch(scope), self._room, self.policy.neighbours
        planned: list[_Planned] = []
        few: list[Fact] = []
        for group in groups:
            if only is not None and only.isdisjoint(fact.id for fact in group):
                continue
            # Read again: what they say has to be of that epoch or later.
            read = {
                fact.id: (fact, ids)
                for fact in self.catalog.facts_by_ids(fact.id for fact in group)
                if len(ids := self.prompts.fact_ids(fact)) <= room
            }
            together = [group[start : start + neighbours] for start in range(0, len(group), neighbours)]
            rest = aligned([[read[fact.id] for fact in facts if fact.id in read] for facts in together])
            for part in split_group([len(ids) for _, ids in rest], room, neighbours):
                chosen = rest[part.start : part.stop]
                if only is not None and only.isdisjoint(fact.id for fact, _ in chosen):
                    continue
                if len(chosen) < MIN_MIXED:
                    few += [fact for fact, _ in chosen if fact.id in new]
                    continue
                fact_ids, items_ids = [fact.id for fact, _ in chosen], [ids for _, ids in chosen]
                planned.append(self._planned(scope, fact_ids, items_ids, 0, epoch, 2, neighbours))
        jobs = self._recorded(scope, planned)
        return jobs + (self._plan_scope(scope, sorted(few, key=_scope_order), only) if few else [])

    def _plan_blocks(self, scope: Scope, blocks: Sequence[Fact], only: Set[str] | None) -> list[EncodeJob]:
        """Each core block alone behind the anchor, so that nothing else has seen it when it changes."""
        epoch = self.catalog.epoch(scope)
        planned = []
        # Read again: what they say has to be of that epoch or later.
        for block in self.catalog.facts_by_ids(block.id for block in blocks):
            ids = self.prompts.fact_ids(block)
            if (only is None or block.id in only) and len(ids) <= self._room:
                planned.append(self._planned(scope, [block.id], [ids], 0, epoch))
        return self._recorded(scope, planned)

    def _plan_scope(self, scope: Scope, needed: list[Fact], only: Set[str] | None) -> list[EncodeJob]:
        epoch = self.catalog.epoch(scope)  # first: what is read of later than this is not older
        before = self.catalog.neighbours_before(needed[0], self.policy.window)
        wanted = {fact.id for fact in needed}
        items = [*before, *self._between(scope, needed[0].seq, needed[-1].seq)]
        items_ids = [self.prompts.fact_ids(fact) for fact in items]
        lengths = [len(ids) for ids in items_ids]
        # A text that was stored without a look at this model may be too long for it; it stays text.
        passes = plan_passes(
            lengths,
            [fact.id in wanted and length <= self._room for fact, length in zip(items, lengths, strict=True)],
            self.policy,
            anchor_tokens=len(self.prompts.anchor_ids),
            max_tokens=self.max_tokens,
        )
        planned: list[_Planned] = []
        for encode_pass in passes:
            # What stands between captured facts is captured too: its KV is computed anyway.
            num_window = len(encode_pass.window)
            fact_ids = [items[index].id for index in encode_pass.items]
            if only is not None and only.isdisjoint(fact_ids[num_window:]):
                continue
            pass_ids = [items_ids[index] for index in encode_pass.items]
            planned.append(self._planned(scope, fact_ids, pass_ids, num_window, epoch))
        return self._recorded(scope, planned)

    def _between(self, scope: Scope, first: int, last: int) -> list[Fact]:
        """Facts of exactly this scope by sequence number, `first` and `last` included."""
        found: list[Fact] = []
        after = first - 1
        while after < last and (chunk := self.catalog.facts(scope, _FACTS_AT_ONCE, after)):
            found += [fact for fact in chunk if fact.seq <= last and fact.scope == scope]
            after = chunk[-1].seq
        return found

    def _recorded(self, scope: Scope, planned: Sequence[_Planned]) -> list[EncodeJob]:
        """Store passes; none where a fact was deleted or reworded meanwhile: they must not run."""
        jobs: list[EncodeJob] = []
        for start in range(0, len(planned), _PASSES_AT_ONCE):
            chunk = planned[start : start + _PASSES_AT_ONCE]
            # None is recorded once the scope's epoch has risen: the text may be another by now.
            new_passes, epoch = [one.new for one in chunk], chunk[0].jobs[0].epoch
            pass_ids = self.catalog.passes.record_all(self.encodings_of, scope, new_passes, epoch)
            for one, pass_id in zip(chunk, pass_ids, strict=True):
                jobs += one.jobs if pass_id is not None else []
        return jobs

    def rebuild_jobs(self, fact_ids: Iterable[str]) -> list[EncodeJob]:
        """The recorded passes that these facts' KV comes from, each once, however many of its facts."""
        encodings = self.catalog.passes.encodings(self.encodings_of, fact_ids)
        pass_ids = iter(dict.fromkeys(encoding.pass_id for encoding in encodings.values()))
        jobs: list[EncodeJob] = []
        while chunk := list(islice(pass_ids, _PASSES_AT_ONCE)):
            passes = self.catalog.passes.by_ids(chunk).values()
            epochs = {scope: self.catalog.epoch(scope) for scope in {recorded.scope for recorded in passes}}
            needed = dict.fromkeys(fact_id for recorded in passes for fact_id in recorded.fact_ids)
            facts = {fact.id: fact for fact in self.catalog.facts_by_ids(needed)}
            for recorded in passes:
                jobs += self._rebuild_pass(recorded, facts, epochs[recorded.scope])
        return jobs

    def _rebuild_pass(
        self, recorded: RecordedPass, facts: Mapping[str, Fact], epoch: int
    ) -> Sequence[EncodeJob]:
        """The jobs of a recorded pass; none where a fact of it is gone, and the pass with it or its end.

        What has expired is gone: its purge takes the pass, and the others of it are then planned anew.
        """
        now = time.time()
        if any(fact_id not in facts or facts[fact_id].has_expired(now) for fact_id in recorded.fact_ids):
            return []
        items_ids = [self.prompts.fact_ids(facts[fact_id]) for fact_id in recorded.fact_ids]
        scope, fact_ids, num_window = recorded.scope, recorded.fact_ids, recorded.num_window
        again = self._planned(
            scope, fact_ids, items_ids, num_window, epoch, recorded.directions, recorded.neighbours
        )
        if list(again.new.keys) == [recorded.keys.get(fact_id) for fact_id in again.new.captured_ids]:
            return again.jobs
        # Other keys mean that facts are rendered or tokenized in another way since: file it anew.
        return self._recorded(scope, [again])

    def _planned(
        self,
        scope: Scope,
        fact_ids: Sequence[str],
        items_ids: Sequence[Sequence[int]],
        num_window: int,
        epoch: int,
        directions: int = 1,
        neighbours: int = 1,
    ) -> _Planned:
        """A pass over anchor and facts: one job, or one for each of two directions.

        The anchor is captured as well, it opens every prompt with the default system text.
        """
        anchor = self.prompts.anchor_ids
        jobs = []
        owner = owned_by(self.model, scope)
        for run in pass_runs(owner, anchor, items_ids, num_window, directions, neighbours):
            captures = (Span(self._anchor_key, 0, len(anchor)), *run.captures)
            captured = tuple(fact_ids[num_window:])
            jobs.append(EncodeJob(scope, run.token_ids, captures, epoch, fact_ids=captured))
        keys = [span.key for span in jobs[0].captures[1:]]
        new = NewPass(fact_ids[:num_window], fact_ids[num_window:], keys, directions, neighbours)
        return _Planned(jobs, new)

    def keys(self, fact_ids: Iterable[str]) -> dict[str, str]:
        """Fact id → key of its KV, for facts that were encoded for this model."""
        return {
            fact_id: encoding.key
            for fact_id, encoding in self.catalog.passes.encodings(self.encodings_of, fact_ids).items()
        }

    def plan_of(self, job: EncodeJob) -> Plan:
        """The plan that makes the connector inject a job's segments and capture its spans."""
        scope = job.scope
        digest = scope_digest(scope.user_id, scope.agent_id, scope.run_id)
        captures = job.captures
        if job.fact_ids:
            anchor = self._anchor_key
            captures = tuple(replace(span, shared=span.key != anchor) for span in captures)
        return Plan(self.model, digest, job.epoch, segments=job.segments, captures=captures)

    def is_outdated(self, job: EncodeJob) -> bool:
        """Whether something of the job's scope was deleted since it was planned: it may hold that text."""
        return not job.scope.is_empty() and self.catalog.epoch(job.scope) != job.epoch


class _Planned(NamedTuple):
    """A pass to be recorded and the jobs that run it."""

    jobs: Sequence[EncodeJob]
    new: NewPass


def owned_by(model: str, scope: Scope) -> str:
    """What keys of a scope's segments name as their model. The same text of two scopes has two keys: else one
    could learn from `injectable`, or from the time an answer takes, that another holds it as well."""
    return f"{model}+{scope_digest(scope.user_id, scope.agent_id, scope.run_id)}"


def _scope_of(fact: Fact) -> Scope:
    return fact.scope


def _scope_order(fact: Fact) -> tuple[str, str, str, int]:
    scope = fact.scope
    return (scope.user_id or "", scope.agent_id or "", scope.run_id or "", fact.seq)
