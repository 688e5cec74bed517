"""The server's configuration: one typed, frozen object; wrong keys are refused.

Later layers win: defaults < the TOML file < `KVSTORE_<SECTION>__<KEY>` in the environment < command line flags. The layers
are merged here rather than by pydantic-settings, because each value has to know where it came from: for `config show`, and
for errors that say which file or variable to change.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvstore.errors import ConfigError
from kvstore.listen import ListenAddress, parse_listen
from kvstore.traffic import MAX_TRAFFIC_CLASSES, MAX_TTL_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ENVIRONMENT_PREFIX = "KVSTORE_"
BENCH_PREFIX = "KVSTORE_BENCH_"  # of the benchmarks' own variables: no section of the server is called so
CLASSES, TENANTS = "traffic_classes", "tenants"
OTHER_TENANTS = "other"  # stands for every tenant that has no quota under its own name
CLASS_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_NUMBERS = (int, float, ByteSize)
_SIZE = re.compile(r"([0-9]{1,30}) ?(?:([KMGT])i)?B?")
_SIZE_SHIFTS = {None: 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE_MAX = 1 << 60  # 1 EiB: no disk is larger, and every sum of a few of them fits in 64 bits


class _Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _boolean_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """By itself pydantic takes true for 1, and `ttl_s = true` for a time to live of a second."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in _NUMBERS:
            raise ValueError("this is a boolean, wanted is a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _size_is_in_bytes_or_binary_units(cls, value: object, info: ValidationInfo) -> object:
        """By itself pydantic also takes 10G and 10GB, which are 7 % less than the 10GiB that may be meant."""
        assert info.field_name is not None
        if cls.model_fields[info.field_name].annotation is not ByteSize or isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError("write bytes, or a number with KiB, MiB, GiB or TiB, e.g. 10GiB")
        return int(match[1]) << _SIZE_SHIFTS[match[2]]


class _QuotaConfig(_Section):
    """How much of the capacity somebody may hold."""

    share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the capacity that is its own: while it holds no more, its blocks are evicted after everybody else's.",
    )
    limit: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the capacity that it can hold at most: puts beyond it are rejected as QUOTA_EXCEEDED.",
    )

    @model_validator(mode="after")
    def _share_fits_limit(self) -> Self:
        if self.share > self.limit:
            raise ValueError(f"share is {self.share:g}, more than limit, which is {self.limit:g}")
        return self


class TrafficClassConfig(_QuotaConfig):
    """One traffic class."""

    ttl_s: int = Field(
        ge=1, le=MAX_TTL_S, description="Seconds after its last use by the class that a block is kept for it."
    )
    refresh: Literal["on_access", "on_write"] = Field(
        "on_access", description="What counts as a use: a match or put (on_access), or storing alone (on_write)."
    )


class TenantConfig(_QuotaConfig):
    """One tenant's quota."""


DEFAULT_TRAFFIC_CLASSES = {
    "agent": TrafficClassConfig(ttl_s=3 * 86_400),
    "chatbot": TrafficClassConfig(ttl_s=7 * 86_400),
    "handoff": TrafficClassConfig(ttl_s=600),
}


class StoreConfig(_Section):
    """The local storage engine."""

    capacity: ByteSize = Field(
        ByteSize(10 << 30),
        ge=512 << 10,
        le=_SIZE_MAX,
        description="Cap in bytes for the data directory, as du counts; more keeps more prefixes.",
    )
    segment_size: ByteSize = Field(
        ByteSize(256 << 20),
        ge=32 << 10,
        le=4 << 30,
        description="Bytes per segment file at most; larger segments mean fewer files and coarser reclaim. "
        "Never more than 1/16 of the capacity is used.",
    )
    high_watermark: float = Field(
        0.995,
        gt=0,
        le=1,
        description="Share of the capacity from which on space is reclaimed ahead of need, so that puts need not wait for it.",
    )
    low_watermark: float = Field(
        0.985,
        gt=0,
        le=1,
        description="Share of the capacity down to which it is then reclaimed; a lower one frees more at a time.",
    )
    durability: Literal["memory", "sync"] = Field(
        "memory",
        description="What an acknowledged block survives: death of the process (memory), or also power loss (sync; slower).",
    )
    lease_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="Default time for which a match keeps the blocks' files; with 0 they may go at once, and a read miss them.",
    )
    lease_max_s: float = Field(
        60.0, gt=0, le=3600, description="Longest lease a client may ask for; reclaimed files wait this long."
    )
    put_queue: ByteSize = Field(
        ByteSize(256 << 20),
        ge=1 << 20,
        le=_SIZE_MAX,
        description="Bytes of puts that may wait for the writer; beyond that puts are rejected.",
    )

    @model_validator(mode="after")
    def _lease_fits(self) -> Self:
        if self.lease_s > self.lease_max_s:
            raise ValueError(
                f"store.lease_s is {self.lease_s:g}, more than store.lease_max_s, which is {self.lease_max_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _watermarks_fit(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"store.low_watermark is {self.low_watermark:g}, more than store.high_watermark, "
                f"which is {self.high_watermark:g}"
            )
        return self


class ServerSection(_Section):
    """The server process: where it lives and listens, its threads, its end."""

    data_dir: Path = Field(Path("/var/lib/kvstore"), description="Data directory; one server at a time may use it.")
    listen: str = Field("127.0.0.1:7420", description="gRPC address: host:port, [v6]:port or unix:/path. Port 0: any.")
    allow_remote: bool = Field(
        False,
        description="Allow addresses that other machines can reach. There is no authentication yet: whoever reaches the "
        "port may read and delete everything.",
    )
    metrics_listen: str = Field(
        "127.0.0.1:7421", description="Prometheus metrics over HTTP: host:port or [v6]:port. Empty: no metrics port."
    )
    read_threads: int = Field(
        8, ge=1, le=1024, description="Threads that read blocks; more hide a slower disk and cost memory and CPU."
    )
    read_pending_max: int = Field(
        64, ge=1, le=65_536, description="Gets at a time; beyond that they are refused. Each costs about 3 MiB."
    )
    write_threads: int = Field(
        2, ge=1, le=1024, description="Threads that check arriving blocks before the one writer stores them."
    )
    write_pending_max: int = Field(
        32, ge=1, le=65_536, description="Puts at a time; beyond that they are refused. Each costs up to about 28 MiB."
    )
    match_threads: int = Field(
        2, ge=1, le=1024, description="Threads that look up prefixes, apart from reads so that these never delay them."
    )
    match_pending_max: int = Field(
        256, ge=1, le=65_536, description="Matches at a time; beyond that they are refused. More means longer waits."
    )
    drain_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds that running calls may take at shutdown before they are cancelled."
    )
    port_file: str = Field(
        "",
        description="File that gets the bound addresses and the process id as JSON once the server serves. Empty: none.",
    )

    @field_validator("data_dir", "port_file", mode="before")
    @classmethod
    def _path_is_possible(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str | Path):
            _check_path(str(value))
        if value == "" and info.field_name == "data_dir":
            raise ValueError("this is empty, wanted is a directory")
        return value

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _address_is_possible(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name == "listen":
            _check_host(parse_listen(value))
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_is_tcp(cls, value: str) -> str:
        if value and parse_listen(value).path:
            raise ValueError(f"{value!r} is a Unix socket, metrics are served on a TCP port")
        return value

    @model_validator(mode="after")
    def _threads_fit(self) -> Self:
        for kind in ("read", "write", "match"):
            threads, pending = getattr(self, f"{kind}_threads"), getattr(self, f"{kind}_pending_max")
            if threads > pending:
                raise ValueError(
                    f"server.{kind}_threads is {threads}, more than server.{kind}_pending_max, which is {pending}: "
                    "some threads would always idle"
                )
        return self

    @model_validator(mode="after")
    def _addresses_fit(self) -> Self:
        if self.listen == self.metrics_listen and not self.listen.endswith(":0"):
            raise ValueError(f"server.listen and server.metrics_listen are both {self.listen}")
        for name in ("listen", "metrics_listen"):
            text = getattr(self, name)
            if text and not self.allow_remote and not parse_listen(text).is_local:
                raise ValueError(
                    f"server.{name} is {text}, which other machines can reach, and there is no authentication yet: listen on "
                    "127.0.0.1 or unix:/path, or accept that anyone who reaches it may read and delete everything, with "
                    "--allow-remote (server.allow_remote = true)"
                )
        return self


def _check_path(path: str) -> None:
    """Raises: ValueError: no system call takes it, or no message can name it."""
    if "\0" in path:
        raise ValueError("a path cannot hold a NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("this path is no valid UTF-8") from None


def _check_host(address: ListenAddress) -> None:
    """Raises: ValueError: it cannot be looked up, whatever names there are; `socket` would fail with no `OSError`."""
    _check_path(address.path)
    try:
        address.host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{address.host!r} is no host name: {error}") from None
    if "\0" in address.host:
        raise ValueError(f"{address.host!r} is no host name: it holds a NUL character")


class LogSection(_Section):
    """The log, written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level written; debug adds a line per failed call."
    )
    format: Literal["json", "console"] = Field("json", description="One JSON object a line, or text for people.")


class ServerConfig(_Section):
    """All of a server's configuration; read once at start."""

    server: ServerSection = ServerSection()
    store: StoreConfig = StoreConfig()
    traffic_classes: dict[str, TrafficClassConfig] = Field(
        DEFAULT_TRAFFIC_CLASSES, description="Classes by name; yours are added to the defaults and may change them."
    )
    tenants: dict[str, TenantConfig] = Field(
        {}, description=f"Quotas by tenant; {OTHER_TENANTS!r} is that of every tenant not named."
    )
    log: LogSection = LogSection()

    @field_validator("tenants")
    @classmethod
    def _tenants_are_named(cls, value: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        if "" in value:
            raise ValueError("bad tenant name '': a tenant's name is not empty")
        return value

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        for section, quotas in ((CLASSES, self.traffic_classes), (TENANTS, self.tenants)):
            shares = {name: quota.share for name, quota in quotas.items() if quota.share and name != OTHER_TENANTS}
            if sum(shares.values()) > 1 + 1e-9:
                named = ", ".join(f"{section}.{name}.share = {share:g}" for name, share in shares.items())
                raise ValueError(
                    f"the shares add up to {sum(shares.values()):g}, more than the whole capacity: {named}"
                )
        return self

    @field_validator("traffic_classes")
    @classmethod
    def _classes_are_named_well(cls, value: dict[str, TrafficClassConfig]) -> dict[str, TrafficClassConfig]:
        for name in value:
            if not CLASS_NAME.fullmatch(name):
                raise ValueError(f"bad class name {name!r}: use 1 to 32 of a-z, 0-9, _ and -, beginning with a letter")
        if len(value) > MAX_TRAFFIC_CLASSES:
            raise ValueError(f"{len(value)} classes ({', '.join(value)}), the limit is {MAX_TRAFFIC_CLASSES}")
        return value


Key = tuple[str, ...]  # ("store", "capacity")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, and where it came from: "default", "file …", "environment …" or "flag …"."""

    key: Key
    value: object
    origin: str

    @property
    def name(self) -> str:
        """The key as it is written: `store.capacity`."""
        return ".".join(self.key)

    @property
    def text(self) -> str:
        """The value as it could be written: sizes with their largest exact unit."""
        if isinstance(self.value, ByteSize):
            return _size_text(self.value)
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)

    @property
    def plain(self) -> str | int | float | bool:
        """The value for JSON: sizes in bytes, paths as text."""
        if isinstance(self.value, ByteSize):
            return int(self.value)
        return self.value if isinstance(self.value, str | int | float) else str(self.value)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The configuration and each key's origin."""

    config: ServerConfig
    settings: Sequence[Setting]  # every key, in the order of the models


def load_config(
    path: Path | None = None, flags: Sequence[Setting] = (), environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Merge the layers and check the result.

    Raises: ConfigError: the file cannot be read or is no TOML, a key is unknown, a value is impossible or contradicts
        another; names every such key and where it came from.
    """
    in_file = _file_settings(path) if path else []
    given = [*in_file, *_environment_settings(environment or {}), *flags]
    _refuse_unknown(given)
    _refuse_wrong_types(in_file)
    merged = {setting.key: setting for setting in [*_flatten((), _DEFAULTS, "default"), *given]}
    try:
        config = ServerConfig.model_validate(_nest(merged.values()))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem, merged) for problem in error.errors())) from None
    origins = {key: setting.origin for key, setting in merged.items()}
    return LoadedConfig(config, list(_with_origins(config, origins)))


def environment_name(key: Key) -> str:
    """The variable that sets a key: `KVSTORE_STORE__CAPACITY`."""
    return ENVIRONMENT_PREFIX + "__".join(key).upper()


def known_keys(
    class_names: Sequence[str] = tuple(DEFAULT_TRAFFIC_CLASSES), tenant_names: Sequence[str] = ()
) -> list[Key]:
    """Every key, with those of the named traffic classes and tenants."""
    keys: list[Key] = []
    names = {CLASSES: class_names, TENANTS: tenant_names}
    for section, field in ServerConfig.model_fields.items():
        if section in _NAMED:
            keys += [(section, name, key) for name in names[section] for key in _key_order(_NAMED[section])]
        else:
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, BaseModel)
            keys += [(section, key) for key in field.annotation.model_fields]
    return keys


def _key_order(section: type[_Section]) -> list[str]:
    """A table's keys, its own before those it has in common with others."""
    own = [key for key in section.model_fields if key not in _QuotaConfig.model_fields]
    return own + [key for key in section.model_fields if key in _QuotaConfig.model_fields]


def _file_settings(path: Path) -> list[Setting]:
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
        return list(_flatten((), content, f"file {path}"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # bad syntax, bad UTF-8, or a number of more digits than Python reads
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is no TOML that can be read: it is nested too deeply") from None


def _environment_settings(environment: Mapping[str, str]) -> list[Setting]:
    return [
        Setting(tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")), value, f"environment {name}")
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(BENCH_PREFIX)
    ]


def _flatten(key: Key, value: object, origin: str) -> Iterator[Setting]:
    """Tables to settings; an empty table is a setting of its own, so that it is not forgotten."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _flatten((*key, name), item, origin)
    else:
        yield Setting(key, value, origin)


def _nest(settings: Iterator[Setting] | Any) -> dict[str, Any]:  # noqa: ANN401
    tree: dict[str, Any] = {}
    for setting in settings:
        table = tree
        for name in setting.key[:-1]:
            table = table.setdefault(name, {})
        if setting.value == {}:
            table.setdefault(setting.key[-1], {})
        else:
            table[setting.key[-1]] = setting.value
    return tree


def _refuse_unknown(given: Sequence[Setting]) -> None:
    named = {
        section: [setting.key[1] for setting in given if setting.key[0] == section and len(setting.key) > 1]
        for section in _NAMED
    }
    known = known_keys([*DEFAULT_TRAFFIC_CLASSES, *named[CLASSES]], named[TENANTS])
    tables = {key[:length] for key in known for length in range(1, len(key))} | {(TENANTS,)}
    problems = []
    for setting in given:
        if setting.key in tables:
            if setting.value != {}:
                problems.append(f"{setting.name} ({setting.origin}) is a table of keys, not a value")
        elif setting.key not in known:
            problems.append(f"unknown key {setting.name} ({setting.origin}){_did_you_mean(setting, known)}")
    if problems:
        raise ConfigError("; ".join(problems))


def _refuse_wrong_types(in_file: Sequence[Setting]) -> None:
    """TOML has types, so that nothing has to be guessed: a quoted "no" is no boolean. Variables and flags are all text."""
    problems = [
        f"{setting.name} is {str(setting.value)!r} ({setting.origin}): {wrong}"
        for setting in in_file
        if (wrong := _wrong_type(setting))
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _wrong_type(setting: Setting) -> str:
    """What is wrong with the type of a value in the file, or ""."""
    wanted, value = _type_of(setting.key), setting.value
    if wanted is bool and not isinstance(value, bool):
        what = "a string" if isinstance(value, str) else "no boolean"
        return f"this is {what}, wanted is true or false, without quotes"
    if wanted in (int, float) and isinstance(value, str):
        return "this is a string, wanted is a number, without quotes"
    if wanted is int and isinstance(value, float):
        return "wanted is a whole number, written without a point or an exponent"
    return ""


def _type_of(key: Key) -> object:
    """The annotation of a known key's field; None for a table."""
    if len(key) != (3 if key[0] in _NAMED else 2):
        return None
    section = _NAMED[key[0]] if key[0] in _NAMED else ServerConfig.model_fields[key[0]].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    return section.model_fields[key[-1]].annotation


def _did_you_mean(setting: Setting, known: Sequence[Key]) -> str:
    names = {".".join(key): key for key in known}
    near = difflib.get_close_matches(setting.name, names, n=1, cutoff=0.6)
    if not near:  # the right key in no section, or in a wrong one
        leaf = difflib.get_close_matches(setting.key[-1], [key[-1] for key in known], n=1, cutoff=0.75)
        near = [name for name, key in names.items() if leaf and key[-1] == leaf[0]][:1]
    if not near:
        return ""
    from_environment = setting.origin.startswith("environment ")
    return f", did you mean {environment_name(names[near[0]]) if from_environment else near[0]}?"


def _explain(problem: Any, merged: Mapping[Key, Setting]) -> str:  # noqa: ANN401
    """One of pydantic's errors as a sentence that names the keys and where their values came from."""
    key = tuple(str(part) for part in problem["loc"])
    name, message = ".".join(key), _in_words(problem, key)
    if key in merged and merged[key].value != {}:
        return f"{name} is {str(merged[key].value)!r} ({merged[key].origin}): {message}"
    if problem["type"] == "missing":
        return f"{name} is missing{_origin_of_table(key[:-1], merged)}"
    inside = [setting for setting in merged.values() if setting.key[: len(key)] == key]
    named = [setting for setting in inside if re.search(rf"{re.escape(setting.name)}(?![a-z_])", message)]
    origins = ", ".join(
        f"{setting.name}: {setting.origin}" for setting in named or inside if setting.origin != "default"
    )
    return message + (f" ({origins})" if origins else "")


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
_NO_SUCH_VALUE = {
    "int_parsing": "wanted is a whole number",
    "float_parsing": "wanted is a number",
    "bool_parsing": "wanted is true or false",
}


def _in_words(problem: Any, key: Key) -> str:  # noqa: ANN401
    """What pydantic says is wrong, with units."""
    kind = problem["type"]
    if kind in _NO_SUCH_VALUE:
        return _NO_SUCH_VALUE[kind]
    if kind not in _BOUNDS:
        return str(problem["msg"]).removeprefix("Value error, ")
    words, bound_name = _BOUNDS[kind]
    bound = problem["ctx"][bound_name]
    if _type_of(key) is ByteSize:
        return f"this is {_size_text(int(problem['input']), ' ')}, {words} {_size_text(bound, ' ')} is allowed"
    unit = " s" if key[-1].endswith("_s") else ""
    return f"{words} {int(bound)}{unit} is allowed"


def _origin_of_table(key: Key, merged: Mapping[Key, Setting]) -> str:
    for setting in merged.values():
        if setting.key[: len(key)] == key:
            return f" ({setting.origin})"
    return ""


def _with_origins(config: ServerConfig, origins: Mapping[Key, str]) -> Iterator[Setting]:
    for key in known_keys(list(config.traffic_classes), list(config.tenants)):
        value: Any = config
        for name in key:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        yield Setting(key, value, origins.get(key, "default"))


def _size_text(size: int, space: str = "") -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{space}{unit}"
    return f"{size}{space}B"


_NAMED: dict[str, type[_Section]] = {CLASSES: TrafficClassConfig, TENANTS: TenantConfig}
_DEFAULTS = {CLASSES: {name: traffic.model_dump() for name, traffic in DEFAULT_TRAFFIC_CLASSES.items()}}
