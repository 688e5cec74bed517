"""What a plan is computed from: a TOML file, the reference deployment's unless another is given, and single keys over it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_bench import units
from kvstore_bench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

REFERENCE = Path(__file__).with_name("reference.toml")

_ROUNDING = 1e-9
_SHARES_OFF = 1e-6  # 0.1 + 0.2 + 0.7 is 1
_HIT_RATES_OFF = 0.0005  # published hit rates are rounded

Size = Annotated[float, BeforeValidator(units.parse_size), Field(gt=0)]
Bytes = Annotated[float, BeforeValidator(units.parse_bytes), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(units.parse_rate), Field(gt=0)]
LineRate = Annotated[float, BeforeValidator(units.parse_line_rate), Field(gt=0)]
Count = Annotated[float, BeforeValidator(units.parse_count), Field(gt=0)]
Share = Annotated[float, BeforeValidator(units.parse_share)]
UsableShare = Annotated[float, BeforeValidator(units.parse_share), Field(gt=0)]
Factor = Annotated[float, BeforeValidator(units.parse_number), Field(ge=1)]
Positive = Annotated[float, BeforeValidator(units.parse_number), Field(gt=0)]
Copies = Annotated[int, BeforeValidator(units.parse_whole), Field(ge=1, le=100)]
BlockTokens = Annotated[int, BeforeValidator(units.parse_whole), Field(ge=1, le=1 << 20)]
Ttl = Annotated[float, BeforeValidator(units.parse_duration), Field(gt=0)]
Span = Annotated[float, BeforeValidator(units.parse_duration)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Load(_Section):
    """What comes in."""

    tokens_per_day: Count
    hit_rate: Share
    output_share: Share = 0.0
    peak_factor: Factor


class Kv(_Section):
    """How large a token is: its bytes, or those of a block."""

    bytes_per_token: Bytes | None = None
    block_bytes: Bytes | None = None
    block_tokens: BlockTokens = BLOCK_TOKENS

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.bytes_per_token is None) == (self.block_bytes is None):
            raise ValueError("give bytes_per_token or block_bytes, one of both")
        if self.bytes_per_token is not None and "block_tokens" in self.model_fields_set:
            raise ValueError("block_tokens belongs to block_bytes, and not to bytes_per_token")
        return self

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's KV, the padding of its block included."""
        if self.bytes_per_token is not None:
            return self.bytes_per_token
        assert self.block_bytes is not None
        return self.block_bytes / self.block_tokens


class TrafficClass(_Section):
    """A part of the load. Without `hit_rate`: what makes the whole's right, the same for all such classes."""

    share: Share
    ttl: Ttl
    reuse_span: Span = 0.0
    hit_rate: Share | None = None


class Store(_Section):
    """How the store keeps it."""

    copies: Copies = 1
    fill: UsableShare
    write_amplification: Factor


class Drive(_Section):
    """A drive, as it is sold."""

    size: Size
    read: Rate
    write: Rate
    writes_per_day: Positive
    utilisation: UsableShare


class Nic(_Section):
    """A network port of a storage node, as fast in each direction."""

    speed: LineRate
    utilisation: UsableShare


class Window(_Section):
    """Sliding-window KV, which is not stored: what it would take."""

    bytes_per_token: Bytes
    snapshot_bytes: Bytes
    snapshot_every_tokens: Count


class Prefill(_Section):
    """An instance that computes missed tokens."""

    tokens_per_second: Count
    utilisation: UsableShare
    peak_factor: Factor


class TtlCut(_Section):
    """A shorter TTL for a class and what it is said to cost: shares of all input tokens that are not hit any more."""

    traffic_class: str = Field(alias="class")
    to: Ttl
    points_low: Share
    points_high: Share


class Published(_Section):
    """What is said of a deployment, to be held against what is computed."""

    capacity: Size
    peak_read: Rate
    peak_write: Rate
    bytes_per_token: Bytes
    window_share: UsableShare
    ttl_cut: TtlCut


class PlanConfig(_Section):
    """All inputs of a plan, in bytes, seconds, tokens, and bytes per second."""

    name: str = Field(min_length=1, max_length=100)
    load: Load
    kv: Kv
    classes: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")], TrafficClass] = Field(min_length=1)
    store: Store
    drive: Drive
    nic: Nic
    window: Window | None = None
    prefill: Prefill | None = None
    published: Published | None = None

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        total = sum(item.share for item in self.classes.values())
        if abs(total - 1) > _SHARES_OFF:
            shares = ", ".join(f"{name} {item.share:g}" for name, item in self.classes.items())
            raise ValueError(f"classes: the shares of input tokens ({shares}) add up to {total:g}, wanted is 1")
        return self

    @model_validator(mode="after")
    def _hit_rates_fit(self) -> Self:
        rates = self.hit_rates()
        whole = sum(item.share * rates[name] for name, item in self.classes.items())
        if any(not 0 <= rate <= 1 for rate in rates.values()) or abs(whole - self.load.hit_rate) > _HIT_RATES_OFF:
            rates_text = ", ".join(
                f"{name} {item.hit_rate:g}" for name, item in self.classes.items() if item.hit_rate is not None
            )
            raise ValueError(
                f"classes: with hit rates of {rates_text} the whole cannot have load.hit_rate {self.load.hit_rate:g}"
            )
        return self

    @model_validator(mode="after")
    def _cut_is_of_a_class(self) -> Self:
        if self.published is not None and self.published.ttl_cut.traffic_class not in self.classes:
            raise ValueError(f"published.ttl_cut.class {self.published.ttl_cut.traffic_class!r} is none of the classes")
        return self

    def hit_rates(self) -> dict[str, float]:
        """Of each class: its own, or what the classes without one must have for the whole to have `load.hit_rate`."""
        known = {name: item.hit_rate for name, item in self.classes.items() if item.hit_rate is not None}
        rest_share = sum(item.share for name, item in self.classes.items() if name not in known)
        hit = sum(self.classes[name].share * rate for name, rate in known.items())
        rest = (self.load.hit_rate - hit) / rest_share if rest_share and known else self.load.hit_rate
        if abs(rest - 0.5) - 0.5 < _ROUNDING:
            rest = min(1.0, max(0.0, rest))
        return {name: known.get(name, rest) for name in self.classes}


def load_plan(file: Path | None, changes: Sequence[tuple[tuple[str, ...], object, str]]) -> PlanConfig:
    """Read the reference, or another file, and change single keys.

    Args: changes: key, value, and the option that says so, for messages. The last one of a key counts.
    Raises: InputError: the file cannot be read, or a key is unknown, missing, impossible or contradicts another.
    """
    document = _read(file or REFERENCE)
    _drop_other_size(document, {key for key, _, _ in changes})
    for key, value, option in changes:
        _change(document, key, value, option)
    if file is None:
        _drop_what_is_of_the_reference(document, {key for key, _, _ in changes})
    try:
        return PlanConfig.model_validate(document)
    except ValidationError as error:
        origins = {key: option for key, _, option in changes}
        problems = [_explain(problem, origins) for problem in error.errors()]
        place = f"{file}: " if file is not None and not origins.keys() & {_key(p) for p in error.errors()} else ""
        raise InputError(f"{place}{'; '.join(problems)}", "see docs/capacity-plan.md for the keys") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {str(file)!r} cannot be read: {error.strerror}", "name a readable file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {str(file)!r} is no TOML: {error}", "see docs/capacity-plan.md") from None


def _drop_what_is_of_the_reference(document: dict[str, Any], given: set[tuple[str, ...]]) -> None:
    """Its published figures say nothing of another load, nor its model's windows of another model's KV."""
    sections = {key[0] for key in given}
    if "kv" in sections or given & {("load", "tokens_per_day"), ("load", "hit_rate")}:
        document.pop("published", None)
        document["name"] = "reference deployment, changed"
    if "kv" in sections and "window" not in sections:
        document.pop("window", None)


def _drop_other_size(document: dict[str, Any], given: set[tuple[str, ...]]) -> None:
    """Bytes of a token and of a block say the same: what options say of the one takes the place of the file's other one."""
    table = document.get("kv")
    if not isinstance(table, dict):
        return
    for one, others in (("bytes_per_token", ("block_bytes", "block_tokens")), ("block_bytes", ("bytes_per_token",))):
        if ("kv", one) in given:
            for other in others:
                table.pop(other, None)


def _change(document: dict[str, Any], key: tuple[str, ...], value: object, option: str) -> None:
    *parents, last = key
    table = document
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise InputError(f"{option}: {parent} is no table", "name a key as in docs/capacity-plan.md")
        table = inner
    table[last] = value


def _key(problem: ErrorDetails) -> tuple[str, ...]:
    return tuple(str(part) for part in problem["loc"] if part != "[key]")


def _explain(problem: ErrorDetails, origins: Mapping[tuple[str, ...], str]) -> str:
    """A sentence that names the key, and the option that it came from."""
    key = _key(problem)
    name = ".".join(key)
    place = f"{origins[key]} ({name})" if key in origins else name
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{place} is unknown"
    if kind == "missing":
        return f"{place} is missing"
    if kind in ("model_type", "dict_type"):
        return f"{place} is {problem['input']!r}, wanted is a table"
    if kind == "string_pattern_mismatch":
        return f"classes: {problem['input']!r} is no name: wanted are a-z, 0-9, _ and -, a letter first, 32 at most"
    if kind == "value_error":
        # Of a whole table, the message itself says which keys; of a single value it says what is wanted.
        if isinstance(problem["input"], dict):
            return f"{name}: {context['error']}" if name else str(context["error"])
        return f"{place} is {problem['input']!r}, {context['error']}"
    return f"{place} is {problem['input']!r}: {_plain(problem['msg'])}"


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]
