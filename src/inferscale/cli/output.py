"""What commands print: data on stdout, talk on stderr, facts as JSON or as a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from inferscale.facts import Fact, SearchHit


def say(message: str) -> None:
    """Talk: progress and hints, on stderr."""
    click.echo(message, err=True)


def emit(data: Any) -> None:
    """One JSON document a line, on stdout."""
    text = json.dumps(data, ensure_ascii=False)
    click.echo(text.encode("utf-8", "replace").decode())  # half a surrogate pair is no text


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def rate_text(per_second: float) -> str:
    """With a digit where that says more than a whole number."""
    return f"{per_second:.1f}" if per_second < 9.95 else f"{per_second:.0f}"


def fact_json(fact: Fact) -> dict[str, Any]:
    return {
        "id": fact.id,
        "text": fact.text,
        "speaker": fact.speaker,
        "said_at": fact.said_at,
        "created_at": fact.created_at,
        "metadata": fact.metadata,
        "expires_at": fact.expires_at,
        **asdict(fact.scope),
    }


def block_json(block: Fact) -> dict[str, Any]:
    return {"name": block.block, "text": block.text, "id": block.id, **asdict(block.scope)}


def hit_json(hit: SearchHit) -> Mapping[str, Any]:
    return {"score": round(hit.score, 4), **fact_json(hit.fact)}


def fact_line(fact: Fact) -> str:
    source = " ".join(part for part in (fact.speaker, f"({fact.said_at})" if fact.said_at else None) if part)
    return f"{source}: {fact.text}" if source else fact.text
