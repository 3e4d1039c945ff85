"""Connections whose request heads are limited, which uvicorn leaves to a proxy in front of it."""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from featherbed.server.guard import error_body

HEAD = 64 << 10  # bytes of a request line and headers that arrive in several pieces


class LimitedConnection(HttpToolsProtocol):
    """A connection that is closed if a request's head is too large or arrives too slowly."""

    seconds = 30.0  # until a head has arrived, of all connections of this process

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_head, self.head_size = True, 0
        self.head_timer: TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Expect the first head."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; those of a head that goes on are counted."""
        super().data_received(data)
        if not self.in_head:
            self._stop_timer()
            return
        self.head_size += len(data)
        if self.head_size > HEAD:
            self._refuse(431, f"send a request line and headers of at most {HEAD:,} bytes")
        elif self.head_timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self.in_head, self.head_size = True, 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self.in_head = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request as any other input is refused."""
        self._refuse(400, f"{msg} Send HTTP/1.1, with the length of the body.")

    def _start_timer(self) -> None:
        message = f"the head of the request did not arrive within {self.seconds:g} seconds"
        self.head_timer = self.loop.call_later(self.seconds, self._refuse, 408, message)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close the connection."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        body = error_body(status, message)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
