"""Starts the service: `python -m service` or `cacheroute serve`; one process, or workers under a supervisor.

gRPC is imported only where it is used: the supervisor starts programs, and needs none of it.
"""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from service.ending import end_when_told
from service.errors import CacheRouteError, InvalidInput
from service.files import check_folder
from service.keys import format_hash, hash_key
from service.redis_url import parse_redis_url, without_password
from service.settings import ServiceSettings, load_settings
from service.shares import parse_weights
from service.telemetry import configure_logging
from service.workers import WORKER_OPTION, Seat, read_seat, supervise


def run(settings: ServiceSettings) -> None:
    """Run the service to its end; raise SystemExit when workers did not end well, InvalidInput before any starts.

    Or SystemExit(0) when it is told to end before it runs.
    """
    end_when_told()
    if settings.redis_url:
        parse_redis_url(settings.redis_url)
    if settings.state_dir:
        check_folder("CACHEROUTE_STATE_DIR", Path(settings.state_dir))
    if settings.workers == 1:
        run_one(settings)
    elif code := supervise(settings, in_force(settings)):
        sys.exit(code)


def run_one(settings: ServiceSettings, seat: Seat | None = None) -> None:
    """Run one process to its end on uvloop, which takes a twentieth off a request's CPU; see `process.serve`."""
    # gRPC's new listener hands each message from thread to thread: it costs a fifth of a request's CPU here (measured
    # with grpcio 1.85; grpc/grpc#43092). Read when gRPC is imported, and a version that lacks the switch ignores it.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

    from service.process import serve

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, in_force(settings) if seat is None else {}, seat))


def in_force(settings: ServiceSettings) -> dict[str, object]:
    """Return the settings as they may be logged: no secret, and keys by their hashes only."""
    values = settings.model_dump()
    values["key_salt"] = "set" if settings.key_salt else "none"
    values["redis_url"] = without_password(settings.redis_url) if settings.redis_url else ""
    salt = settings.key_salt.encode()
    weights = parse_weights(settings.fair_weight)
    values["fair_weight"] = {format_hash(hash_key(key, salt)): weight for key, weight in weights.items()}
    return values


def main() -> None:
    """Run with the settings of the environment alone, or as the worker that standard input describes."""
    end_when_told()
    try:
        if sys.argv[1:] == [WORKER_OPTION]:
            seat, settings = read_seat(_read_line())
            configure_logging(settings.log_level)
            run_one(settings, seat)
            return
        if sys.argv[1:]:
            raise InvalidInput(
                f"unknown argument {sys.argv[1]!r}: python -m service takes none",
                "set CACHEROUTE_* variables (docs/settings.md), or give options to cacheroute serve",
            )
        settings = load_settings(os.environ)
        configure_logging(settings.log_level)
        run(settings)
    except CacheRouteError as exc:
        sys.stderr.write(f"cacheroute: {exc}\n")
        sys.exit(exc.exit_code)


def _read_line() -> bytes:
    """Return the first line of standard input, and not a byte more: what follows is its end (see workers)."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536)
        if not byte:
            sys.exit("the supervisor is gone")
        line += byte
    return bytes(line)


if __name__ == "__main__":
    main()
