"""`document`: the OpenAPI document of the HTTP port, made from the same tables (`schemas`) by which
bodies are checked. Pure.
"""

from __future__ import annotations

import functools
from typing import Any

from services.router.openai.schemas import CHAT, COMPLETION, EMBEDDING

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": {"type": "integer"}},
        },
    },
}
# OpenAPI 3.1 cannot describe the events of a stream; tools that support event streams read the
# body's schema as the schema of one event.
_EVENT = {
    "type": "object",
    "description": "One event of the answer.",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "description": "A chunk of the answer as JSON, and `[DONE]` after the last one; where "
            "the answer fails, an error as JSON is the last.",
        }
    },
}
_FINISH_REASON = {
    "type": ["string", "null"],
    "enum": ["stop", "length", "tool_calls", "content_filter", None],
}
_EMBEDDINGS = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"const": "list"},
        "model": {"type": "string"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"const": "embedding"},
                    "index": {"type": "integer"},
                    "embedding": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "number"}},
                            {"type": "string", "description": "base64 of float32"},
                        ]
                    },
                },
            },
        },
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {
                "prompt_tokens": {"type": "integer"},
                "total_tokens": {"type": "integer"},
            },
        },
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer"},
    },
}
_REFUSALS = {
    "400": "A field is wrong; the message names it.",
    "401": "No API key, or none that is valid.",
    "403": "The key does not allow this.",
    "404": "The model is not served.",
    "408": "The body did not arrive in time.",
    "409": "The idempotency key is under way with another body.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "No room now; see retry-after.",
    "499": "A newer attempt with the same idempotency key took over.",
    "503": "No worker is there; see retry-after.",
    "504": "The request's time ran out.",
}


@functools.cache
def document() -> dict[str, Any]:
    """Return the whole document (OpenAPI 3.1)."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "OpenAI's API in front of disaggregated workers.",
        },
        "paths": {
            "/v1/completions": {
                "post": _generate("completions", "CompletionBody", "CompletionAnswer")
            },
            "/v1/chat/completions": {"post": _generate("chat", "ChatBody", "ChatAnswer")},
            "/v1/embeddings": {"post": _embed()},
            "/v1/models": {"get": _get("models", _list_of(_MODEL), ("401", "403"))},
            "/v1/models/{model}": {
                "get": {
                    **_get("model", _MODEL, ("401", "403", "404")),
                    "parameters": [
                        {
                            "name": "model",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string", "minLength": 1},
                        }
                    ],
                }
            },
            "/health": {"get": _get("health", _status("ok"), ())},
            "/ready": {"get": _get("ready", _status("ready"), ("503",))},
        },
        "components": {
            "schemas": {
                "CompletionBody": COMPLETION.schema(),
                "ChatBody": CHAT.schema(),
                "CompletionAnswer": _answer("text_completion", {"text": {"type": "string"}}),
                "ChatAnswer": _answer("chat.completion", {"message": {"type": "object"}}),
                "EmbeddingBody": EMBEDDING.schema(),
                "EmbeddingAnswer": _EMBEDDINGS,
                "Error": _ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _embed() -> dict[str, Any]:
    operation = _generate("embeddings", "EmbeddingBody", "EmbeddingAnswer")
    del operation["responses"]["200"]["content"]["text/event-stream"]
    return operation


def _generate(operation: str, body: str, answer: str) -> dict[str, Any]:
    headers: dict[str, tuple[str, dict[str, Any]]] = {
        "idempotency-key": (
            "Names the request: sent again with the same body, it is the same one.",
            {"type": "string", "pattern": "^[A-Za-z0-9._:@/+=-]{0,128}$"},
        ),
        "x-request-id": (
            "Comes back with the answer, and stands in the log.",
            {"type": "string", "pattern": "^[ -~]{0,512}$"},
        ),
        "x-baton-budget-ms": (
            "Time the whole request may take; 0: the router's default.",
            {"type": "integer", "minimum": 0, "maximum": 3_600_000},
        ),
        "x-baton-provenance": (
            "1: as baton.provenance in the body.",
            {"type": "string", "enum": ["0", "1"]},
        ),
    }
    return {
        "operationId": operation,
        "parameters": [
            {"name": name, "in": "header", "description": note, "schema": schema}
            for name, (note, schema) in headers.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        },
        "responses": {
            "200": {
                "description": "The answer, or its events with `stream`.",
                "content": {
                    "application/json": {"schema": _ref(answer)},
                    "text/event-stream": {"schema": _EVENT},
                },
            },
            **_refusals(_REFUSALS),
        },
    }


def _get(operation: str, schema: dict[str, Any], refusals: tuple[str, ...]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "responses": {
            "200": {
                "description": "It is so.",
                "content": {"application/json": {"schema": schema}},
            },
            **_refusals({status: _REFUSALS[status] for status in refusals}),
        },
    }


def _refusals(notes: dict[str, str]) -> dict[str, Any]:
    return {
        status: {
            "description": note,
            "content": {"application/json": {"schema": _ref("Error")}},
        }
        for status, note in notes.items()
    }


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", *choice],
                    "properties": {
                        "index": {"type": "integer"},
                        "finish_reason": _FINISH_REASON,
                        **choice,
                    },
                },
            },
            "usage": _USAGE,
        },
    }


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": schema}},
    }


def _status(value: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"const": value}},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
