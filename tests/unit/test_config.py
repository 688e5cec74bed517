"""The configuration is strict: whoever mistypes a key hears of it, and where the key stands."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from kvstore.config import (
    DEFAULT_TRAFFIC_CLASSES,
    LoadedConfig,
    ServerConfig,
    Setting,
    StoreConfig,
    TenantConfig,
    environment_name,
    known_keys,
    load_config,
)
from kvstore.errors import ConfigError
from kvstore.listen import parse_listen

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "kvstore.toml"


def load(
    tmp_path: Path, toml: str = "", environment: dict[str, str] | None = None, flags: tuple[Setting, ...] = ()
) -> LoadedConfig:
    path = tmp_path / "kvstore.toml"
    path.write_text(toml)
    return load_config(path, flags, environment or {})


def refusal(
    tmp_path: Path, toml: str = "", environment: dict[str, str] | None = None, flags: tuple[Setting, ...] = ()
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, environment, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def origin(loaded: LoadedConfig, name: str) -> str:
    return next(setting.origin for setting in loaded.settings if setting.name == name)


def keys_of(table: dict[str, object], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys = []
    for name, value in table.items():
        keys += keys_of(value, (*before, name)) if isinstance(value, dict) else [(*before, name)]
    return keys


def test_without_anything_the_defaults_hold():
    loaded = load_config()
    assert loaded.config == ServerConfig()
    assert {setting.origin for setting in loaded.settings} == {"default"}
    assert [setting.key for setting in loaded.settings] == known_keys()


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path):
    toml = '[store]\ncapacity = "1GiB"\nlease_s = 5\n[server]\nlisten = "127.0.0.1:1"\n'
    environment = {"KVSTORE_STORE__CAPACITY": "2GiB", "KVSTORE_SERVER__LISTEN": "127.0.0.1:2"}
    flag = Setting(("store", "capacity"), "3GiB", "flag --capacity")
    loaded = load(tmp_path, toml, environment, (flag,))
    assert loaded.config.store.capacity == 3 << 30
    assert loaded.config.server.listen == "127.0.0.1:2"
    assert loaded.config.store.lease_s == 5
    assert origin(loaded, "store.capacity") == "flag --capacity"
    assert origin(loaded, "server.listen") == "environment KVSTORE_SERVER__LISTEN"
    assert origin(loaded, "store.lease_s") == f"file {tmp_path}/kvstore.toml"
    assert origin(loaded, "store.put_queue") == "default"


@pytest.mark.parametrize(
    ("toml", "unknown", "meant"),
    [
        ("[store]\ncapcity = 1", "store.capcity", "store.capacity"),
        ("[stroe]\ncapacity = 1", "stroe.capacity", "store.capacity"),
        ("capacity = 1", "capacity", "store.capacity"),
        ("[server]\ncapacity = 1", "server.capacity", "store.capacity"),
        ("[traffic_classes.agent]\nttl = 1", "traffic_classes.agent.ttl", "traffic_classes.agent.ttl_s"),
        (
            "[traffic_classes.mine]\nttl_s = 1\nrefersh = 1",
            "traffic_classes.mine.refersh",
            "traffic_classes.mine.refresh",
        ),
    ],
)
def test_an_unknown_key_in_the_file_is_refused_with_the_right_one(tmp_path, toml, unknown, meant):
    assert refusal(tmp_path, toml) == f"unknown key {unknown} (file {tmp_path}/kvstore.toml), did you mean {meant}?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVSTORE_STORE__CAPCITY", "KVSTORE_STORE__CAPACITY"),
        ("KVSTORE_CAPACITY", "KVSTORE_STORE__CAPACITY"),
        ("KVSTORE_SERVER_LISTEN", "KVSTORE_SERVER__LISTEN"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_right_one(tmp_path, name, meant):
    message = refusal(tmp_path, environment={name: "1", "PATH": "/bin", "KVSTORES": "no prefix"})
    assert f"(environment {name}), did you mean {meant}?" in message


def test_an_unknown_key_that_resembles_nothing_is_refused_all_the_same(tmp_path):
    assert refusal(tmp_path, "[store]\nxyzzy = 1") == f"unknown key store.xyzzy (file {tmp_path}/kvstore.toml)"


def test_every_unknown_key_is_named_at_once(tmp_path):
    message = refusal(tmp_path, "[store]\ncapcity = 1\nleas_s = 2")
    assert "store.capcity" in message
    assert "store.leas_s" in message


@pytest.mark.parametrize("toml", ["store = 5", "traffic_classes = 1", "[traffic_classes]\nagent = 60"])
def test_a_value_where_a_table_belongs_is_refused(tmp_path, toml):
    assert "is a table of keys, not a value" in refusal(tmp_path, toml)


def test_an_empty_section_means_its_defaults(tmp_path):
    assert load(tmp_path, "[store]\n[log]\n").config == ServerConfig()


def test_a_class_without_ttl_is_refused(tmp_path):
    assert refusal(tmp_path, "[traffic_classes.mine]").startswith("traffic_classes.mine.ttl_s is missing (file ")


def test_bad_toml_names_file_and_line(tmp_path):
    message = refusal(tmp_path, '[store]\ncapacity = "1GiB"\nlease_s = = 5\n')
    assert message.startswith(f"{tmp_path}/kvstore.toml is no TOML: ")
    assert "line 3" in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, content):
    path = tmp_path / "kvstore.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path} is no TOML")):
        load_config(path)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[server]\nread_threads = "8"', "server.read_threads is '8' (file {}): this is a string, wanted is a number"),
        ('[server]\nallow_remote = "yes"', "server.allow_remote is 'yes' (file {}): this is a string, wanted is true"),
        ("[server]\nallow_remote = 1", "server.allow_remote is '1' (file {}): this is no boolean, wanted is true"),
        ("[server]\nread_threads = 8.0", "server.read_threads is '8.0' (file {}): wanted is a whole number"),
        ('[store]\nlease_s = "5"', "store.lease_s is '5' (file {}): this is a string, wanted is a number"),
        ('[traffic_classes.mine]\nttl_s = "5"', "traffic_classes.mine.ttl_s is '5' (file {}): this is a string"),
    ],
)
def test_a_value_of_another_type_in_the_file_is_not_guessed_at(tmp_path, toml, message):
    assert refusal(tmp_path, toml).startswith(message.format(f"{tmp_path}/kvstore.toml"))


def test_variables_of_the_benchmarks_do_not_stop_a_server(tmp_path):
    assert load(tmp_path, environment={"KVSTORE_BENCH_TRACES": "/traces"}).config == load(tmp_path).config
    assert "unknown key bench " in refusal(tmp_path, environment={"KVSTORE_BENCH": "1"})


def test_text_in_the_environment_and_sizes_in_the_file_are_read_as_what_is_wanted(tmp_path):
    environment = {"KVSTORE_SERVER__READ_THREADS": "9", "KVSTORE_SERVER__ALLOW_REMOTE": "yes"}
    config = load(tmp_path, '[store]\ncapacity = "5GiB"\nput_queue = 2097152', environment).config
    assert (config.server.read_threads, config.server.allow_remote) == (9, True)
    assert (config.store.capacity, config.store.put_queue) == (5 << 30, 2 << 20)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2097152", 2 << 20), ("2097152B", 2 << 20), ("2048KiB", 2 << 20), ("2 MiB", 2 << 20), ("3Gi", 3 << 30)],
)
def test_a_size_is_bytes_or_has_a_binary_unit(text, size):
    flag = Setting(("store", "capacity"), text, "flag --capacity")
    assert load_config(flags=(flag,)).config.store.capacity == size


@pytest.mark.parametrize("text", ["10GB", "10G", "10gb", "-1GiB", "1e9", "1.5GiB", "", "GiB", "1GiB\n"])
def test_a_size_in_another_unit_is_refused(tmp_path, text):
    flag = Setting(("store", "capacity"), text, "flag --capacity")
    assert refusal(tmp_path, flags=(flag,)) == (
        f"store.capacity is {text!r} (flag --capacity): write bytes, or a number with KiB, MiB, GiB or TiB, e.g. 10GiB"
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("STORE__CAPACITY", "5", "this is 5 B, at least 512 KiB is allowed"),
        ("STORE__SEGMENT_SIZE", "5GiB", "this is 5 GiB, at most 4 GiB is allowed"),
        ("TRAFFIC_CLASSES__AGENT__TTL_S", "0", "at least 1 s is allowed"),
        ("STORE__LEASE_S", "-1", "at least 0 s is allowed"),
        ("SERVER__READ_THREADS", "2000", "at most 1024 is allowed"),
        ("SERVER__READ_THREADS", "many", "wanted is a whole number"),
        ("STORE__LEASE_S", "long", "wanted is a number"),
        ("SERVER__ALLOW_REMOTE", "maybe", "wanted is true or false"),
    ],
)
def test_bounds_are_told_in_words(tmp_path, name, value, words):
    assert refusal(tmp_path, environment={f"KVSTORE_{name}": value}).endswith(
        f" is '{value}' (environment KVSTORE_{name}): {words}"
    )


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("toml", "start"),
    [
        ('[store]\ncapacity = "10XB"', "store.capacity is '10XB' (file "),
        ("[store]\ncapacity = 5", "store.capacity is '5' (file "),
        ('[store]\ndurability = "disk"', "store.durability is 'disk' (file "),
        ("[store]\nlease_s = -1", "store.lease_s is '-1' (file "),
        ("[server]\nread_threads = 0", "server.read_threads is '0' (file "),
        ('[server]\nlisten = "7420"', "server.listen is '7420' (file "),
        ('[server]\nmetrics_listen = "unix:/x"', "server.metrics_listen is 'unix:/x' (file "),
        ("[traffic_classes.agent]\nttl_s = 0", "traffic_classes.agent.ttl_s is '0' (file "),
        ('[log]\nlevel = "loud"', "log.level is 'loud' (file "),
    ],
)
def test_an_impossible_value_is_refused_with_key_value_and_origin(tmp_path, toml, start):
    message = refusal(tmp_path, toml)
    assert message.startswith(start)
    assert "pydantic" not in message


NUMBERS = [
    key
    for key in known_keys(["agent"])
    if key[-1].endswith(("_s", "_max", "_threads", "capacity", "_size", "_queue", "mark", "share", "limit"))
]


@pytest.mark.parametrize("key", NUMBERS, ids=".".join)
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_boolean_is_no_number(tmp_path, key, value):
    message = refusal(tmp_path, f"[{'.'.join(key[:-1])}]\n{key[-1]} = {value}")
    assert message.startswith(f"{'.'.join(key)} is '{value.capitalize()}' (file ")
    assert "a boolean" in message


def test_every_number_is_tried_as_a_boolean():
    numeric = [
        setting.key
        for setting in load_config().settings
        if isinstance(setting.value, int | float) and not isinstance(setting.value, bool)
    ]
    assert {key for key in numeric if key[0] != "traffic_classes" or key[1] == "agent"} == set(NUMBERS)


@pytest.mark.parametrize("key", ["store.capacity", "store.segment_size", "store.put_queue"])
@pytest.mark.parametrize(
    "value", ["'2EiB'", "'1025PiB'", f"{2**60 + 1}", "9" * 400, "'9e999B'", f"'{'9' * 400}'", "inf"]
)
def test_a_size_over_1_eib_is_refused(tmp_path, key, value):
    section, name = key.split(".")
    assert refusal(tmp_path, f"[{section}]\n{name} = {value}").startswith(f"{key} is ")


def test_a_capacity_of_1_eib_is_taken(tmp_path):
    assert load(tmp_path, '[store]\ncapacity = "1048576TiB"').config.store.capacity == 1 << 60


@pytest.mark.parametrize(
    ("toml", "start", "words"),
    [
        ('[server]\ndata_dir = ""', "server.data_dir is '' (file ", "empty"),
        ('[server]\ndata_dir = "a\\u0000b"', "server.data_dir is 'a\\x00b' (file ", "NUL"),
        ('[server]\nport_file = "a\\u0000b"', "server.port_file is 'a\\x00b' (file ", "NUL"),
        ('[server]\nlisten = "unix:/a\\u0000b"', "server.listen is 'unix:/a\\x00b' (file ", "NUL"),
        ('[server]\nlisten = "a..b:1"\nallow_remote = true', "server.listen is 'a..b:1' (file ", "host name"),
        (
            f'[server]\nmetrics_listen = "{"a" * 64}:1"\nallow_remote = true',
            "server.metrics_listen is 'aaaa",
            "host name",
        ),
    ],
)
def test_a_path_or_address_that_no_system_call_takes_is_refused(tmp_path, toml, start, words):
    message = refusal(tmp_path, toml)
    assert message.startswith(start)
    assert words in message


def test_a_path_in_the_environment_that_is_no_utf_8_is_refused(tmp_path):
    message = refusal(tmp_path, environment={"KVSTORE_SERVER__DATA_DIR": "/data/\udcff"})
    assert message.startswith("server.data_dir is '/data/\\udcff' (environment KVSTORE_SERVER__DATA_DIR): ")
    assert "UTF-8" in message


@pytest.mark.parametrize(
    "toml",
    ["[store]\ncapacity = " + "9" * 5000, "x = " + "[" * 5000, "a" + ".b" * 3000 + " = 1"],
    ids=["digits", "lists", "keys"],
)
def test_toml_that_breaks_its_reader_is_refused_as_any_other(tmp_path, toml):
    assert refusal(tmp_path, toml).startswith(f"{tmp_path}/kvstore.toml is no TOML")


def test_an_impossible_value_in_the_environment_names_the_variable(tmp_path):
    message = refusal(tmp_path, environment={"KVSTORE_STORE__CAPACITY": "much"})
    assert message.startswith("store.capacity is 'much' (environment KVSTORE_STORE__CAPACITY): ")


@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("[store]\nlease_s = 70", ["store.lease_s is 70", "store.lease_max_s, which is 60"]),
        ("[store]\nlease_max_s = 1", ["store.lease_s is 10", "store.lease_max_s, which is 1"]),
        ("[server]\nread_threads = 65", ["server.read_threads is 65", "server.read_pending_max, which is 64"]),
        ("[server]\nwrite_pending_max = 1", ["server.write_threads is 2", "server.write_pending_max, which is 1"]),
        ('[server]\nmetrics_listen = "127.0.0.1:7420"', ["server.listen and server.metrics_listen are both"]),
        (
            '[server]\nlisten = "0.0.0.0:7420"',
            ["server.listen is 0.0.0.0:7420", "--allow-remote", "server.allow_remote"],
        ),
        ('[server]\nmetrics_listen = "[::]:1"', ["server.metrics_listen is [::]:1", "--allow-remote"]),
    ],
)
def test_a_contradiction_names_both_fields_and_the_origin(tmp_path, toml, names):
    message = refusal(tmp_path, toml)
    for name in names:
        assert name in message
    assert f"file {tmp_path}/kvstore.toml" in message


def test_the_store_section_alone_refuses_a_contradiction():
    with pytest.raises(ValidationError, match="lease_max_s"):
        StoreConfig(lease_s=70)


def test_operators_classes_are_added_to_the_defaults_and_may_change_them(tmp_path):
    toml = '[traffic_classes.batch]\nttl_s = 60\nrefresh = "on_write"\n[traffic_classes.agent]\nttl_s = 5\n'
    classes = load(tmp_path, toml, {"KVSTORE_TRAFFIC_CLASSES__HANDOFF__TTL_S": "7"}).config.traffic_classes
    assert list(classes) == [*DEFAULT_TRAFFIC_CLASSES, "batch"]  # the first is the default class
    assert (classes["batch"].ttl_s, classes["batch"].refresh) == (60, "on_write")
    assert (classes["agent"].ttl_s, classes["agent"].refresh) == (5, "on_access")
    assert classes["chatbot"] == DEFAULT_TRAFFIC_CLASSES["chatbot"]
    assert classes["handoff"].ttl_s == 7


@pytest.mark.parametrize("name", ["Batch", "1st", "a b", "a" * 33, "", "a.b"])
def test_a_bad_class_name_is_refused(tmp_path, name):
    assert f"bad class name {name!r}" in refusal(tmp_path, f'[traffic_classes."{name}"]\nttl_s = 60')


def test_thirteen_classes_are_taken_and_fourteen_refused(tmp_path):
    own = [f"[traffic_classes.own{number}]\nttl_s = 60\n" for number in range(11)]
    assert len(load(tmp_path, "".join(own[:10])).config.traffic_classes) == 13
    assert "14 classes" in refusal(tmp_path, "".join(own))
    assert "the limit is 13" in refusal(tmp_path, "".join(own))


def test_quotas_of_tenants_are_taken_by_name(tmp_path):
    text = '[tenants."a.b c"]\nshare = 0.25\nlimit = 0.5\n[tenants.other]\nlimit = 0.1\n'
    tenants = load(tmp_path, text).config.tenants
    assert tenants == {"a.b c": TenantConfig(share=0.25, limit=0.5), "other": TenantConfig(limit=0.1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.a]\nshare = 0.5\nlimit = 0.4", "share is 0.5, more than limit, which is 0.4"),
        ("[tenants.a]\nlimit = 0", "more than 0 is allowed"),
        ("[tenants.a]\nlimit = 1.5", "at most 1 is allowed"),
        ("[tenants.a]\nshare = -1", "at least 0 is allowed"),
        ("[tenants.a]\nshare = 0.6\n[tenants.b]\nshare = 0.6", "add up to 1.2"),
        ("[traffic_classes.agent]\nshare = 0.6\n[traffic_classes.chatbot]\nshare = 0.6", "add up to 1.2"),
        ('[tenants.""]\nlimit = 0.5', "a tenant's name is not empty"),
        ("[tenants.a]\nlimt = 0.5", "did you mean tenants.a.limit?"),
        ("[tenants]\nlimit = 0.5", "tenants.limit (file"),
        ("[store]\nlow_watermark = 0.999", "store.low_watermark is 0.999, more than store.high_watermark"),
        ("[store]\nhigh_watermark = 1.01", "at most 1 is allowed"),
    ],
)
def test_quotas_and_watermarks_that_cannot_be_meant_are_refused(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


def test_the_configuration_is_frozen():
    config = ServerConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.store.capacity = 1


def test_the_example_file_holds_every_key_with_its_default():
    table = tomllib.loads(EXAMPLE.read_text())
    assert keys_of(table) == known_keys()
    loaded = load_config(EXAMPLE)
    assert loaded.config == ServerConfig()


def test_every_key_of_the_example_file_has_a_comment():
    lines = EXAMPLE.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"[a-z_]+ = ", line) and not line.startswith(("ttl_s", "refresh", "share", "limit")):
            assert lines[number - 1].startswith("# "), f"line {number + 1}: {line}"


def test_every_field_says_what_it_is():
    models: list[type[BaseModel]] = [ServerConfig]
    for model in models:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                models.append(field.annotation)
                assert field.annotation.__doc__
            else:
                assert field.description, f"{model.__name__}.{name}"


def test_the_page_on_configuration_has_every_key_with_its_default():
    rows = re.findall(
        r"^\| `([^`]+)` \| (?:`([^`]*)`|([^|`]*)) \|", (ROOT / "docs" / "configuration.md").read_text(), re.M
    )
    documented = {name: value for name, value, _ in rows}
    settings = {setting.name: setting.text for setting in load_config().settings}
    expected = {name: text for name, text in settings.items() if not name.startswith("traffic_classes.")}
    quota = {"share": "0.0", "limit": "1.0"}
    expected |= {"traffic_classes.<name>.ttl_s": "", "traffic_classes.<name>.refresh": "on_access"}
    expected |= {
        f"{table}.<name>.{key}": text for table in ("traffic_classes", "tenants") for key, text in quota.items()
    }
    assert documented == expected


def test_the_error_shown_on_the_page_is_the_one_that_comes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kvstore.toml").write_text("[store]\ncapcity = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("kvstore.toml"))
    shown = f"error: {caught.value} [{caught.value.reason}]"
    assert shown in (ROOT / "docs" / "configuration.md").read_text()


def test_the_unit_waits_longer_than_the_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "kvstore-server.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > ServerConfig().server.drain_s
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["User"] == unit["Service"]["StateDirectory"] == "kvstore"
    assert f"/var/lib/{unit['Service']['StateDirectory']}" == str(ServerConfig().server.data_dir)


def test_environment_names_are_read_back():
    for key in known_keys():
        name = environment_name(key)
        assert name == name.upper()
        assert tuple(name.removeprefix("KVSTORE_").lower().split("__")) == key


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:7420", True),
        ("127.9.9.9:1", True),
        ("[::1]:0", True),
        ("localhost:7420", True),
        ("unix:/run/kvstore/socket", True),
        ("0.0.0.0:7420", False),
        ("[::]:7420", False),
        ("10.0.0.1:7420", False),
        ("node7.example:7420", False),
        ("localhost.example:7420", False),
    ],
)
def test_addresses_are_read_and_known_as_local_or_not(text, local):
    address = parse_listen(text)
    assert str(address) == text
    assert address.is_local is local


@pytest.mark.parametrize(
    "text", ["", "7420", ":7420", "host:", "host:http", "host:65536", "::1:7420", "unix:", "unix:relative", "host:-1"]
)
def test_a_bad_address_is_refused_and_shown(text):
    with pytest.raises(ValueError, match="address"):
        parse_listen(text)
