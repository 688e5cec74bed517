"""What the server tells gRPC fits what clients do."""

from __future__ import annotations

from kvstore.server import CLIENT_PING_INTERVAL_MIN_MS, GRPC_OPTIONS
from kvstore_api.limits import MAX_MESSAGE_BYTES
from kvstore_client import ClientConfig
from kvstore_client.channel import KEEPALIVE_TIME_MS, channel_options

CLIENT_OPTIONS = dict(channel_options(ClientConfig()))


def test_a_client_that_pings_as_ours_does_is_never_sent_away():
    assert KEEPALIVE_TIME_MS >= CLIENT_PING_INTERVAL_MIN_MS
    options = dict(GRPC_OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == CLIENT_PING_INTERVAL_MIN_MS
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert CLIENT_OPTIONS["grpc.keepalive_time_ms"] == KEEPALIVE_TIME_MS
    # The server's own pings look for dead clients, and do not race with those of a client that lives.
    assert options["grpc.keepalive_time_ms"] > KEEPALIVE_TIME_MS
    assert options["grpc.keepalive_timeout_ms"] >= CLIENT_OPTIONS["grpc.keepalive_timeout_ms"]


def test_connections_of_any_age_are_kept():
    assert not [name for name, _ in GRPC_OPTIONS if "max_connection" in name]


def test_no_message_is_larger_than_what_default_clients_take():
    options = dict(GRPC_OPTIONS)
    assert options["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES == 4 << 20
    assert options["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert CLIENT_OPTIONS[name] == MAX_MESSAGE_BYTES
