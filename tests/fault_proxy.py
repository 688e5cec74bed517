"""A TCP proxy on the loopback that does to a real connection what networks and sick servers do.

What it does is a `Fault`, switched at run time and obeyed by connections that are open already. All of it runs on one
thread with an event loop of its own, which ends with the proxy.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")

CHUNK_BYTES = 64 << 10
RECEIVE_BUFFER_BYTES = 256 << 10  # a slow link with megabytes in front of it would be a late one, too
QUEUE_CHUNKS = 16  # on their way at once, but for a delay, which needs what it needs
POLL_S = 0.005  # how late a switched fault is noticed
STEP_TIMEOUT_S = 30


@dataclass(frozen=True)
class Fault:
    """What happens to the bytes; several at once are allowed.

    Attributes:
        delay_s: each byte arrives so much later, in both directions; bandwidth is not touched.
        bytes_per_s: at most so many, in each direction of each connection.
        black_hole: nothing passes, and nobody is told. What was on its way passes afterwards.
        cut_after_bytes: the connection is reset when so many more bytes have come.
        flip_after_bytes: once, one bit is turned in the byte behind the next so many.
        spoils_client: cut and flip what the client sends, instead of what the server sends.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    black_hole: bool = False
    cut_after_bytes: int | None = None
    flip_after_bytes: int | None = None
    spoils_client: bool = False


class FaultProxy:
    """A proxy in front of `target`, "host:port".

    Attributes:
        target: where it listens; stays the same while it refuses.
        connections: accepted so far.
        bytes_from_client, bytes_from_server: that have reached the proxy, passed on or not.
        faults_done: cuts and flips so far.
    """

    def __init__(self, target: str) -> None:
        self._upstream = _address(target)
        self.connections = self.bytes_from_client = self.bytes_from_server = self.faults_done = 0
        self._fault = Fault()
        self._spoilable_bytes = 0  # that have come since the fault was set, from the side that it spoils
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._run(self._listen())
        self.target = f"127.0.0.1:{self._port}"

    def set(self, fault: Fault) -> None:
        """Switch to another fault; `Fault()` passes everything."""

        async def switch() -> None:
            self._fault, self._spoilable_bytes = fault, 0

        self._run(switch())

    def refuse(self) -> None:
        """Reset all connections and accept no more, as the kernel of a dead process does."""
        self._run(self._refuse())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._run(self._listen())

    def close(self) -> None:
        """Reset everything and end the thread."""
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STEP_TIMEOUT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def _run(self, step: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(STEP_TIMEOUT_S)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accepted, "127.0.0.1", self._port, limit=CHUNK_BYTES)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(OSError, asyncio.CancelledError):  # the task ends here, so the cancellation has done its work
                await self._serve(reader, writer)
        finally:
            _reset(writer)
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        far.setblocking(False)
        await self._loop.sock_connect(far, self._upstream)
        far_reader, far_writer = await asyncio.open_connection(sock=far, limit=CHUNK_BYTES)
        pumps = [
            asyncio.ensure_future(self._pump(reader, far_writer, from_server=False)),
            asyncio.ensure_future(self._pump(far_reader, writer, from_server=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            _reset(far_writer)  # first: the wait below may be cancelled
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_server: bool) -> None:
        """One direction. Reading and writing are apart, so that what is delayed does not hold up what follows."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = asyncio.ensure_future(self._write(on_the_way, writer))
        try:
            while data := await reader.read(self._chunk_bytes()):
                if from_server != self._fault.spoils_client:
                    data = self._spoil(data)
                if from_server:
                    self.bytes_from_server += len(data)
                else:
                    self.bytes_from_client += len(data)
                on_the_way.put_nowait((self._loop.time(), data))
                while on_the_way.qsize() > QUEUE_CHUNKS and not self._fault.delay_s:
                    await asyncio.sleep(POLL_S)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            came_s, data = await on_the_way.get()
            while self._fault.black_hole or self._loop.time() < came_s + self._fault.delay_s:
                await asyncio.sleep(POLL_S)
            if self._fault.bytes_per_s:
                await asyncio.sleep(len(data) / self._fault.bytes_per_s)
            writer.write(data)
            await writer.drain()

    def _chunk_bytes(self) -> int:
        rate = self._fault.bytes_per_s
        return max(1, min(CHUNK_BYTES, int(rate / 50))) if rate else CHUNK_BYTES

    def _spoil(self, data: bytes) -> bytes:
        """Cuts and flips. Raises: ConnectionResetError: the cut."""
        so_far = self._spoilable_bytes
        self._spoilable_bytes += len(data)
        cut, flip = self._fault.cut_after_bytes, self._fault.flip_after_bytes
        if cut is not None and so_far + len(data) > cut:
            self.faults_done += 1
            raise ConnectionResetError
        if flip is not None and so_far <= flip < so_far + len(data):
            self.faults_done += 1
            at = flip - so_far
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        return data


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    """A proxy in front of `target` that is closed at the end."""
    proxy = FaultProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close without a farewell, whatever is still on the way."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _address(target: str) -> tuple[str, int]:
    host, port = target.rsplit(":", 1)
    return host, int(port)
