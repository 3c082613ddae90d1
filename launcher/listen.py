"""The HTTP socket: bound before anything else is started, and inherited by all frontends."""

from __future__ import annotations

import errno
import ipaddress
import socket

BACKLOG = 2048
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def bind(host: str, port: int, hooks: bool) -> socket.socket:
    """The listening socket. ValueError in one line: an address that is not ours, a port in use, hooks for others."""
    family, address = _resolve(host, port)
    if hooks and not is_loopback(address[0]):
        raise ValueError(
            f"--test-hooks is refused with --host {host}: accepted are loopback addresses (127.0.0.1, ::1)"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(_reason(error, host, port)) from None
    return listener


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ValueError(
            f"--host {host!r} is not an address or name of this machine (such as 127.0.0.1, ::1)"
        ) from None
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} on {host} is in use; accepted is a free port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"--port {port} is not open to this user; accepted are ports from 1024 to 65535, or 0 for any free one"
    return f"--host {host} cannot be listened on: {error.strerror}; accepted are addresses of this machine"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address (numeric)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable(address: str) -> str:
    """The address by which this machine reaches a listener bound to `address`."""
    return WILDCARDS.get(address, address)


def url(address: str, port: int) -> str:
    """http://address:port, with brackets where needed."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
