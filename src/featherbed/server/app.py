"""Endpoints of the server, with an OpenAPI description."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from inspect import signature
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from featherbed.errors import FeatherbedError, FormatError, IdError, MissingExtra, UnknownKeyError
from featherbed.server.catalog import Catalog, ServedModel
from featherbed.server.descriptions import ENDPOINTS
from featherbed.server.explore import describe_row, online_page, plotly_script
from featherbed.server.guard import Guard, RequestMetrics, error_body
from featherbed.server.process import release_memory
from featherbed.server.requests import Limits, RequestBody, RequestError
from featherbed.version import __version__

LOG = logging.getLogger("featherbed.server")
NPY = "application/x-npy"
INLINE = 1 << 17  # numbers read for an answer on the event loop: a thread would cost more
WATCH_SECONDS = 1.0
RECOMMEND = ("user", "history", "k", "include_rated")  # fields of a request

Floats = NDArray[np.float32]
LIMITERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.CapacityLimiter] = (
    weakref.WeakKeyDictionary()
)


def create_app(
    catalog: Catalog,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    origins: Sequence[str] = (),
    watch: bool = False,
) -> FastAPI:
    """Return the ASGI application of a catalog; ``origins`` may read answers in a browser (CORS).

    >>> import featherbed as fb
    >>> path = getfixture("tmp_path") / "items.safetensors"
    >>> _ = fb.save(fb.DenseTable(5, 4), path)
    >>> sorted(create_app(Catalog([str(path)])).openapi()["paths"])[:3]
    ['/', '/health', '/metrics']
    """
    limits, metrics = limits or Limits(), RequestMetrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        release_memory()
        async with anyio.create_task_group() as tasks:
            if watch:
                tasks.start_soon(watch_files, catalog, metrics)
            yield
            tasks.cancel_scope.cancel()

    app = FastAPI(
        title="featherbed",
        version=__version__,
        description="Rows, search and predictions of compact embedding tables.",
        lifespan=lifespan,
        docs_url=None,  # their scripts come from the network
        redoc_url=None,
        redirect_slashes=False,  # to an address made of the Host header
    )
    app.router.route_class = HandlerRoute
    handlers = Endpoints(catalog, limits, metrics)
    for method, path, name in (
        ("POST", "/{name}/rows", "rows"),  # routes are tried in this order: the busiest first
        ("POST", "/{name}/search", "search"),
        ("POST", "/{name}/recommend", "recommend"),
        ("GET", "/health", "health"),
        ("GET", "/ready", "ready"),
        ("GET", "/metrics", "prometheus"),
        ("GET", "/tables", "tables"),
        ("POST", "/v1/embeddings", "embeddings"),
        ("GET", "/", "page"),
        ("GET", "/static/plotly.js", "plotly"),
        ("GET", "/{name}/points", "points"),
        ("POST", "/{name}/inspect", "inspect"),
        ("POST", "/{name}/explain", "explain"),
        ("POST", "/{name}/classify", "classify"),
        ("POST", "/{name}/continue", "continue_text"),
    ):
        app.add_api_route(
            path,
            getattr(handlers, name),
            methods=[method],
            name=name,
            response_class=Response,
            response_model=None,
            **ENDPOINTS[name],
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(FeatherbedError, _featherbed_error)
    app.add_middleware(Guard, limits=limits, metrics=metrics, token=token)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


class HandlerRoute(APIRoute):
    """A route whose handler reads the request itself: FastAPI describes it and resolves nothing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a function that calls the handler with the path's name and the request."""
        handler, reads = self.endpoint, "request" in signature(self.endpoint).parameters

        async def answer(request: Request) -> Response:
            more = {"request": request} if reads else {}
            response: Response = await handler(**request.path_params, **more)
            return response

        return answer


class Endpoints:
    """The handlers; each takes its model from the catalog once, so an answer has one source."""

    def __init__(self, catalog: Catalog, limits: Limits, metrics: RequestMetrics) -> None:
        self.catalog, self.limits, self.metrics = catalog, limits, metrics

    async def health(self) -> Response:
        """Return that the process answers."""
        return as_json({"status": "ok"})

    async def ready(self) -> Response:
        """Return the names that are served."""
        return as_json({"status": "ready", "tables": [model.name for model in self.catalog]})

    async def prometheus(self) -> Response:
        """Return metrics of this worker in Prometheus' text format."""
        text = generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def tables(self) -> Response:
        """Return name, kind, shape and bytes of everything served."""
        return as_json({"tables": [model.describe() for model in self.catalog]})

    async def rows(self, name: str, request: Request) -> Response:
        """Return rows by ids or keys, of a collection by column, as JSON or .npy."""
        model = self._model(name)
        if model.table is None:
            fields = ("column", "ids", "keys", "columns")
            body = await RequestBody.read(request, fields, self.limits)
            rows = await in_thread(lambda: body.batch(model.model))
        else:
            table = model.table
            body = await RequestBody.read(request, ("ids", "keys"), self.limits)
            ids = body.ids(table)
            rows = await compute(lambda: table[ids], ids.size * table.dim)
        if NPY in request.headers.get("accept", ""):
            return Response(as_npy(rows), media_type=NPY)
        return as_json({"rows": check_finite(rows)})

    async def search(self, name: str, request: Request) -> Response:
        """Return the k nearest rows to a row or a vector, best first."""
        table = self._table(name).rows_table
        fields = ("id", "key", "vector", "metric", "k")
        body = await RequestBody.read(request, fields, self.limits)
        k, metric = body.integer("k", 10, 1, self.limits.k), body.string("metric", "cosine")
        if metric not in ("cosine", "dot"):
            raise RequestError(400, "metric must be cosine or dot")
        given, query_id = body.one_of("id", "key", "vector"), None
        if given == "vector":
            query = body.vector(table.dim)
        else:
            query_id = (
                body.integer("id", 0, 0, table.rows - 1)
                if given == "id"
                else int(table.ids_of(body.string("key")))
            )
            query = table[query_id]

        def found() -> dict[str, Any]:
            more = k + (query_id is not None)
            ids, scores = table.search(query, min(more, table.rows), metric=metric)
            keep = np.flatnonzero(ids != query_id)[:k]  # the row itself is no neighbor
            answer = {"ids": ids[keep], "scores": check_finite(scores[keep])}
            if table.keys is not None:
                answer["keys"] = [table.name_of(int(id_)) for id_ in ids[keep]]
            return answer

        return as_json(await compute(found, table.rows * table.dim))

    async def recommend(self, name: str, request: Request) -> Response:
        """Return the k best items for a user of the training data, or for a history of items."""
        if self._model(name).kind == "sequence model":
            return await self._recommend_next(name, request)
        model = self._model(name, "recommender")
        body = await RequestBody.read(request, RECOMMEND, self.limits)
        k, rated = body.integer("k", 10, 1, self.limits.k), body.flag("include_rated")
        numbers = model.rows_table.rows * model.rows_table.dim
        if body.one_of("user", "history") == "user":
            user = body.string("user")
            recommended = partial(model.model.recommend, user, k, include_rated=rated)
        else:
            history = read_history(body.fields["history"], self.limits)
            numbers *= len(history)  # fold in
            recommended = partial(model.model.recommend_history, history, k, include_history=rated)
        items = await compute(recommended, numbers)
        return as_json({"items": [item._asdict() for item in items]})

    async def _recommend_next(self, name: str, request: Request) -> Response:
        """Return the k items most likely to follow a history, by a sequence model."""
        model, body = self._model(name), await RequestBody.read(request, RECOMMEND, self.limits)
        k, user = body.integer("k", 10, 1, self.limits.k), body.fields.get("user")
        options = {
            "user": None if user is None else body.string("user"),
            "include_history": body.flag("include_rated") or None,
        }
        history = read_history(body.fields.get("history"), self.limits)
        items = await in_thread(lambda: model.model.recommend_history(history, k, **options))
        return as_json({"items": [item._asdict() for item in items]})

    async def classify(self, name: str, request: Request) -> Response:
        """Return the classes of texts with their probabilities, most probable first."""
        model = self._model(name, "classifier")
        body = await RequestBody.read(request, ("text", "texts", "k"), self.limits)
        k = body.integer("k", len(model.model.classes), 1, 1 << 16)
        texts = self._texts(body)
        found = await in_thread(lambda: model.model.classify_many(texts, k))
        classes = [[entry._asdict() for entry in entries] for entries in found]
        return as_json({"classes": classes[0] if "text" in body.fields else classes})

    async def continue_text(self, name: str, request: Request) -> Response:
        """Return a text continued by a language model."""
        model = self._model(name, "language model")
        fields = ("text", "words", "seed", "temperature")
        body = await RequestBody.read(request, fields, self.limits)
        text, seed = body.string("text"), body.integer("seed", 0, 0, (1 << 63) - 1)
        words = body.integer("words", 30, 0, self.limits.words)
        temperature = body.number("temperature", 0.8, 0.0, 100.0)
        continued = await in_thread(
            lambda: model.model.continue_text(text, words, seed=seed, temperature=temperature)
        )
        return as_json({"text": continued})

    async def embeddings(self, request: Request) -> Response:
        """Return the mean of the rows of each text's known words, in OpenAI's format."""
        fields = ("model", "input", "encoding_format", "user", "dimensions")
        body = await RequestBody.read(request, fields, self.limits)
        model = self._table(body.string("model"))
        form = body.string("encoding_format", "float")
        if form not in ("float", "base64"):
            raise RequestError(400, "encoding_format must be float or base64")
        if body.fields.get("dimensions") not in (None, model.rows_table.dim):
            raise RequestError(
                400, f"{model.name} has {model.rows_table.dim} dimensions and no others"
            )
        inputs = read_inputs(body, self.limits)
        body.check_numbers(len(inputs), model.rows_table.dim)
        vectors, tokens = await in_thread(lambda: mean_rows(model, inputs))
        data = [
            {"object": "embedding", "index": index, "embedding": as_embedding(vector, form)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return as_json({"object": "list", "data": data, "model": model.name, "usage": usage})

    async def page(self) -> Response:
        """Return the page to explore the served tables."""
        return Response(online_page(), media_type="text/html")

    async def plotly(self) -> Response:
        """Return plotly's library, which the page draws with."""
        try:
            script = await in_thread(plotly_script)
        except MissingExtra as error:
            raise RequestError(404, str(error)) from None
        headers = {"cache-control": "public, max-age=86400"}
        return Response(script, headers=headers, media_type="text/javascript")

    async def points(self, name: str) -> Response:
        """Return the projection of rows that the page draws, computed once."""
        model = self._table(name)
        return Response(await in_thread(lambda: model.points), media_type="application/json")

    async def inspect(self, name: str, request: Request) -> Response:
        """Return key, codes, atoms with weights, bits and nearest rows of one row."""
        table = self._table(name).rows_table
        body = await RequestBody.read(request, ("id", "key"), self.limits)
        id_ = (
            body.integer("id", 0, 0, table.rows - 1)
            if body.one_of("id", "key") == "id"
            else int(table.ids_of(body.string("key")))
        )
        return as_json(await in_thread(lambda: describe_row(table, id_)))

    async def explain(self, name: str, request: Request) -> Response:
        """Return the classes of a text and what each word adds to the first of them."""
        classifier = self._model(name, "classifier").model
        body = await RequestBody.read(request, ("text",), self.limits)
        text = body.string("text")

        def explained() -> dict[str, Any]:
            classes = [entry._asdict() for entry in classifier.classify(text)]
            effects = classifier.word_effects(text)
            words = [{"word": word, "effect": effect} for word, effect in effects]
            return {"classes": classes, "words": words}

        return as_json(await in_thread(explained))

    def _texts(self, body: RequestBody) -> list[str]:
        if body.one_of("text", "texts") == "text":
            return [body.string("text")]
        texts = body.list_of("texts", str)
        if max(map(len, texts)) > self.limits.text:
            raise RequestError(413, f"send texts of at most {self.limits.text:,} letters")
        return texts

    def _table(self, name: str) -> ServedModel:
        model = self._model(name)
        if model.table is None:
            raise RequestError(
                404, f"{name} is a collection, of which rows are served: /{name}/rows"
            )
        return model

    def _model(self, name: str, kind: str | None = None) -> ServedModel:
        if name not in self.catalog:
            names = ", ".join(model.name for model in self.catalog)
            raise RequestError(404, f"nothing is served as {name[:60]!r}: use one of {names}"[:500])
        model = self.catalog[name]
        if kind is not None and model.kind != kind:
            raise RequestError(404, f"{name} is a {model.kind}, not a {kind}")
        return model


def read_inputs(body: RequestBody, limits: Limits) -> list[str] | list[list[int]]:
    """Return the texts, or lists of token ids, of an embeddings request."""
    value = body.fields.get("input")
    if isinstance(value, str):
        return [body.string("input")]
    if not isinstance(value, list) or not value:
        raise RequestError(400, "input must be a text, a list of texts, or token ids")
    if type(value[0]) is int:
        return [body.list_of("input", int)]
    if type(value[0]) is str:
        texts: list[str] = body.list_of("input", str)
        if sum(map(len, texts)) > limits.body:
            raise RequestError(413, f"send at most {limits.body:,} letters in all")
        return texts
    lists = body.list_of("input", list)
    if not all(tokens and set(map(type, tokens)) == {int} for tokens in lists):
        raise RequestError(400, "input must be lists of token ids, none of them empty")
    return lists


def read_history(value: Any, limits: Limits) -> list[tuple[str, float | None]]:
    """Return (item, rating or None) pairs: entries are keys, or {"item": key, "rating": number}."""
    if not isinstance(value, list) or not 1 <= len(value) <= limits.batch:
        raise RequestError(400, 'history must be a list of items, such as ["12", "57"]')
    pairs: list[tuple[str, float | None]] = []
    for entry in value:
        item, rating = (
            (entry.get("item"), entry.get("rating")) if isinstance(entry, dict) else (entry, None)
        )
        others = isinstance(entry, dict) and entry.keys() - {"item", "rating"}
        if others or not isinstance(item, str) or type(rating) not in (int, float, type(None)):
            raise RequestError(
                400, 'an entry of history is a key, or {"item": key, "rating": number}'
            )
        pairs.append((item, None if rating is None else float(rating)))
    return pairs


def mean_rows(model: ServedModel, inputs: list[str] | list[list[int]]) -> tuple[Floats, int]:
    """Return the mean row of every input [n, d], and the number of rows used."""
    ids = [model.text_ids(entry) if isinstance(entry, str) else entry for entry in inputs]
    for number, entry in enumerate(ids):
        if not entry:
            raise RequestError(
                400, f"input {number} holds no word of {model.name}: leave it out, or add a word"
            )
    offsets = np.cumsum([0, *map(len, ids)])
    try:
        flat = np.array([id_ for entry in ids for id_ in entry], dtype=np.int64)
    except OverflowError:
        raise RequestError(400, f"a token id is beyond {model.rows_table.rows - 1:,}") from None
    if model.kind == "static encoder":
        vectors = model.model.mean_rows(ids)
    else:
        vectors = model.rows_table.bag(flat, offsets, mode="mean", include_last_offset=True)
    return check_finite(vectors), len(flat)


def as_embedding(vector: Floats, form: str) -> Any:
    """Return a vector as a list of numbers, or as base64 of float32."""
    return vector if form == "float" else base64.b64encode(vector.tobytes()).decode()


def as_json(content: Any) -> Response:
    """Return a JSON response; numpy arrays become lists."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type="application/json")


def as_npy(rows: Floats) -> bytes:
    """Return the bytes of a .npy file.

    >>> import io
    >>> np.load(io.BytesIO(as_npy(np.eye(2, dtype=np.float32)))).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    shape = f"({rows.shape[0]}, {rows.shape[1]})"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(len(header) + 11) // 64) * 64 - 11) + "\n"
    length = len(padded).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + length + padded.encode() + rows.astype("<f4").tobytes()


def check_finite(numbers: Floats) -> Floats:
    """Refuse NaN and infinity, for which JSON has no numbers."""
    if not np.isfinite(numbers).all():
        raise RequestError(
            422, f"the stored rows are not all finite: JSON cannot hold them, {NPY} can"
        )
    return numbers


async def compute(function: Callable[[], Any], numbers: int) -> Any:
    """Run a function that reads so many numbers: a short one at once, a longer one in a thread."""
    return function() if numbers <= INLINE else await in_thread(function)


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function beside the event loop, which goes on answering; as many at once as cores."""
    loop = asyncio.get_running_loop()
    limiter = LIMITERS.get(loop)
    if limiter is None:
        limiter = LIMITERS[loop] = anyio.CapacityLimiter(os.cpu_count() or 1)
    return await anyio.to_thread.run_sync(function, limiter=limiter)


async def watch_files(catalog: Catalog, metrics: RequestMetrics) -> None:
    """Open replaced files again, for as long as the server runs."""
    while True:
        await anyio.sleep(WATCH_SECONDS)
        for name, line in (await in_thread(catalog.refresh)).items():
            LOG.info(line)
            metrics.reloads.labels(name).inc()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: "no such endpoint: see /openapi.json",
        405: f"this endpoint takes {(error.headers or {}).get('Allow')}",
    }
    text = message.get(error.status_code, str(error.detail))
    body = error_body(error.status_code, text)
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


async def _featherbed_error(_: Request, error: Exception) -> Response:
    """Answer with 404 for unknown ids and keys, 400 for other input; a broken file is 503."""
    if isinstance(error, RequestError):
        status = error.status
    elif isinstance(error, IdError | UnknownKeyError):
        status = 404
    elif isinstance(error, FormatError):
        status = 503
    else:
        status = 400
    headers = {"connection": "close"} if status in (408, 413) else {}
    return Response(error_body(status, str(error)), status, headers, "application/json")
