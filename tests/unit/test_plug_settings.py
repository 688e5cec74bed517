"""What plugs are told: every key is known, every value possible, and no model goes without an identity."""

from __future__ import annotations

import pytest

from kvstore_client import KVStoreConfigError
from kvstore_engine.benefit import MeasuredBenefit, MinimumHit
from kvstore_engine.model_identity import config_digest, model_name, model_revision, weights_fingerprint
from kvstore_engine.plug_settings import PlugSettings


def test_settings_of_the_client_and_of_the_plug_stand_side_by_side():
    settings = PlugSettings.read({"target": "store:7420", "breaker_failures": 5, "tenant": "a", "min_hit_tokens": 256})
    assert (settings.client.target, settings.client.breaker_failures) == ("store:7420", 5)
    assert (settings.tenant, settings.traffic_class) == ("a", "")
    assert isinstance(settings.benefit(), MinimumHit)
    assert isinstance(PlugSettings.read({}).benefit(), MeasuredBenefit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"taget": "store:7420"}, "'taget'; did you mean 'target'"),
        ({"traffic-class": "agent"}, "'traffic-class'; did you mean 'traffic_class'"),
        ({"zzz": 1}, "'zzz'; known are: .*tenant"),
        ({"client": None}, "no setting is called 'client'"),
        ({"target": "no port"}, "target is"),
        ({"base_budget_s": "fast"}, "base_budget_s is 'fast'"),
        ({"tenant": ""}, "tenant is empty"),
        ({"tenant": 7}, "tenant is 7"),
        ({"min_hit_tokens": -1}, "min_hit_tokens is -1"),
        ({"min_hit_tokens": True}, "min_hit_tokens is True"),
        ({"max_pending_save_bytes": 0}, "max_pending_save_bytes is 0"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused_with_its_name(given, message):
    with pytest.raises(KVStoreConfigError, match=message):
        PlugSettings.read(given)


def test_keys_of_the_engine_itself_are_left_alone():
    assert PlugSettings.read({"backend_name": "x"}, foreign=frozenset({"backend_name"})).tenant == "default"


def model_at(path, weights=b"w" * 1000, config="{}"):
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "model.safetensors").write_bytes(b"w" * 999 + b"v"),
        lambda path: (path / "model.safetensors").write_bytes(b"w" * 1001),
        lambda path: (path / "config.json").write_text('{"rope_theta": 1}'),
        lambda path: (path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}'),
        lambda path: (path / "model-2.safetensors").write_bytes(b""),
        lambda path: (path / "model.safetensors").rename(path / "renamed.safetensors"),
    ],
)
def test_any_change_of_the_weights_or_their_configuration_is_another_revision(tmp_path, change):
    path = model_at(tmp_path / "model")
    before = model_revision(str(path), "")
    change(path)
    assert model_revision(str(path), "") != before


def test_revision_is_of_contents_and_not_of_places_or_of_files_that_no_engine_reads(tmp_path):
    one, other = model_at(tmp_path / "one"), model_at(tmp_path / "other")
    (other / "README.md").write_text("read me")
    (other / "training_args.bin").write_bytes(b"x")
    assert weights_fingerprint(one) == weights_fingerprint(other)


def test_commit_of_a_hub_snapshot_and_a_given_revision_need_no_reading(tmp_path):
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    assert model_revision(str(snapshot), "") == "0123456789" * 4
    assert model_revision("nowhere", "v7") == "v7"


@pytest.mark.parametrize("model", ["nowhere", "some/name-of-the-hub", "", "empty"])
def test_model_without_files_or_revision_is_refused_naming_the_key(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(KVStoreConfigError, match=r"'revision'.*IDENTITY_UNKNOWN"):
        model_revision(model, "")


def test_configuration_is_told_apart_whatever_the_order_of_its_keys():
    assert config_digest({"a": 1, "b": {"c": 2}}) == config_digest({"b": {"c": 2}, "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})


def test_model_is_called_the_same_wherever_it_lies(tmp_path):
    for place in ("here", "there"):
        model_at(tmp_path / place)
        (tmp_path / place / "llama").mkdir()
    assert {model_name(str(tmp_path / place / "llama")) for place in ("here", "there")} == {"llama"}
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    assert model_name(str(snapshot)) == model_name("org/name") == "org/name"
