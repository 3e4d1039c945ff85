"""Every request passes here: token, size and time limits, metrics, errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from starlette.requests import ClientDisconnect

from featherbed.server.requests import Limits, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# need no token; the page holds no rows and asks for the token that its requests need
OPEN = frozenset({"/health", "/ready", "/", "/static/plotly.js"})
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class RequestMetrics:
    """Counts and durations of requests by endpoint, in a registry of this server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "featherbed_requests", "Requests.", ("endpoint", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "featherbed_request_seconds",
            "Duration of requests.",
            ("endpoint",),
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.reloads = Counter(
            "featherbed_reloads", "Files opened again.", ("name",), registry=self.registry
        )
        self.observed = cache(
            lambda endpoint, status: (
                self.requests.labels(endpoint, status),
                self.seconds.labels(endpoint),
            )
        )  # finding a label takes longer than counting

    def observe(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one request."""
        requests, durations = self.observed(endpoint, status)
        requests.inc()
        durations.observe(seconds)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: App, *, limits: Limits, metrics: RequestMetrics, token: str | None
    ) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever a client sends gets an answer or a closed connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET: uvicorn, which knows, sends no body
            scope = {**scope, "method": "GET"}
        begun, status = time.perf_counter(), 499  # the client left before an answer began

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, self._limited(receive), observed)
        except RequestError as error:
            if status == 499:
                await send_error(observed, error.status, str(error))
        except ClientDisconnect:  # nobody is left to be answered
            pass
        finally:
            route = scope.get("route")
            endpoint = getattr(route, "path", "unknown")
            self.metrics.observe(endpoint, status, time.perf_counter() - begun)

    def _check(self, scope: Scope) -> None:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"content-length" and (
                not value.isdigit() or int(value) > self.limits.body
            ):
                raise self._too_large()
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise RequestError(415, "send the body as it is, without a content-encoding")
        if (
            self.token is not None
            and scope["path"] not in OPEN
            and not hmac.compare_digest(given, self.token)
        ):
            raise RequestError(401, "send the header 'Authorization: Bearer TOKEN'")

    def _limited(self, receive: Receive) -> Receive:
        """Limit the bytes of a body, and the time until the last of them has arrived."""
        size, done = 0, False
        deadline = asyncio.get_running_loop().time() + self.limits.seconds

        async def limited() -> Message:
            nonlocal size, done
            if done:  # wait for the client to leave, however long the answer takes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestError(
                    408, f"the body did not arrive within {self.limits.seconds:g} seconds"
                ) from None
            size += len(message.get("body", b""))
            done = not message.get("more_body", False)
            if size > self.limits.body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> RequestError:
        return RequestError(413, f"send at most {self.limits.body:,} bytes")


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error as JSON and close the connection: the rest of a body is not read."""
    body = error_body(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, message: str) -> bytes:
    """Return the JSON of an error; clients of OpenAI's format read ``message`` and ``type``.

    >>> orjson.loads(error_body(404, "no table is called 'x'"))["error"]["message"]
    "no table is called 'x'"
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return orjson.dumps({"error": {"status": status, "type": kind, "message": message[:1000]}})
