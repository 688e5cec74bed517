"""Addresses a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A TCP host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it. Host names other than localhost count as remote: they may move."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> str:
        """The address as text, with the port that was bound in place of 0."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def __str__(self) -> str:
        return self.with_port(self.port)


def parse_listen(text: str) -> ListenAddress:
    """Read "host:port", "[v6]:port" or "unix:/path".

    Raises: ValueError: it is none of these; says what is wrong.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{text!r} is no Unix socket address: write unix:/absolute/path")
        return ListenAddress(path=path)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is no address: write host:port, e.g. 127.0.0.1:7420, or unix:/path")
    if int(port) > 65_535:
        raise ValueError(f"{text!r} is no address: port {port} is over 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is no address: an IPv6 host is written [{host}]:{port}")
    return ListenAddress(host=host, port=int(port))


def check_free(address: ListenAddress) -> None:
    """Make sure nobody listens there, and that this process may.

    gRPC says no more than "failed to bind", and would take over another server's Unix socket without a word.

    Raises: OSError: why the address cannot be had.
    """
    if address.path:
        _check_socket_free(address.path)
        return
    kind = socket.SOCK_STREAM
    for family, _, _, _, where in socket.getaddrinfo(address.host, address.port, type=kind, flags=socket.AI_PASSIVE):
        with socket.socket(family, kind) as probe:
            # As the servers do it: a port in TIME_WAIT is free, one that somebody listens on is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)


def _check_socket_free(path: str) -> None:
    if not os.path.isdir(os.path.dirname(path)):
        raise FileNotFoundError(errno.ENOENT, "no such directory", os.path.dirname(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return  # absent, or left by a server that is dead
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
