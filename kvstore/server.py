"""A server process: its parts wired together, its signals, its orderly end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiofiles
import aiofiles.os
import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore import admin_service, service
from kvstore.admin_service import AdminService
from kvstore.listen import ListenAddress, check_free, parse_listen
from kvstore.metrics import Metrics
from kvstore.service import BlockStoreService, Pools, StoreDoor
from kvstore.store import LocalStore
from kvstore_api.limits import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock
    from kvstore.config import ServerConfig
    from kvstore.log.device import Device

# Clients ping to notice a dead connection: ours every 30 s while a call is silent, others as they are set, also while idle.
# A server that allows only rarer pings sends them away with GOAWAY "too_many_pings", so it allows them this often, and
# forgives so many that come sooner: pings bunch on a bad network.
CLIENT_PING_INTERVAL_MIN_MS, CLIENT_PING_STRIKES_MAX = 10_000, 5
# The server's own pings find clients that vanished without a word, whose calls would hold places for ever.
SERVER_PING_INTERVAL_MS, SERVER_PING_TIMEOUT_MS = 60_000, 20_000

GRPC_OPTIONS = (
    # A second server on the port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_INTERVAL_MIN_MS),
    ("grpc.http2.max_ping_strikes", CLIENT_PING_STRIKES_MAX),
    # No limit on a connection's age or idleness: its end would cost an idle client's next call a part of its budget.
    ("grpc.keepalive_time_ms", SERVER_PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_MS),
)

SERVICE_NAMES = (service.SERVICE_NAME, admin_service.SERVICE_NAME)

_log = structlog.get_logger("kvstore.server")


class StartError(Exception):
    """The server cannot start for a reason outside the store; `reason` is a stable name."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def version() -> str:
    """This installation's version."""
    return metadata.version("kvstore")


class StartInterruptedError(Exception):
    """A signal came while the store was being opened."""


async def serve(config: ServerConfig, clock: Clock) -> None:
    """Run a server until SIGTERM or SIGINT; a second signal cuts the drain short.

    Raises:
        StartError: an address is taken or impossible.
        KvStoreError: the data directory is locked, damaged, of another format, or cannot be used.
    """
    _raise_file_limit()
    signals = _Signals()
    server = Server(config, clock, signals.stop.is_set)
    try:
        await server.start()
        await signals.stop.wait()
        _log.info("stopping", signal=signals.name, drain_s=config.server.drain_s)
        draining = asyncio.create_task(server.drain(config.server.drain_s))
        impatient = asyncio.create_task(signals.stop_now.wait())
        await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await server.drain(0)
        await draining
        impatient.cancel()
    except StartInterruptedError:
        _log.info("stopping before the store is open", signal=signals.name)
    finally:
        await server.close()
    _log.info("stopped")


class Server:
    """gRPC server, metrics port, pools and store of one process.

    Args: stopping: whether the opening of the store is to be given up. device: what the store lies on; None: this machine's files.
    """

    def __init__(
        self, config: ServerConfig, clock: Clock, stopping: Callable[[], bool], device: Device | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._device = device
        self._stopping = stopping
        self._door = StoreDoor()
        self._metrics = Metrics()
        self._pools = Pools.of(config.server)
        self._metrics.watch(lambda: self._door.store, self._pools.all())
        self._health = health.aio.HealthServicer()
        self._admin = AdminService(
            self._door, self._pools, self._metrics, version=version(), start_time_s=self._clock.now_s()
        )
        self._grpc = grpc.aio.server(options=GRPC_OPTIONS)
        self._grpc.add_generic_rpc_handlers(self._handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self._stop_metrics: Callable[[], None] = lambda: None

    def _handlers(self) -> tuple[Any, ...]:
        blocks = BlockStoreService(self._door, self._pools, self._metrics)
        return blocks.handler(), self._admin.handler()

    async def start(self) -> None:
        """Bind the ports, open the store, serve. The ports answer while the store recovers: health says NOT_SERVING."""
        config = self._config.server
        if config.port_file:
            _remove_port_file(Path(config.port_file))  # an old one would send scripts to a dead port
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        listen = self._bind(parse_listen(config.listen))
        metrics = self._serve_metrics(config.metrics_listen)
        await self._grpc.start()
        self._warn_if_remote()
        _log.info("opening the store", data_dir=str(config.data_dir), listen=listen, metrics=metrics)
        store = self._door.store = await asyncio.to_thread(self._open_store)
        await self._say(health_pb2.HealthCheckResponse.SERVING)
        if config.port_file:
            await _write_port_file(Path(config.port_file), {"listen": listen, "metrics": metrics, "pid": os.getpid()})
        _log.info("serving", listen=listen, metrics=metrics, store_id=store.store_id, version=version())

    async def drain(self, drain_s: float) -> None:
        """Say NOT_SERVING, take no more calls, and give those that run `drain_s` seconds."""
        await self._health.enter_graceful_shutdown()
        self._admin.stop_scrubs()
        await self._grpc.stop(drain_s)

    async def close(self) -> None:
        """Cancel what still runs and close everything; the store last, when nothing can call it any more."""
        await self._grpc.stop(0)
        await asyncio.to_thread(self._pools.close)
        await asyncio.to_thread(self._stop_metrics)
        store, self._door.store = self._door.store, None
        if store is not None:
            await asyncio.to_thread(store.close)
            if self._config.server.port_file:
                Path(self._config.server.port_file).unlink(missing_ok=True)

    def _bind(self, address: ListenAddress) -> str:
        try:
            check_free(address)
            port = self._grpc.add_insecure_port(str(address))
        except OSError as error:
            raise _address_error("server.listen", str(address), error) from None
        except RuntimeError as error:  # between the check and now somebody was faster
            raise StartError("ADDRESS_UNAVAILABLE", f"cannot listen on {address} (server.listen): {error}") from None
        return address.with_port(port)

    def _serve_metrics(self, text: str) -> str:
        if not text:
            return ""
        try:
            bound, self._stop_metrics = self._metrics.serve(parse_listen(text))
        except OSError as error:
            raise _address_error("server.metrics_listen", text, error) from None
        return bound

    def _open_store(self) -> LocalStore:
        config = self._config
        progress = _Progress(self._clock, self._stopping)
        return LocalStore.open(
            config.server.data_dir,
            config.store,
            config.traffic_classes,
            self._clock,
            tenants=config.tenants,
            device=self._device,
            progress=progress,
        )

    def _warn_if_remote(self) -> None:
        config = self._config.server
        for text in (config.listen, config.metrics_listen):
            if text and not parse_listen(text).is_local:
                _log.warning(
                    "reachable from other machines without authentication: whoever reaches it may read and delete everything",
                    address=text,
                )

    async def _say(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)


class _Signals:
    """SIGTERM and SIGINT as events: the first asks for an orderly stop, the second for a quick one."""

    def __init__(self) -> None:
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()
        self.name = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.stop_now.set()
        self.name = number.name
        self.stop.set()


class _Progress:
    """Logs how far recovery is, every few seconds, and ends it when the server is to stop: it may take longer than that may."""

    INTERVAL_S = 5

    def __init__(self, clock: Clock, stopping: Callable[[], bool]) -> None:
        self._clock = clock
        self._stopping = stopping
        self._next_s = clock.now_s() + self.INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        if self._stopping():
            raise StartInterruptedError
        if self._clock.now_s() >= self._next_s:
            self._next_s = self._clock.now_s() + self.INTERVAL_S
            _log.info("recovering", segments_done=done, segments=total)


def _address_error(key: str, address: str, error: OSError) -> StartError:
    in_use = "in use" in str(error)
    reason = "ADDRESS_IN_USE" if in_use else "ADDRESS_UNAVAILABLE"
    hint = "; is another kvstore-server running there?" if in_use else ""
    return StartError(reason, f"cannot listen on {address} ({key}): {error.strerror or error}{hint}")


def _raise_file_limit() -> None:
    """Allow this process as many open files as the system lets it have: a segment file takes two descriptors.

    The usual soft limit of 1,024 is made for programs that call `select`, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # systems whose hard limit is more than they accept
        _log.debug("open files not raised", files=soft, hard=hard, error=str(error))
    else:
        _log.debug("open files raised", files=hard, before=soft)


def _remove_port_file(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _port_file_error(path, error) from None


async def _write_port_file(path: Path, content: dict[str, object]) -> None:
    """In one piece: whoever sees the file sees all of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        async with aiofiles.open(temporary, "w") as file:
            await file.write(json.dumps(content) + "\n")
        await aiofiles.os.replace(temporary, path)
    except OSError as error:
        raise _port_file_error(path, error) from None


def _port_file_error(path: Path, error: OSError) -> StartError:
    return StartError("PORT_FILE", f"cannot write {path} (server.port_file): {error.strerror}")
