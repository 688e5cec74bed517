"""The parameters of the workload generator, read strictly: whatever is not known, or cannot be, stops with file, line and key."""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from kvstore_bench.hitrate.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A link to bench/workloads, so that a checkout and an installed package find the files at the same place.
WORKLOADS = Path(__file__).parents[1] / "workloads"

Share = Annotated[float, Field(ge=0, le=1)]
ReturnChance = Annotated[float, Field(ge=0, le=0.99)]  # at 1 a conversation would never end
Exponent = Annotated[float, Field(ge=0, le=10)]
Hours = Annotated[
    float, Field(ge=0, le=10)
]  # below 12, so that a return after a day cannot come before what it returns to
Count = Annotated[int, Field(ge=0, le=100_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LogNormal(_Table):
    """exp(N(ln median, sigma²)); the mean is median * exp(sigma² ÷ 2)."""

    median: float = Field(gt=0, le=1e9)
    sigma: float = Field(ge=0, le=5)


class TwoLogNormals(_Table):
    """`long` with probability `long_share`, else `short`."""

    short: LogNormal
    long: LogNormal
    long_share: Share


class Traffic(_Table):
    """How much there is of all."""

    days: int = Field(ge=1, le=3650)
    history_days: int = Field(
        ge=0, le=3650, description="Conversations begin up to so long before day 0; requests do not."
    )
    measured_from_days: int = Field(ge=0, le=3650, description="What comes before only warms up the store.")
    block_tokens: int = Field(ge=1, le=65536)
    answers_stored: bool = Field(description="When they are made; else as part of the next prompt.")
    scale: float = Field(gt=0, le=1e6, description="Multiplies the numbers of sessions and conversations.")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.measured_from_days >= self.days:
            raise ValueError(f"measured_from_days ({self.measured_from_days}) must be below days ({self.days})")
        return self


class Starts(_Table):
    """Starts per hour of the day h are proportional to 1 + diurnal_amplitude * cos(2π (h - peak_hour) ÷ 24)."""

    diurnal_amplitude: Share
    peak_hour: float = Field(ge=0, lt=24)


class Returns(_Table):
    """When a conversation that comes back does so: the same day, or k days later with P(k) ∝ k^-exponent."""

    same_day_share: Share
    same_day_gap_s: LogNormal
    exponent: Exponent
    max_days: int = Field(ge=1, le=3650)
    weekly_factor: float = Field(gt=0, le=100, description="Multiplies P(k) where k is a multiple of 7.")
    jitter_hours: Hours


class Habit(_Table):
    """Whether a sitting is followed by another one: two kinds of conversations, told apart when they start."""

    returning_share: Share
    returning_probability: ReturnChance
    other_probability: ReturnChance


class SharedPrompts(_Table):
    """Tool schemas with a system prompt behind them, as shared by sessions; the n-th most popular has P ∝ n^-exponent."""

    tool_sets: int = Field(ge=1, le=1_000_000)
    tool_set_exponent: Exponent
    tool_tokens: LogNormal
    prompts: int = Field(ge=1, le=1_000_000)
    prompt_exponent: Exponent
    system_tokens: LogNormal


class Breaks(_Table):
    """Requests whose prompt is not the last one with something added, and how much of it stays."""

    probability: Share
    from_start_share: Share = Field(description="Of breaks: nothing stays.")
    behind_prompt_share: Share = Field(
        description="Of breaks: the shared prompt stays; else up to a uniform place behind it."
    )

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.from_start_share + self.behind_prompt_share > 1:
            raise ValueError("from_start_share and behind_prompt_share are more than 1 together")
        return self


class Agent(_Table):
    """Sessions of coding agents."""

    sessions: Count
    prompt: SharedPrompts
    resumed_share: Share
    fresh_requests: LogNormal
    resumed_requests: LogNormal
    fresh_first_tokens: LogNormal
    resumed_first_tokens: LogNormal
    exploring_requests: int = Field(ge=0, le=1_000_000, description="The first ones of a session that is not resumed.")
    exploring_reading_tokens: LogNormal
    reading_tokens: LogNormal = Field(description="What tools and users said since the answer before.")
    output_tokens: LogNormal
    user_share: Share
    tool_gap_s: TwoLogNormals
    user_gap_s: TwoLogNormals
    context_tokens: Tokens
    long_context_tokens: Tokens
    compacted_tokens: LogNormal
    breaks: Breaks
    habit: Habit

    @model_validator(mode="after")
    def _contexts(self) -> Self:
        if self.long_context_tokens < self.context_tokens:
            raise ValueError(
                f"long_context_tokens ({self.long_context_tokens}) is below context_tokens ({self.context_tokens})"
            )
        return self


class Chat(_Table):
    """Conversations of people with a chatbot."""

    conversations: Count
    prompt: SharedPrompts
    further_turns: LogNormal
    gap_s: LogNormal
    user_tokens: LogNormal
    attachment_share: Share
    attachment_tokens: LogNormal
    output_tokens: LogNormal
    context_tokens: Tokens
    breaks: Breaks
    habit: Habit


class GeneratorParameters(_Table):
    """All of a workload file; every key has to be there, or in the workload that it is `based_on`."""

    traffic: Traffic
    starts: Starts
    returns: Returns
    agent: Agent
    chat: Chat
    _name: str = PrivateAttr("")
    _sha256: str = PrivateAttr("")

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self._name

    @property
    def sha256(self) -> str:
        """Of the file's bytes, in hex."""
        return self._sha256

    def flat(self) -> dict[str, float]:
        """Every parameter under its dotted key."""
        return dict(_flatten(self.model_dump(), ""))


def named_workloads() -> dict[str, Path]:
    """The workload files that come with the package, by the names that commands take."""
    return {path.stem: path for path in sorted(WORKLOADS.glob("*.toml"), key=lambda path: path.stem)}


def load_parameters(path: Path) -> GeneratorParameters:
    """Read a workload file.

    Raises: WorkloadError: the file cannot be read, or a key is missing, unknown, of a wrong type or impossible.
    """
    content, values = _read(path)
    values = _with_base(path, values)
    try:
        parameters = GeneratorParameters.model_validate(values)
    except ValidationError as error:
        raise WorkloadError("\n".join(_explain(path, content, one) for one in error.errors())) from error
    parameters._name, parameters._sha256 = path.stem, hashlib.sha256(content).hexdigest()
    return parameters


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = path.read_bytes()
        return content, tomllib.loads(content.decode())
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: not a TOML file: {error}") from error


def _with_base(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    if "based_on" not in values:
        return values
    base, known = values.pop("based_on"), named_workloads()
    if not isinstance(base, str) or base not in known or known[base] == path:
        raise WorkloadError(f"{path}: based_on: {base!r} is not one of {', '.join(known)}{_hint(str(base), known)}")
    return _merge(load_parameters(known[base]).model_dump(), values)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(path: Path, content: bytes, error: Mapping[str, Any]) -> str:
    keys = [str(key) for key in error["loc"]]
    line = _line_of(content.decode(), keys)
    where = f"{path} line {line}" if line else str(path)
    if error["type"] == "extra_forbidden":
        return f"{where}: {'.'.join(keys)}: unknown key{_hint(keys[-1], _known_keys(keys[:-1]))}"
    if error["type"] == "missing":
        return f"{where}: {'.'.join(keys)}: is missing"
    is_value = not isinstance(error["input"], dict)
    value = f" (is {error['input']!r})" if is_value else ""
    return f"{where}: {'.'.join(keys)}: {error['msg'].removeprefix('Value error, ')}{value}"


def _known_keys(tables: Sequence[str]) -> list[str]:
    model: Any = GeneratorParameters
    for table in tables:
        model = model.model_fields[table].annotation
    return [*model.model_fields, *([] if tables else ["based_on"])]


def _hint(word: str, known: Mapping[str, Any] | list[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _line_of(text: str, keys: Sequence[str]) -> int | None:
    """Line of the longest part of a dotted key that the file spells out."""
    table: list[str] = []
    best, best_line = 0, None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            found = table = header[1].split(".")
        elif assignment := re.match(r"\s*([\w.-]+)\s*=", line):
            found = [*table, *assignment[1].split(".")]
        else:
            continue
        if len(found) > best and list(keys[: len(found)]) == found:
            best, best_line = len(found), number
    return best_line
