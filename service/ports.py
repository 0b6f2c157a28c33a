"""The gRPC port before anybody listens on it: whether it is free, and held for workers that share it.

Linux gives each new connection of a port to one of the sockets that listen on it with SO_REUSEPORT, but also lets any
later process of the same user join them unasked, and take a share of the requests. So:
1. The port is first bound without SO_REUSEPORT, which fails when anybody has it, and says why.
2. With workers, the supervisor then keeps a socket bound to it, with SO_REUSEPORT and not listening: the port stays
   theirs while workers come and go, another supervisor's first step fails, and a port of 0 is chosen once for all.
3. gRPC listens on all addresses of IPv6 and IPv4 together for 0.0.0.0 as for [::], so both are looked at and held.
"""

import socket

from service.errors import InvalidInput
from service.settings import split_address

EVERYWHERE = ("0.0.0.0", "::")


def check_port(listen: str) -> int:
    """Return the port of `host:port`, a free one for 0, after having had it; raise InvalidInput when it is taken."""
    with _bound(listen, split_address(listen)[1], shared=False) as probe:
        return int(probe.getsockname()[1])


def hold_port(listen: str) -> tuple[socket.socket, str]:
    """Return a socket that holds the port of `host:port` for workers, and the address that these listen on.

    Raise InvalidInput when it is taken.
    """
    port = check_port(listen)
    return _bound(listen, port, shared=True), f"{listen.rpartition(':')[0]}:{port}"


def _bound(listen: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket bound like gRPC's.  shared: others may join it, and it does not listen."""
    host, _ = split_address(listen)
    every = host in EVERYWHERE and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that was listened on a moment ago is free again.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not every))
        bound.bind(("::" if every else host, port))
        if not shared:
            bound.listen(1)
    except OSError as exc:
        bound.close()
        raise port_refused(listen, exc.strerror or str(exc)) from exc
    return bound


def port_refused(listen: str, why: str) -> InvalidInput:
    """Return the error for a gRPC address that cannot be listened on."""
    return InvalidInput(f"--listen {listen}: {why}", "free it or choose another one")
