"""gRPC targets, checked before gRPC sees them.

gRPC itself takes almost any text: a port over 65535 wraps to another one, a missing port becomes 443, and an unknown scheme is
looked up as a host's name. Each looks like a store that is down, for ever.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote

WANTED = (
    "host:port with a port of 1 to 65535, such as '127.0.0.1:7420' or '[::1]:7420', or 'unix:/path', 'unix-abstract:name', "
    "'dns:///host:port', 'ipv4:address:port', 'ipv6:[address]:port'"
)

_HOST_PORT = re.compile(r"(?P<host>[^\s:/\[\],?#@%]+|\[[^\s/\[\]]+\]):(?P<port>[0-9]{1,5})")


def is_possible(target: str) -> bool:
    """Whether there can be a server at `target`."""
    scheme, _, rest = target.partition(":")
    match scheme.lower():
        case "unix":
            return rest.startswith("///") if rest.startswith("//") else bool(rest)
        case "unix-abstract":
            return bool(rest)
        case "dns":
            return _is_name_or_address(_host(rest.removeprefix("///")))
        case "ipv4":
            return all(_is_ipv4(_host(address)) for address in rest.split(","))
        case "ipv6":
            return all(_is_ipv6(_host(address)) for address in unquote(rest).split(","))
    return _is_name_or_address(_host(target))


def _host(address: str) -> str | None:
    """The host of a host:port; None when it is no such thing."""
    parts = _HOST_PORT.fullmatch(address)
    return parts["host"] if parts is not None and 1 <= int(parts["port"]) <= 65535 else None


def _is_name_or_address(host: str | None) -> bool:
    return host is not None and (not host.startswith("[") or _is_ipv6(host))


def _is_ipv4(host: str | None) -> bool:
    try:
        ipaddress.IPv4Address(host or "")
    except ValueError:
        return False
    return True


def _is_ipv6(host: str | None) -> bool:
    """In brackets; a zone's "%" may be written "%25", as in a URI."""
    if host is None or not host.startswith("["):
        return False
    try:
        ipaddress.IPv6Address(host[1:-1].replace("%25", "%"))
    except ValueError:
        return False
    return True
