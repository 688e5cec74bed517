"""The server's configuration: one typed, frozen object; wrong keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from kvstore.traffic import MAX_TTL_S


class TrafficClassConfig(BaseModel):
    """One traffic class."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ttl_s: int = Field(
        ge=1, le=MAX_TTL_S, description="Seconds after its last use by the class that a block is kept for it."
    )
    refresh: Literal["on_access", "on_write"] = Field(
        "on_access", description="What counts as a use: a match or put (on_access), or storing alone (on_write)."
    )


DEFAULT_TRAFFIC_CLASSES = {
    "agent": TrafficClassConfig(ttl_s=3 * 86_400),
    "chatbot": TrafficClassConfig(ttl_s=7 * 86_400),
    "handoff": TrafficClassConfig(ttl_s=600),
}


class StoreConfig(BaseModel):
    """The local storage engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    capacity: ByteSize = Field(
        ByteSize(10 << 30),
        ge=1 << 20,
        description="Cap in bytes for the data directory, as du counts; more keeps more prefixes.",
    )
    segment_size: ByteSize = Field(
        ByteSize(256 << 20),
        ge=64 << 10,
        le=4 << 30,
        description="Bytes per segment file at most; larger segments mean fewer files and coarser reclaim. "
        "Never more than 1/16 of the capacity is used.",
    )
    durability: Literal["memory", "sync"] = Field(
        "memory",
        description="What an acknowledged block survives: death of the process (memory), or also power loss (sync; slower).",
    )
    lease_s: float = Field(10.0, gt=0, le=600, description="Default time for which a match keeps the blocks' files.")
    lease_max_s: float = Field(
        60.0, gt=0, le=3600, description="Longest lease a client may ask for; reclaimed files wait this long."
    )
    put_queue: ByteSize = Field(
        ByteSize(256 << 20),
        ge=1 << 20,
        description="Bytes of puts that may wait for the writer; beyond that puts are rejected.",
    )
