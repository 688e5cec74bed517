"""A worker of the hand-over demo: one process with one model and one engine, driven by JSON lines.

    python -m kvstore_bench.decode_worker --role decode --target 127.0.0.1:7420 --grace-s 5

    stdin    {"name", "messages", "traffic_class", "max_new_tokens"} or {"name", "ticket"}, a line per request
    stdout   {"event": "ready", …} once the model is loaded
             {"event": "step", "prefilled_tokens", "output_tokens": {name: count}} after each step of the engine
             {"event": "refused", "name"} for a request that came when it was draining
             {"event": "ticket", "name", "ticket", …} for a request that leaves for another worker
             {"event": "finished", "name", "tokens", …} for one that ends here
             {"event": "end", …} last

A worker with `--role prefill` hands each request over as soon as it has its first token. SIGTERM drains: the worker goes on for its
grace period, hands over what is not finished, and ends; a second SIGTERM ends the grace period. It also ends when its input has
ended and nothing is left to do.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import select
import time
from typing import TYPE_CHECKING, Any

from kvstore_bench.prefill_node import claim_stdout, client_config, warm_up
from kvstore_client import KVStoreClient
from kvstore_engine.drain import Drain
from kvstore_engine.engine import NotAdmittingError
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.smollm2 import MODEL_NAME, load_smollm2
from kvstore_engine.ticket import read_ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_engine.engine import Engine, Request
    from kvstore_engine.tokenizer import Tokenizer

POOL_BLOCKS = 96  # 12,288 tokens: four of the demo's prompts and their answers
FLUSH_S = 60.0
# How long a drain that is told by a signal can go unnoticed while the worker waits for requests.
_IDLE_POLL_S = 0.1
_READ_BYTES = 1 << 16


class Lines:
    """The lines of a descriptor, read when they are there: what waits for input must still be able to step an engine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = b""
        self.ended = False

    def read(self, timeout_s: float) -> Iterator[str]:
        """The whole lines that have come, or that come within the time."""
        while not self.ended and select.select([self._descriptor], [], [], timeout_s)[0]:
            timeout_s = 0.0
            data = os.read(self._descriptor, _READ_BYTES)
            self.ended = not data
            *lines, self._pending = (self._pending + data).split(b"\n")
            yield from (line.decode() for line in lines)


class Worker:
    """Serves requests, and tells of them under the names they came with."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, send: Callable[..., None]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._send = send
        self._names: dict[Request, str] = {}
        self._idle_since = time.perf_counter()

    def take_all(self, lines: Lines, timeout_s: float) -> None:
        """Take the requests that have come, or that come within the time."""
        for line in lines.read(timeout_s):
            self.take(json.loads(line))

    def take(self, message: dict[str, Any]) -> None:
        """Begin a request, or go on with one that another worker handed over."""
        try:
            request = self._begin(message)
        except NotAdmittingError:
            self._send(event="refused", name=message["name"])
        else:
            self._names[request] = message["name"]

    def _begin(self, message: dict[str, Any]) -> Request:
        if "ticket" in message:
            return self._engine.take_over(base64.b64decode(message["ticket"]))
        # To the full length, whatever the model thinks: every request is to be long enough to be moved twice.
        params = SamplingParams(max_new_tokens=message["max_new_tokens"], ignore_eos=True)
        prompt = self._tokenizer.encode_chat(message["messages"])
        return self._engine.submit(prompt, params, traffic_class=message["traffic_class"])

    def step(self) -> None:
        """Advance all requests."""
        self.tell(self._engine.step())

    def tell(self, finished: Sequence[Request]) -> None:
        """Say how far the requests are, and what has finished."""
        counts = {self._names[request]: len(request.output) for request in (*self._engine.unfinished, *finished)}
        prefilled = sum(min(request.computed_tokens, len(request.prompt)) for request in self._names)
        self._send(event="step", prefilled_tokens=prefilled, output_tokens=counts)
        for request in finished:
            text = self._tokenizer.decode(request.output, skip_special_tokens=True)
            self._send(event="finished", tokens=request.output, text=text, **self._figures(request))
        self._idle_since = time.perf_counter()

    def hand_over_started(self) -> None:
        """Hand over every request that has its first token."""
        for request in self._engine.unfinished:
            if request.output:
                self.give(request, self._engine.hand_over(request))

    def give(self, request: Request, ticket: bytes) -> None:
        """Send a request away; the time since the last step or hand-over was spent on it."""
        now = time.perf_counter()
        self._send(
            event="ticket",
            ticket=base64.b64encode(ticket).decode(),
            ticket_bytes=len(ticket),
            kv_bytes=read_ticket(ticket).kv_bytes,
            hand_over_s=now - self._idle_since,
            output_tokens=len(request.output),
            **self._figures(request),
        )
        self._idle_since = now

    def _figures(self, request: Request) -> dict[str, Any]:
        return {
            "name": self._names[request],
            "prompt_tokens": len(request.prompt),
            "take_over_s": request.load_s,
            "recomputed_tokens": request.recomputed_tokens,
        }


def main() -> None:
    """Serve until drained, or until the input has ended and all is done."""
    parser = argparse.ArgumentParser(prog="kvstore_bench.decode_worker", description="A worker of the hand-over demo.")
    parser.add_argument("--role", required=True, choices=["prefill", "decode", "alone"])
    parser.add_argument("--target", default="", help="the store, host:port; not for the one that is alone")
    parser.add_argument("--grace-s", type=float, default=5.0, help="how long requests go on after SIGTERM")
    arguments = parser.parse_args()
    send = claim_stdout()
    loaded = load_smollm2(pool_blocks=POOL_BLOCKS)
    warm_up(loaded)
    alone = arguments.role == "alone"
    with KVStoreClient(client_config(arguments.target or "127.0.0.1:1")) as client:
        cache = None if alone else loaded.connect(client)
        engine = loaded.engine(cache)
        drain = Drain(engine, grace_s=arguments.grace_s)
        worker = Worker(engine, loaded.tokenizer, send)
        with drain.on_signal():
            send(event="ready", model=MODEL_NAME, revision=loaded.spec.revision, block_bytes=loaded.spec.block_bytes)
            lines = Lines(0)
            _serve(worker, engine, drain, lines, hand_over_started=arguments.role == "prefill")
            report = drain.run(worker.give, on_step=worker.tell)
            worker.take_all(lines, 0.0)  # what came during the drain: refused
        if cache is not None:
            cache.close(flush_s=FLUSH_S)
        send(event="end", grace_used_s=report.grace_used_s, handed_over=report.handed_over)


def _serve(worker: Worker, engine: Engine, drain: Drain, lines: Lines, *, hand_over_started: bool) -> None:
    """Until told to drain, or until there is nothing to do and there will be nothing."""
    while not drain.begun and (engine.has_work or not lines.ended):
        worker.take_all(lines, 0.0 if engine.has_work else _IDLE_POLL_S)
        if engine.has_work:
            worker.step()
        if hand_over_started:
            worker.hand_over_started()


if __name__ == "__main__":
    main()
