"""The yardstick: a gRPC stream of raw frames with nothing behind it and nothing checked.

Run as a module it is the server: it sends the same frame again and again from memory. What kvstore adds to this is what
it costs: finding blocks, reading files, framing, checksums.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvstore_api.limits import MAX_FRAME_DATA_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SERVICE, _METHOD = "kvstore.bench.BareStream", "Read"
_REQUEST = struct.Struct("<Q")  # bytes wanted


class BareStream:
    """The client: fills a buffer from streams, over and over, without looking at what comes."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._read = self._channel.unary_stream(f"/{_SERVICE}/{_METHOD}")

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def fetch(self, size_bytes: int, out: memoryview) -> int:
        """One call for `size_bytes`, copied into `out` from its beginning, round and round. Returns: bytes received."""
        received = position = 0
        for frame in self._read(_REQUEST.pack(size_bytes)):
            if position + len(frame) > len(out):
                position = 0
            out[position : position + len(frame)] = frame
            position += len(frame)
            received += len(frame)
        return received


async def _send(request: bytes, _: object) -> AsyncIterator[bytes]:
    (left,) = _REQUEST.unpack(request)
    while left > 0:
        size = min(left, MAX_FRAME_DATA_BYTES)
        yield _FRAME if size == MAX_FRAME_DATA_BYTES else _FRAME[:size]
        left -= size


_FRAME = os.urandom(MAX_FRAME_DATA_BYTES)


async def _serve(port_file: Path) -> None:
    server = grpc.aio.server()
    handlers = {_METHOD: grpc.unary_stream_rpc_method_handler(_send)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # Appears in one piece, so whoever waits for it never reads half of it.
    written = port_file.with_suffix(".part")
    written.write_text(json.dumps({"listen": f"127.0.0.1:{port}"}))
    written.rename(port_file)
    await stop.wait()
    await server.stop(grace=None)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args().port_file))


if __name__ == "__main__":
    main()
