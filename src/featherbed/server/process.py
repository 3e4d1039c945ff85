"""The server as a process: workers, log lines, graceful shutdown."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from featherbed.errors import ArgumentError

GRACE = 10  # seconds for requests under way when the server is stopped
DONTNEED = 4  # advice to the kernel: drop these pages, read them from their file when needed


@dataclass(frozen=True)
class ServerSettings:
    """Settings of ``featherbed serve``."""

    paths: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    watch: bool = False
    token: str | None = field(default=None, repr=False)  # in no log line
    origins: tuple[str, ...] = ()
    body: int = 8 << 20  # bytes
    batch: int = 65_536
    k: int = 1_000
    seconds: float = 30.0


def run_server(settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM; files are opened and checked before the port is bound."""
    import uvicorn

    from featherbed.server.catalog import Catalog
    from featherbed.server.connection import LimitedConnection

    if settings.workers < 1:
        raise ArgumentError(f"workers={settings.workers}: give at least 1")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    catalog = Catalog(settings.paths)
    for model in catalog:
        about = model.describe()
        rows = f"{about['rows']:,} x {about['dim']}, {about['bytes']:,} bytes"
        logging.getLogger("featherbed.server").info(f"{model.name}: {model.kind}, {rows}")
    options: dict[str, Any] = {
        "log_level": "error",  # a warning for every broken request would fill the log
        "access_log": False,
        "timeout_keep_alive": 15,
        "timeout_graceful_shutdown": GRACE,
        "server_header": False,
        "http": LimitedConnection,
        "ws": "none",
    }
    with listen(settings.host, settings.port) as listener:
        print_address(settings, listener.getsockname()[1])
        if settings.workers == 1:
            config = uvicorn.Config(build_app(settings, catalog), **options)
            uvicorn.Server(config).run([listener])
            return
        from uvicorn.supervisors import Multiprocess

        # uvicorn.run takes the application of several workers as an import string only, which
        # carries no settings; a configuration is pickled to each worker through a pipe, so that the
        # token is in no command line, environment or file
        config = uvicorn.Config(
            partial(build_app, settings), factory=True, workers=settings.workers, **options
        )
        listener.set_inheritable(True)
        Multiprocess(config, sockets=[listener]).run()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; refuse one that is taken or of another host.

    >>> with listen("127.0.0.1", 0) as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ArgumentError(
            f"cannot listen on {host}, port {port} ({reason}): give another --host or --port"
        ) from None


def print_address(settings: ServerSettings, port: int) -> None:
    """Log the address, and a warning where everybody in the network could ask."""
    log = logging.getLogger("featherbed.server")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    log.info(f"serving on http://{host}:{port} with {settings.workers} worker(s)")
    if settings.host not in ("127.0.0.1", "localhost", "::1") and settings.token is None:
        log.warning("anybody who reaches this host can ask: give a token to refuse others")


def build_app(settings: ServerSettings, catalog: Any = None) -> Any:
    """Return the application of one worker."""
    from featherbed.server.app import create_app
    from featherbed.server.catalog import Catalog
    from featherbed.server.connection import LimitedConnection
    from featherbed.server.requests import Limits

    LimitedConnection.seconds = settings.seconds
    limits = Limits(settings.body, settings.batch, k=settings.k, seconds=settings.seconds)
    return create_app(
        catalog or Catalog(settings.paths),
        limits=limits,
        token=settings.token,
        origins=settings.origins,
        watch=settings.watch,
    )


def release_memory() -> None:
    """Give back what only the start needed, and keep its objects out of garbage collection.

    A pass of the collector over the objects of all modules takes 50 ms, in which no request is
    answered. The code of numba's compiler takes 50 MB; a loop that is compiled later reads its
    pages from the file again.
    """
    gc.collect()
    gc.freeze()
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) r-xp .*libllvmlite", line):
            begin, end = (int(address, 16) for address in found.groups())
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONTNEED)
