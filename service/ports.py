"""The gRPC port before anybody listens on it: whether it is free, and held for workers that share it.

Linux gives each new connection of a port to one of the sockets that listen on it with SO_REUSEPORT, but also lets any
later process of the same user join them unasked, and take a share of the requests. So:
1. The port is first bound without SO_REUSEPORT, which fails when anybody has it, and says why.
2. With workers, the supervisor then keeps a socket bound to it, with SO_REUSEPORT and not listening: the port stays
   theirs while workers come and go, another supervisor's first step fails, and a port of 0 is chosen once for all.
"""

import socket

from service.errors import InvalidInput
from service.settings import split_address


def check_port(listen: str) -> int:
    """Return the port of `host:port`, a free one for 0, after having had it; raise InvalidInput when it is taken."""
    host, port = split_address(listen)
    try:
        with socket.create_server((host, port), family=_family(host)) as probe:
            return int(probe.getsockname()[1])
    except OSError as exc:
        raise port_refused(listen, exc.strerror or str(exc)) from exc


def hold_port(listen: str) -> tuple[socket.socket, str]:
    """Return a socket that holds the port of `host:port` for workers, and the address that these listen on.

    Raise InvalidInput when it is taken.
    """
    port = check_port(listen)
    host, _ = split_address(listen)
    holder = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as exc:
        holder.close()
        raise port_refused(listen, exc.strerror or str(exc)) from exc
    return holder, f"{listen.rpartition(':')[0]}:{port}"


def port_refused(listen: str, why: str) -> InvalidInput:
    """Return the error for a gRPC address that cannot be listened on."""
    return InvalidInput(f"--listen {listen}: {why}", "free it or choose another one")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
