"""A report of hit rates with two classes and all sweeps, for the tests of what is made of it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from kvstore_bench.hitrate.misses import CAUSES
from kvstore_bench.hitrate.report_html import html_report
from kvstore_bench.hitrate.result import DEFINITION, HitRateReport, Result, StorageFacts, WorkloadFacts
from kvstore_bench.machine import Machine

# A workload's name, which is a file's, and whoever makes files may call them anything.
HOSTILE = '$x_{$ "><script>alert(1)</script><img src=https://example.org/x>\x1b[31m\n \u65e5 & \u202e'

H, D = 3_600, 86_400
UNIQUE_BLOCKS, BLOCK_BYTES = 4_000_000, 114_688
AGENT, CHATBOT = 0.7, 0.3  # of input tokens
# By capacity, as shares of input tokens.
CAPACITIES = {
    0.01: (0.7120, 0.7101, 0.6502, 0.8310),
    0.05: (0.9012, 0.8990, 0.8723, 0.9402),
    0.1: (0.9354, 0.9332, 0.9144, 0.9577),
    0.25: (0.9531, 0.9528, 0.9466, 0.9612),
    0.5: (0.9583, 0.9583, 0.9560, 0.9613),
}
CHATBOT_TTLS = {H: 0.8203, D: 0.8682, 3 * D: 0.9061, 7 * D: 0.9274, 14 * D: 0.9391}
OWN_SHARES = {0.0: (0.9455, 0.9118), 0.25: (0.9471, 0.9091), 0.5: (0.9498, 0.8874), 0.75: (0.9502, 0.8413)}


def storage(capacity_bytes, hit_rate):
    put = 3.1e12 * (1 - hit_rate)
    return StorageFacts(
        resident_bytes_mean=0.91 * capacity_bytes,
        resident_bytes_max=round(0.97 * capacity_bytes),
        bytes_put_per_day=put,
        bytes_written_per_day=1.234 * put,
        write_amplification=1.234,
        capacity_writes_per_day=1.234 * put / capacity_bytes,
    )


def result(agent, chatbot, *, lru=None, fifo=None, belady=None, capacity_share=0.1, **other):
    """A result with these hit rates; misses beyond what is new to anybody are evictions and, for chats, expiries."""
    hit_rate = AGENT * agent + CHATBOT * chatbot
    by_class = {}
    for name, rate in (("agent", agent), ("chatbot", chatbot)):
        missed = 1 - rate
        new = min(missed, 0.02)
        parts = (new * 0.75, new * 0.2, (missed - new) * 0.25, (missed - new) * 0.75, new * 0.05)
        by_class[name] = dict(zip(CAUSES, parts, strict=True))
    missed = {cause: AGENT * by_class["agent"][cause] + CHATBOT * by_class["chatbot"][cause] for cause in CAUSES}
    blocks = int(capacity_share * UNIQUE_BLOCKS)
    made = Result(
        trace="mixed",
        sweep="",
        policy="segment-hazard",
        replay="simulator",
        capacity_share=capacity_share,
        capacity_blocks=blocks,
        capacity_bytes=blocks * BLOCK_BYTES,
        ttl={"agent": 3 * D, "chatbot": 7 * D},
        class_share={},
        hit_rate=hit_rate,
        hit_rate_of_full_blocks=hit_rate / 0.9987,
        hit_rate_by_class={"agent": agent, "chatbot": chatbot},
        ceiling=0.9651,
        ceiling_with_ttl=0.9588,
        lru=lru,
        fifo=fifo,
        belady=belady,
        missed=missed,
        missed_by_class=by_class,
        storage=storage(max(1, blocks) * BLOCK_BYTES, hit_rate),
        seconds=12.5,
    )
    return replace(made, **other)


def capacity_row(share, rates, **other):
    """A row whose overall rate is the first of `rates`: agents 1 point above it, chats as far below as that makes."""
    ours, lru, fifo, belady = rates
    agent = ours + 0.01
    chatbot = (ours - AGENT * agent) / CHATBOT
    return result(agent, chatbot, lru=lru, fifo=fifo, belady=belady, capacity_share=share, **other)


def all_results():
    main = capacity_row(0.1, CAPACITIES[0.1])
    return [
        main,
        *(capacity_row(share, rates, sweep="capacity") for share, rates in CAPACITIES.items()),
        *(
            result(0.9682, chatbot, sweep="ttl", ttl={"agent": 3 * D, "chatbot": ttl_s}, capacity_share=0)
            for ttl_s, chatbot in CHATBOT_TTLS.items()
        ),
        *(
            result(agent, chatbot, sweep="class-share", class_share={"agent": share})
            for share, (agent, chatbot) in OWN_SHARES.items()
        ),
    ]


def make_report(results=None, *, name="mixed", origin=None, **other):
    made = HitRateReport(
        benchmark="hitrate",
        definition=DEFINITION,
        kvstore_version="0.1.0",
        commit="0123456789ab",
        time="2026-10-30T12:00:00Z",
        seed=7,
        config={"workload": name, "capacity_share": 0.1, "ttl": {"agent": "3d", "chatbot": "7d"}},
        machine=Machine("A CPU", 2, 16 << 30, "6.1", "ext4", "3.11.9", "1.76.0", "2.3.4", "3.6.0"),
        workload=WorkloadFacts(
            name=name,
            requests=812_345,
            input_tokens=41_234_567_890,
            block_tokens=128,
            unique_blocks=UNIQUE_BLOCKS,
            days=28.0,
            warm_up_days=14.0,
            input_share_by_class={"agent": AGENT, "chatbot": CHATBOT},
            origin={"generator": "mixed", "seed": 7} if origin is None else origin,
        ),
        results=all_results() if results is None else results,
    )
    return replace(made, **other)


class Page(HTMLParser):
    """What is in a page: tags with attributes, cells, and all text outside of styles."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.cells, self._inside = [], "", [], ""
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "td":
            self.cells[-1] += data
        if self._inside != "style":
            self.text += data


def page(report):
    return Page(html_report(report))
