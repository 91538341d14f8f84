"""Whatever comes over HTTP, valid by the document or not: an answer that the document knows, never
a 500, never a crash; bytes that are no JSON included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error, positive_data_acceptance

from tests.conftest import LONG, third
from tests.harness.router_bench import Served, served

NUM_EXAMPLES = 300 if LONG else 8
ANY = settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck))
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/ready")


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served() as bench:
        yield bench


@pytest.fixture(scope="module")
def documented(router: Served) -> Any:
    return schemathesis.openapi.from_url(f"{router.url}/openapi.json")


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_every_answer_is_documented(documented: Any, path: str) -> None:
    check(documented[path]["POST" if path in POSTS else "GET"], GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", third(POSTS))
def test_what_the_document_forbids_is_refused(documented: Any, path: str) -> None:
    check(documented[path]["POST"], GenerationMode.NEGATIVE)


def check(operation: Any, mode: GenerationMode) -> None:
    """schemathesis' own checks, but that a 503 or 504 is an answer as any: a budget of 1 ms runs
    out. Valid bodies may be refused for what no schema can say (a token that the model has not).
    """

    @ANY
    @given(case=operation.as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        response = case.call(timeout=20)
        assert response.status_code != 500, response.text
        case.validate_response(
            response, excluded_checks=[not_a_server_error, positive_data_acceptance]
        )

    answered()


@pytest.mark.parametrize("path", POSTS[:2])
def test_a_streamed_answer_is_documented(documented: Any, path: str) -> None:
    """Of valid bodies that are drawn few ask for one, and fewer get it."""
    asked = (
        {"prompt": "x"} if path == POSTS[0] else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {**asked, "max_tokens": 3, "stream": True}
    case = documented[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(timeout=20)
    assert response.status_code == 200 and b"[DONE]" in response.content
    case.validate_response(response, excluded_checks=[positive_data_acceptance])


def body_of(document: Any, path: str) -> Any:
    """Schema of what is posted there."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("path", third(POSTS))
def test_any_json_in_any_field_is_answered(router: Served, path: str) -> None:
    """Beside what makes the body valid, so that the strange value is what is looked at."""
    names = sorted(body_of(httpx.get(f"{router.url}/openapi.json").json(), path)["properties"])
    valid: dict[str, Any] = {"max_tokens": 1} if path != POSTS[2] else {}
    valid |= {"prompt": "x"} if path == POSTS[0] else {}
    valid |= {"messages": [{"role": "user", "content": "x"}]} if path == POSTS[1] else {}
    valid |= {"input": "x"} if path == POSTS[2] else {}

    with httpx.Client(base_url=router.url, timeout=20) as client:

        @ANY
        @given(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=2))
        def answered(strange: dict[str, Any]) -> None:
            data = json.dumps({**valid, **strange}).encode()
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404, 409), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

        answered()


@pytest.mark.parametrize("path", third(POSTS))
def test_any_bytes_are_answered(router: Served, path: str) -> None:
    with httpx.Client(base_url=router.url, timeout=20) as client:

        @ANY
        @given(st.binary(max_size=200))
        def answered(data: bytes) -> None:
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["param"]

        answered()


def test_the_document_names_every_route(router: Served) -> None:
    public = {path for _, path in router.bench.probe.http_paths if not path.startswith("/live")}
    document = httpx.get(f"{router.url}/openapi.json").json()
    assert public - {"/openapi.json"} == set(document["paths"])
