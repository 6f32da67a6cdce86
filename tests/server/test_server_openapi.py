"""The OpenAPI document of the memory API says what the API does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgi_server import FakeServer
from pydantic import BaseModel

from inferscale.server import models

METHODS = {"get", "post", "put", "delete"}


@pytest.fixture
def document(serve: Callable[..., FakeServer]) -> dict[str, Any]:
    return dict(serve().ask("GET", "/v1/memories/openapi.json").json)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        assert set(item) <= METHODS
        for method, operation in item.items():
            yield method, path, operation


def values(node: Any, name: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == name:
                yield value
            yield from values(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from values(value, name)


def test_all_routes_are_there(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert {(method, path) for method, path, _ in operations(document)} == {
        ("post", "/v1/memories"), ("get", "/v1/memories"), ("delete", "/v1/memories"),
        ("post", "/v1/memories/search"), ("post", "/v1/memories/warm"), ("get", "/v1/memories/stats"),
        ("put", "/v1/memories/injection"), ("get", "/v1/memories/{fact_id}"),
        ("put", "/v1/memories/{fact_id}"), ("delete", "/v1/memories/{fact_id}"),
        ("get", "/v1/memories/{fact_id}/history"),
        ("get", "/v1/memories/blocks"), ("get", "/v1/memories/blocks/{name}"),
        ("put", "/v1/memories/blocks/{name}"), ("delete", "/v1/memories/blocks/{name}"),
    }  # fmt: skip


def test_references_resolve_and_names_are_unique(document: dict[str, Any]) -> None:
    references = list(values(document, "$ref"))
    assert references
    for reference in references:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    ids = list(values(document["paths"], "operationId"))
    assert len(ids) == len(set(ids)) == len(list(operations(document)))
    for _, path, operation in operations(document):
        named = {
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"
        }
        assert named == {name for name in ("fact_id", "name") if f"{{{name}}}" in path}


def test_every_error_has_openais_form(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        answers = operation["responses"]
        assert "422" not in answers, "it is 400"
        good = [status for status in answers if status.startswith("2")]
        assert good == [
            "201" if (method, path) == ("post", "/v1/memories") else "202" if "warm" in path else "200"
        ]
        for status, answer in answers.items():
            reference = answer["content"]["application/json"]["schema"]["$ref"]
            assert answer["description"]
            assert (reference == "#/components/schemas/ErrorAnswer") == (status not in good)
        assert {"400", "401", "403", "404", "413", "500", "503", "default"} <= set(answers)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_key_is_named(document: dict[str, Any]) -> None:
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for _, _, operation in operations(document):
        assert operation["security"] == [{name: []}]


@pytest.mark.parametrize("kind", [models.AddBody, models.SearchBody])
def test_examples_can_be_sent(document: dict[str, Any], kind: type[BaseModel]) -> None:
    examples = document["components"]["schemas"][kind.__name__]["examples"]
    assert examples
    for example in examples:
        kind.model_validate(example)


def test_the_page_about_it(serve: Callable[..., FakeServer]) -> None:
    answer = serve().ask("GET", "/v1/memories/docs")
    assert answer.status == 200
    assert b"/v1/memories/openapi.json" in answer.body
