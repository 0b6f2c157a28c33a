"""What stands published, and what each service process says that it serves of it: values only, read from any store."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from service.errors import InvalidPlan
from service.plan import Plan, decode

# An ack is written every few seconds and read whole; larger fleets show their first ones.
FLEET_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Head:
    """Which plan is published; version 0 means none yet."""

    version: int = 0
    epoch: int = 0
    sha256: str = ""
    created_at: float = 0.0
    actor: str = ""
    reason: str = ""


class Publication(NamedTuple):
    """One publication in a pool's log; at: unix s by the store's clock.  sha256: of the plan's bytes."""

    epoch: int
    version: int
    at: float
    sha256: str = ""
    actor: str = ""
    reason: str = ""
    keys: int = 0


class EndpointView(NamedTuple):
    """One endpoint as one process sees it; inflight is what that process sent."""

    name: str
    address: str
    ready: bool
    draining: bool
    inflight: int


@dataclass(frozen=True, slots=True)
class Ack:
    """What one service process says that it serves.

    error: why it refused a newer plan, or empty.  at: unix s of the ack.  created_at: unix s of the plan's publication.
    source: `redis`, `disk` for the last good table of an earlier process, or empty without a table.
    """

    instance: str
    version: int
    epoch: int
    error: str
    at: float
    created_at: float = 0.0
    source: str = ""
    fleet: tuple[EndpointView, ...] = ()


def verify(data: bytes, head: Head, *, key_check: int | None) -> Plan:
    """Return the plan whose bytes and head were read; raise InvalidPlan on digest, schema, rules or version.

    key_check: as in `plan.decode`.
    """
    if hashlib.sha256(data).hexdigest() != head.sha256:
        raise InvalidPlan("checksum", f"plan version {head.version} does not match its sha256 {head.sha256[:12]}…")
    plan = decode(data, key_check=key_check)
    if (plan.version, plan.epoch) != (head.version, head.epoch):
        raise InvalidPlan(
            "version",
            f"plan says it is {plan.version} of epoch {plan.epoch}, the head says {head.version} of {head.epoch}",
        )
    return plan


def encode_fleet(views: Iterable[EndpointView]) -> str:
    """Return a fleet as an ack carries it: one short row an endpoint, the first FLEET_SHOWN."""
    rows = [(v.name, v.address, int(v.ready), int(v.draining), v.inflight) for v in views]
    return json.dumps(rows[:FLEET_SHOWN], separators=(",", ":"))


def decode_fleet(text: str | bytes) -> tuple[EndpointView, ...]:
    """Return what `encode_fleet` wrote; raise ValueError or TypeError for anything else."""
    rows = json.loads(text)
    return tuple(
        EndpointView(str(name), str(address), bool(ready), bool(draining), int(inflight))
        for name, address, ready, draining, inflight in rows[:FLEET_SHOWN]
    )
