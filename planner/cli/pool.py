"""What commands that look at or change a pool's plan share: the salt, who it is that acts, plans by file or version."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.output import open_store
from service.errors import InvalidInput, InvalidPlan

if TYPE_CHECKING:
    from planner.diff import Difference
    from service.ledger import Freeze
    from service.plan import Plan
    from service.store import Store

ACK_WAIT_S = 3.0
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Seven days: a freeze for longer is one without an end.
TTL_MAX_S = 7 * 86400


def salt() -> bytes:
    """Return the pool's salt; raise InvalidInput for one that is none, and for unknown variables."""
    import os

    from planner.settings import refuse_unknown_variables
    from service.settings import check_salt

    refuse_unknown_variables(os.environ)
    try:
        return check_salt(os.environ.get("CACHEROUTE_KEY_SALT", "")).encode()
    except ValueError as exc:
        raise InvalidInput(f"CACHEROUTE_KEY_SALT: {exc}", "use the services' salt") from exc


def key_check() -> int:
    """Return what plans of our salt carry."""
    from service.keys import KEY_CHECK, hash_key

    return hash_key(KEY_CHECK, salt())


def login() -> str:
    """Return who runs the command."""
    from getpass import getuser

    try:
        return getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no name
        return "cli"


def said(reason: str) -> str:
    """Return a reason that says something; raise InvalidInput for one that is blank."""
    if not reason.strip():
        raise InvalidInput("--reason is empty", "say why, for those who read the log")
    return reason.strip()


def duration_s(option: str, text: str) -> float:
    """Return the seconds of `90s`, `15m`, `2h` or `1d`; raise InvalidInput for anything else."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text.strip())
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= TTL_MAX_S:
        raise InvalidInput(f"{option} {text!r} is not a time of up to 7 days", "write it as 90s, 15m, 2h or 1d")
    return seconds


def read_file(path: Path) -> bytes:
    """Return the bytes of a plan's file."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidInput(
            f"plan {path} cannot be read: {exc.strerror}", "name a file that `plan build` wrote"
        ) from exc


async def fetch(store: "Store", version: int | None) -> "Plan":
    """Return the published plan as services take it, or an earlier version that is still kept."""
    from service.plan import decode
    from service.published import verify

    head = await store.read_head()
    if version is None and not head.version:
        raise InvalidPlan("missing", f"pool {store.pool!r} has no plan; build one and `plan publish` it")
    if version is None or version == head.version:
        return verify(await store.read_plan_bytes(head.version), head, key_check=key_check())
    return decode(await store.read_plan_bytes(version))


async def find(which: "list[str | None]", redis: str | None, pool: str | None) -> "list[Plan]":
    """Return plans by file or version, None: the published one; Redis is asked only for those that it has."""
    from service.plan import decode

    store = None
    try:
        found = []
        for name in which:
            if name is not None and not name.isdecimal():
                found.append(decode(read_file(Path(name))))
                continue
            store = store or open_store(redis, pool)
            found.append(await fetch(store, None if name is None else int(name)))
        return found
    finally:
        if store is not None:
            await store.close()


async def refusals(store: "Store", published: "Plan", instances: set[str]) -> list[tuple[str, str]]:
    """Wait until each instance serves the plan or says why not; one that stays silent is no refusal."""
    import asyncio

    deadline = asyncio.get_running_loop().time() + ACK_WAIT_S
    while True:
        acks = [ack for ack in await store.read_acks() if ack.instance in instances]
        served = {ack.instance for ack in acks if (ack.epoch, ack.version) >= (published.epoch, published.version)}
        refused = [(ack.instance, ack.error) for ack in acks if ack.error and ack.at > published.created_at]
        if len(served) + len(refused) >= len(instances) or asyncio.get_running_loop().time() > deadline:
            return refused
        await asyncio.sleep(0.05)


def changes_of(old: "Plan", new: "Plan", prefix_tokens: float) -> dict[str, object]:
    """Return what changes when `new` replaces `old`, as `plan diff` prints it."""
    from planner.diff import diff, max_over_mean

    if old.key_check != new.key_check:
        raise InvalidPlan("salt", "the two plans were built with different salts: no key is in both")
    found: Difference = diff(old, new)
    before, after = found.loads_before_rps, found.loads_after_rps
    return {
        "keys_in_both": found.keys_in_both,
        "keys_changed": found.keys_changed,
        "keys_changed_fraction": found.keys_changed_fraction,
        "rate_moved_fraction": found.rate_moved_fraction,
        "slots_new_fraction": found.slots_new_fraction,
        "admitted": found.admitted,
        "dropped": found.dropped,
        "max_over_mean_before": max_over_mean(before, old.endpoints),
        "max_over_mean_after": max_over_mean(after, new.endpoints),
        "moved_targets": found.moved_targets,
        "warmup_tokens": found.moved_targets * prefix_tokens,
        "endpoints": [{"name": name, "load_before_rps": before[name], "load_after_rps": after[name]} for name in after],
    }


def freeze_of(frozen: "Freeze | None") -> dict[str, object] | None:
    """Return a freeze as documents have it; None: nobody froze the plan."""
    if frozen is None:
        return None
    return {"actor": frozen.actor, "reason": frozen.reason, "at": frozen.at, "until": frozen.until or None}
