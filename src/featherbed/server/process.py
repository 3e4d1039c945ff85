"""The server as a process: workers, log lines, graceful shutdown."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

from featherbed.errors import ArgumentError

VARIABLE = "FEATHERBED_SERVER"  # settings of the workers, as JSON
GRACE = 10  # seconds for requests under way when the server is stopped


@dataclass(frozen=True)
class ServerSettings:
    """Settings of ``featherbed serve``."""

    paths: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    watch: bool = False
    token: str | None = None
    origins: tuple[str, ...] = ()
    body: int = 8 << 20  # bytes
    batch: int = 65_536
    k: int = 1_000
    seconds: float = 30.0


def run_server(settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM; files are opened and checked before the port is bound."""
    import uvicorn

    from featherbed.server.catalog import Catalog

    if settings.workers < 1:
        raise ArgumentError(f"workers={settings.workers}: give at least 1")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    catalog = Catalog(settings.paths)
    for model in catalog:
        about = model.describe()
        rows = f"{about['rows']:,} x {about['dim']}, {about['bytes']:,} bytes"
        logging.getLogger("featherbed.server").info(f"{model.name}: {model.kind}, {rows}")
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "log_level": "warning",
        "access_log": False,
        "timeout_keep_alive": 15,
        "timeout_graceful_shutdown": GRACE,
        "server_header": False,
    }
    print_address(settings)
    if settings.workers == 1:
        uvicorn.run(build_app(settings, catalog), **options)
        return
    os.environ[VARIABLE] = json.dumps(asdict(settings))
    uvicorn.run(
        "featherbed.server.process:app_of_worker", factory=True, workers=settings.workers, **options
    )


def print_address(settings: ServerSettings) -> None:
    """Log the address, and a warning where everybody in the network could ask."""
    log = logging.getLogger("featherbed.server")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    log.info(f"serving on http://{host}:{settings.port} with {settings.workers} worker(s)")
    if settings.host not in ("127.0.0.1", "localhost", "::1") and settings.token is None:
        log.warning("anybody who reaches this host can ask: give a token to refuse others")


def build_app(settings: ServerSettings, catalog: Any = None) -> Any:
    """Return the application of one worker."""
    from featherbed.server.app import create_app
    from featherbed.server.catalog import Catalog
    from featherbed.server.requests import Limits

    limits = Limits(settings.body, settings.batch, k=settings.k, seconds=settings.seconds)
    return create_app(
        catalog or Catalog(settings.paths),
        limits=limits,
        token=settings.token,
        origins=settings.origins,
        watch=settings.watch,
    )


def app_of_worker() -> Any:
    """Return the application of a worker process, from the settings in its environment."""
    stored: dict[str, Any] = json.loads(os.environ[VARIABLE])
    stored |= {name: tuple(stored[name]) for name in ("paths", "origins")}
    return build_app(ServerSettings(**stored))
