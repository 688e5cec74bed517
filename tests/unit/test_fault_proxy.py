"""The proxy of the tests does what it says, since tests that rest on it would else pass for the wrong reason."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from fault_proxy import Fault, fault_proxy


@contextmanager
def echo():
    """A server that sends back what it gets."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    threads = [threading.Thread(target=accept)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads[0].start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


@pytest.fixture
def proxy():
    before = threading.active_count()
    with echo() as target, fault_proxy(target) as proxy:
        yield proxy
    assert threading.active_count() == before


def connect(proxy) -> socket.socket:
    host, port = proxy.target.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def trip(connection: socket.socket, data: bytes) -> bytes:
    """`data` there and back, as far as it comes."""

    def send() -> None:
        with suppress(OSError):
            connection.sendall(data)

    sender, back = threading.Thread(target=send), b""
    sender.start()
    with suppress(ConnectionResetError):
        while len(back) < len(data) and (more := connection.recv(1 << 16)):
            back += more
    sender.join()
    return back


def test_passes_everything_and_counts_it(proxy):
    data = random.randbytes(3_000_000)
    with connect(proxy) as connection:
        assert trip(connection, data) == data
    assert (proxy.connections, proxy.bytes_from_client, proxy.bytes_from_server) == (1, 3_000_000, 3_000_000)


@pytest.mark.parametrize(
    ("fault", "seconds"), [(Fault(delay_s=0.2), 0.4), (Fault(bytes_per_s=100_000), 0.4)], ids=["delay", "throttle"]
)
def test_takes_its_time(proxy, fault, seconds):
    proxy.set(fault)
    data = random.randbytes(20_000 if fault.delay_s else 40_000)
    with connect(proxy) as connection:
        started_s = time.monotonic()
        assert trip(connection, data) == data
        assert time.monotonic() - started_s >= seconds


def test_black_hole_swallows_until_it_is_lifted(proxy):
    with connect(proxy) as connection:
        assert trip(connection, b"one") == b"one"
        proxy.set(Fault(black_hole=True))
        connection.sendall(b"two")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(10)
        proxy.set(Fault())
        connection.settimeout(30)
        assert connection.recv(10) == b"two"


def test_refuses_and_accepts_again_on_the_same_port(proxy):
    with connect(proxy) as connection:
        assert trip(connection, b"one") == b"one"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            connection.recv(10)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
    proxy.accept()
    with connect(proxy) as connection:
        assert trip(connection, b"two") == b"two"


@pytest.mark.parametrize("spoils_client", [False, True])
@pytest.mark.parametrize("at", [0, 10, 200_000])
def test_flips_one_bit_once_at_its_place(proxy, at, spoils_client):
    data = random.randbytes(300_000)
    with connect(proxy) as connection:
        assert trip(connection, b"before") == b"before"
        proxy.set(Fault(flip_after_bytes=at, spoils_client=spoils_client))
        back = trip(connection, data)
        assert [i for i in range(len(data)) if data[i] != back[i]] == [at]
        assert (data[at] ^ back[at]).bit_count() == 1
        assert trip(connection, data) == data
    assert proxy.faults_done == 1


@pytest.mark.parametrize("at", [0, 10, 200_000])
def test_cuts_the_connection_at_its_place(proxy, at):
    with connect(proxy) as connection:
        proxy.set(Fault(cut_after_bytes=at))
        assert len(trip(connection, bytes(300_000))) <= at
    assert proxy.faults_done == 1
