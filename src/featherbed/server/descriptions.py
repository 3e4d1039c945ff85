"""OpenAPI descriptions of the endpoints."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"status": INTEGER, "type": TEXT, "message": TEXT},
        }
    },
}


def list_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def endpoint(
    summary: str, request: dict[str, Schema], answer: dict[str, Schema], *, npy: bool = False
) -> dict[str, Any]:
    """Return the keywords of a route: summary, request body, responses."""
    content: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "properties": answer}}
    }
    if npy:
        content["application/x-npy"] = {"schema": {"type": "string", "format": "binary"}}
    failed = {"description": "Refused.", "content": {"application/json": {"schema": ERROR}}}
    more: dict[str, Any] = {}
    if request:
        schema = {"type": "object", "properties": request, "additionalProperties": False}
        more["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    responses: dict[int | str, Any] = {200: {"description": "Answer.", "content": content}}
    if request:
        responses |= dict.fromkeys((400, 401, 404, 408, 413), failed)
    return {"summary": summary, "responses": responses, "openapi_extra": more}


ITEM: Schema = {"type": "object", "properties": {"key": TEXT, "score": NUMBER, "title": TEXT}}
CLASS: Schema = {"type": "object", "properties": {"label": TEXT, "probability": NUMBER}}
RATED: Schema = {"type": "object", "properties": {"item": TEXT, "rating": NUMBER}}
TABLE: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "kind": TEXT,
        "rows": INTEGER,
        "dim": INTEGER,
        "method": TEXT,
        "bytes": INTEGER,
        "keys": {"type": "boolean"},
        "columns": list_of({"type": "object"}),
    },
}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "health": endpoint("The process answers.", {}, {"status": TEXT}),
    "ready": endpoint("Everything is opened.", {}, {"status": TEXT, "tables": list_of(TEXT)}),
    "prometheus": endpoint("Metrics of this worker in Prometheus' text format.", {}, {}),
    "tables": endpoint("Name, kind, shape and bytes.", {}, {"tables": list_of(TABLE)}),
    "page": endpoint("The page to explore what is served.", {}, {}),
    "plotly": endpoint("The library that the page draws with.", {}, {}),
    "points": endpoint("Places and columns of the points of the page.", {}, {}),
    "inspect": endpoint(
        "Key, codes, atoms with weights, bits and nearest rows of one row.",
        {"id": INTEGER, "key": TEXT},
        {"id": INTEGER, "key": TEXT, "codes": list_of(INTEGER), "bits": NUMBER},
    ),
    "explain": endpoint(
        "Classes of a text, and what each word adds to the first of them.",
        {"text": TEXT},
        {
            "classes": list_of(CLASS),
            "words": list_of({"type": "object", "properties": {"word": TEXT, "effect": NUMBER}}),
        },
    ),
    "rows": endpoint(
        "Rows by ids or keys; .npy bytes with 'Accept: application/x-npy'. Of a collection: rows "
        "of one column, or of all columns side by side.",
        {
            "ids": list_of(INTEGER),
            "keys": list_of(TEXT),
            "column": TEXT,
            "columns": {
                "type": "object",
                "additionalProperties": {"oneOf": [list_of(INTEGER), list_of(TEXT)]},
            },
        },
        {"rows": list_of(list_of(NUMBER))},
        npy=True,
    ),
    "search": endpoint(
        "The k nearest rows to a row (id or key, itself left out) or a vector, best first.",
        {
            "id": INTEGER,
            "key": TEXT,
            "vector": list_of(NUMBER),
            "metric": {"type": "string", "enum": ["cosine", "dot"], "default": "cosine"},
            "k": {"type": "integer", "default": 10},
        },
        {"ids": list_of(INTEGER), "keys": list_of(TEXT), "scores": list_of(NUMBER)},
    ),
    "recommend": endpoint(
        "The k best items for a user, or for a history of items: folded in, or read by a sequence "
        "model, oldest first.",
        {
            "user": TEXT,
            "history": list_of({"oneOf": [TEXT, RATED]}),
            "k": {"type": "integer", "default": 10},
            "include_rated": {"type": "boolean", "default": False},
        },
        {"items": list_of(ITEM)},
    ),
    "classify": endpoint(
        "Classes of a text, or of several, with probabilities.",
        {"text": TEXT, "texts": list_of(TEXT), "k": INTEGER},
        {"classes": list_of(CLASS)},
    ),
    "continue_text": endpoint(
        "A text continued by a language model.",
        {
            "text": TEXT,
            "words": {"type": "integer", "default": 30},
            "seed": {"type": "integer", "default": 0},
            "temperature": {"type": "number", "default": 0.8},
        },
        {"text": TEXT},
    ),
    "embeddings": endpoint(
        "Mean of the rows of each text's words, in OpenAI's format.",
        {
            "model": TEXT,
            "input": {"oneOf": [TEXT, list_of(TEXT), list_of(INTEGER), list_of(list_of(INTEGER))]},
            "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
            "dimensions": INTEGER,
            "user": TEXT,
        },
        {"object": TEXT, "data": list_of({"type": "object"}), "model": TEXT},
    ),
}
