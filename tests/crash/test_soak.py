"""A real store in a process of its own, killed at random and damaged now and then: right or missing, never lost for no cause.

`make soak SOAK_MINUTES=30` goes on for so long; a few rounds run with the other tests.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from children import whole_lines
from faults import flip_bit
from kvstore.clock import SystemClock
from stores import chain_of, get, open_store, payload, spec, tree_bytes

CAPACITY = 8 << 20
SEGMENT_BYTES = 256 << 10
BLOCK_BYTES = 20_000
BLOCKS_PER_SEGMENT = SEGMENT_BYTES // BLOCK_BYTES
CHAIN_BLOCKS = 5
CONVERSATIONS = {False: 40, True: 200}  # under pressure: more than fit

# Says what it is about to do, does it, says that it is done; a kill may come between any two. Bytes are checked here as well.
CHILD = f"""
import random, sys
from pathlib import Path
from stores import chain_of, get, open_store, payload, put, spec
from kvstore.clock import SystemClock
path, seed, conversations, durability = sys.argv[1:]
rng = random.Random(int(seed))
store = open_store(
    Path(path), SystemClock(), capacity={CAPACITY}, segment_size={SEGMENT_BYTES}, durability=durability, lease_s=0.3
)
namespace = store.register_namespace(spec({BLOCK_BYTES}))
while True:
    conversation, last = rng.randrange(int(conversations)), rng.randint(1, {CHAIN_BLOCKS})
    chain = chain_of(namespace, conversation, {CHAIN_BLOCKS})
    doing = rng.choices(["put", "get", "delete"], [6, 4, 1])[0]
    print("begin", doing, conversation, last, flush=True)
    done = last
    if doing == "put":
        done = sum(result.status.name != "REJECTED" for result in put(store, namespace, chain, range(last)))
        done = last if done == last else 0  # a part says nothing about which
    elif doing == "get":
        match = store.match(namespace, chain)
        found, misses = get(store, namespace, chain, lease=match.lease)
        assert all(data == payload(chain[block], {BLOCK_BYTES}) for block, data in found.items()), "wrong bytes"
        assert set(range(match.hit_length_blocks)) <= set(found), "a miss under a live lease"
    else:
        store.delete(namespace, chain, 0, {CHAIN_BLOCKS})
    print("end", doing, conversation, done, store.counters.snapshot()["blocks_evicted"], flush=True)
"""


@dataclass
class Life:
    """One data directory from its making to its end."""

    path: Path
    rng: random.Random
    pressed: bool
    durability: str
    stored: dict[int, int] = field(default_factory=dict)  # conversation -> blocks acknowledged
    absent: set[int] = field(default_factory=set)  # conversations deleted or never put
    losses: int = 0  # explained by eviction or damage, and not found yet

    def __post_init__(self) -> None:
        self.absent = set(range(CONVERSATIONS[self.pressed]))

    def run_child(self, lines_max: int) -> None:
        """Let a child work for a while, kill it, and note what it said."""
        arguments = [str(self.path), str(self.rng.getrandbits(32)), str(CONVERSATIONS[self.pressed]), self.durability]
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        lines = self.rng.randrange(1, lines_max)
        with process:
            assert process.stdout is not None
            evicted = 0
            for count, line in enumerate(whole_lines(process.stdout)):
                evicted = self.note(line.split(), evicted)
                if count == lines:
                    process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, f"the child ended by itself: {process.returncode}"
        # What it was about to do may have evicted as well: at most a segment's blocks for each segment a put fills.
        self.losses += evicted + (2 * BLOCKS_PER_SEGMENT if self.pressed else 0)

    def note(self, words: list[str], evicted: int) -> int:
        when, doing, conversation, blocks = words[0], words[1], int(words[2]), int(words[3])
        if doing == "put" and when == "begin":
            self.absent.discard(conversation)
        elif doing == "put":
            self.stored[conversation] = max(blocks, self.stored.get(conversation, 0))
        elif doing == "delete" and when == "begin":
            self.stored.pop(conversation, None)
        elif doing == "delete":
            self.absent.add(conversation)
        return int(words[4]) if len(words) == 5 else evicted

    def damage(self) -> str:
        """Now and then, something that a restart has to cope with."""
        kind = self.rng.choice(["none", "none", "index deleted", "segment cut", "byte flipped"])
        segments = sorted((self.path / "segments").glob("*.seg"))
        if kind == "index deleted":
            shutil.rmtree(self.path / "index")
        elif kind == "segment cut" and segments:
            size = segments[-1].stat().st_size
            os.truncate(segments[-1], max(0, size - self.rng.randrange(1, 60_000)))
            self.losses += SEGMENT_BYTES // 4096
        elif kind == "byte flipped" and segments:
            victim = self.rng.choice(segments)
            size = victim.stat().st_size
            flip_bit(victim, self.rng.randrange(min(40_960, size - 1), size), self.rng.randrange(8))
            self.losses += 1
        return kind

    def check(self, when: str) -> int:
        """Open it and look at every block; returns how many are there."""
        store = open_store(
            self.path, SystemClock(), capacity=CAPACITY, segment_size=SEGMENT_BYTES, durability=self.durability
        )
        namespace = store.register_namespace(spec(BLOCK_BYTES))
        there = 0
        for conversation in range(CONVERSATIONS[self.pressed]):
            chain = chain_of(namespace, conversation, CHAIN_BLOCKS)
            found, _ = get(store, namespace, chain)
            assert all(data == payload(chain[block], BLOCK_BYTES) for block, data in found.items()), (
                f"wrong bytes, {when}"
            )
            assert not (found and conversation in self.absent), f"conversation {conversation} was deleted, {when}"
            self.losses -= len(set(range(self.stored.get(conversation, 0))) - set(found))
            assert self.losses >= 0, f"acknowledged blocks of conversation {conversation} are gone, {when}"
            self.stored[conversation] = next(
                (block for block in range(CHAIN_BLOCKS) if block not in found), CHAIN_BLOCKS
            )
            there += len(found)
        assert store.status().used_bytes == tree_bytes(self.path) <= CAPACITY, when
        store.close()
        self.losses = 0  # all that was lost has been seen, and explains nothing later
        return there


def soak(path: Path, seed: int, tell, *, until_s: float, rounds: int, lines_max: int) -> None:
    """Lives one after the other until the time or the rounds are over."""
    rng = random.Random(seed)
    done = 0
    while done < rounds and time.monotonic() < until_s:
        life = Life(path / f"life-{done}", rng, rng.random() < 0.5, rng.choice(["memory", "sync"]))
        for _ in range(min(rng.randint(3, 15), rounds - done)):
            life.run_child(lines_max)
            damage = life.damage()
            when = f"seed {seed}, round {done}, {life.durability}, {'pressed' if life.pressed else 'roomy'}, damage: {damage}"
            there = life.check(when)
            done += 1
            tell(f"soak: {when}; {there} blocks there and right")
        shutil.rmtree(life.path)


def test_a_few_kills_and_damages(tmp_path):
    soak(tmp_path, 1, print, until_s=float("inf"), rounds=3, lines_max=400)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_kills_and_damages_for_long(tmp_path, capsys):
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    seed = random.SystemRandom().getrandbits(32)

    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    tell(f"\nsoak: {minutes:g} minutes, seed {seed}")
    soak(tmp_path, seed, tell, until_s=time.monotonic() + minutes * 60, rounds=1_000_000, lines_max=2_000)
