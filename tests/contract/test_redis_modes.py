"""One URL reaches Redis in each mode of production, on real servers: users, TLS, Sentinels, a Cluster; failovers."""

import asyncio
import contextlib
import os
import re
import ssl
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis
from prometheus_client import CollectorRegistry
from redis.asyncio.connection import SSLConnection

from service.errors import CacheRouteError, StoreUnavailable
from service.feed import Feed
from service.fleet import Fleet
from service.keys import KEY_CHECK, hash_key
from service.lease_rows import Report
from service.ledger import Ledger
from service.plan import Plan
from service.published import Head
from service.rates import Rates
from service.settings import load_settings
from service.store import Store
from service.table import Current
from service.telemetry import Telemetry
from tests.contract.redis_servers import Authority, Cluster, Watched, tls_in_front

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "redis.md"
PASSWORD = "p@ss/w:rd?#"
ENCODED = "p%40ss%2Fw%3Ard%3F%23"


class Server(Protocol):
    url: str
    port: int

    def kill(self) -> None: ...
    def start(self) -> None: ...


def plan_of(*keys: int) -> Plan:
    return Plan(
        endpoints=("a", "b"),
        key_hashes=array("Q", keys),
        target_offsets=array("I", range(len(keys) + 1)),
        targets=array("I", [0] * len(keys)),
        rates_rps=array("f", [1.0] * len(keys)),
        key_check=hash_key(KEY_CHECK),
    )


async def until(true: Callable[[], Awaitable[bool] | bool], what: str, within_s: float = 40) -> None:
    """Wait until it is so; the store may be away meanwhile."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(CacheRouteError):
            result = true()
            if result if isinstance(result, bool) else await result:
                return
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def first_event(store: Store) -> bool:
    async with contextlib.aclosing(store.events()) as events:
        return await anext(events)


async def record(ledger: Ledger) -> None:
    await ledger.record((await ledger.lead("x", ttl_s=60)).value, "{}")


SERVICE_CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "read_head": lambda store: store.read_head(),
    "read_plan_bytes": lambda store: store.read_plan_bytes(1),
    "events": first_event,
    "add_rates": lambda store: store.add_rates(60, {7: 2}, instance="x", batch=1, ttl_s=60),
    "write_ack": lambda store: store.write_ack("x", version=1, epoch=1, error=""),
    "exchange_load": lambda store: store.exchange_load("x", {"10.0.0.1:80": (1, 9)}),
    "lease": lambda store: store.lease("x", Report(0, 0, 1, ()), cap=1, ttl_ms=1000),
    "forget_instance": lambda store: store.forget_instance("x"),
}
PLANNER_CALLS: dict[str, Callable[[Ledger], Awaitable[object]]] = {
    "lead": lambda ledger: ledger.lead("x", ttl_s=60),
    "record": record,
    "resign": lambda ledger: ledger.resign("x"),
    "read_cycles": lambda ledger: ledger.read_cycles(),
    "read_events": lambda ledger: ledger.read_events(),
    "freeze": lambda ledger: ledger.freeze(actor="x", reason="x", ttl_s=60),
    "read_freeze": lambda ledger: ledger.read_freeze(),
    "unfreeze": lambda ledger: ledger.unfreeze(actor="x", reason="x"),
    "read_head": lambda store: store.read_head(),
    "read_rates": lambda store: store.read_rates([60]),
    "read_window": lambda store: store.read_window(60),
    "read_revisions": lambda store: store.read_revisions([60]),
    "publish": lambda store: publish(store, 1),
    "read_plan_bytes": lambda store: store.read_plan_bytes(1),
    "read_acks": lambda store: store.read_acks(fleets=True),
    "read_log": lambda store: store.read_log(),
}
READER_CALLS = {
    name: call
    for name, call in PLANNER_CALLS.items()
    if name in ("read_head", "read_plan_bytes", "read_acks", "read_log", "read_cycles", "read_events", "read_freeze")
}


async def publish(store: Store, *keys: int) -> Plan:
    return await store.publish(plan_of(*keys), expected=await store.read_head(), actor="", reason="")


async def test_every_call_works(store_url: str, pool: str) -> None:
    """Published and read back, counted once, shared and heard of, whatever the mode."""
    store = Ledger(store_url, pool)
    async with contextlib.aclosing(store.events()) as events, asyncio.timeout(30):
        assert await anext(events)
        assert (await publish(store, 1)).version == 1
        while not await anext(events):
            pass
    assert (await publish(store, 1, 2)).version == 2
    assert (await store.read_head()).version == 2
    assert await store.read_plan_bytes(1)
    assert [p.version for p in await store.read_log()] == [2, 1]
    lease = await store.lead("x", ttl_s=60)
    await store.record(lease.value, '{"planner": "x"}')
    assert [r["planner"] for r in await store.read_cycles()] == ["x"]
    planned = await store.publish(
        plan_of(1), expected=await store.read_head(), actor="", reason="", lease=lease.value, record=lambda _: "{}"
    )
    assert (planned.version, len(await store.read_cycles())) == (3, 2)
    await store.resign("x")
    await store.freeze(actor="me", reason="why")
    assert (await store.read_freeze()) is not None
    assert await store.unfreeze(actor="me", reason="")
    assert [e.event for e in await store.read_events()] == ["unfreeze", "freeze"]
    for _ in range(2):
        await store.add_rates(60, {7: 2}, instance="x", batch=1, ttl_s=60)
    assert await store.read_rates([30, 60]) == {60: {7: 2}}
    assert await store.exchange_load("x", {"10.0.0.1:80": (1, 9)}) == {}
    assert await store.exchange_load("y", {}) == {"10.0.0.1:80": (1, 9)}
    await store.write_ack("x", version=2, epoch=1, error="")
    assert [a.instance for a in await store.read_acks(fleets=True)] == ["x"]
    await store.forget_instance("x")
    assert await store.read_acks() == []
    await store.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Sentinels that watch a master and a replica; one test kills the master, and comes last."""
    with Watched(tmp_path_factory.mktemp("watched")).running() as watched:
        yield watched


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Cluster of three masters, with a replica of the one that has the pool `moving`; one test kills that, last."""
    with Cluster(tmp_path_factory.mktemp("cluster"), f"{{cacheroute:{MOVING}}}").running() as cluster:
        yield cluster


MOVING = "moving"


@pytest.fixture(params=["server", "user", "database", "tls", "mutual-tls", "sentinel", "cluster"])
async def store_url(request: pytest.FixtureRequest, valkey: Server, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a real server in one mode."""
    at = f"127.0.0.1:{valkey.port}"
    match request.param:
        case "server":
            yield valkey.url
        case "user":
            with redis.Redis(port=valkey.port) as admin:
                admin.acl_setuser("someone", enabled=True, passwords=[f"+{PASSWORD}"], keys="*", channels="*")
                admin.execute_command("ACL", "SETUSER", "someone", "+@all")
            yield f"redis://someone:{ENCODED}@{at}/0"
        case "database":
            yield f"redis://{at}/5"
        case "tls" | "mutual-tls":
            authority = Authority(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*authority.issue("redis"))
            query = f"ssl_ca_certs={authority.certificate}"
            if request.param == "mutual-tls":
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(authority.certificate)
                certificate, key = authority.issue("service", "DNS:service")
                query += f"&ssl_certfile={certificate}&ssl_keyfile={key}"
            async with tls_in_front(valkey.port, context) as port:
                yield f"rediss://127.0.0.1:{port}/0?{query}"
        case mode:
            yield request.getfixturevalue({"sentinel": "watched", "cluster": "cluster"}[mode]).url


async def test_a_server_that_proves_nothing_is_not_used(valkey: Server, pool: str, tmp_path: Path) -> None:
    """An unknown authority, a certificate for somebody else, no client certificate and plain text all end the call."""
    (tmp_path / "own").mkdir()
    (tmp_path / "foreign").mkdir()
    authority, foreign = Authority(tmp_path / "own"), Authority(tmp_path / "foreign")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("redis", "DNS:elsewhere.example"))
    strict = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    strict.load_cert_chain(*authority.issue("strict"))
    strict.verify_mode = ssl.CERT_REQUIRED
    strict.load_verify_locations(authority.certificate)
    async with tls_in_front(valkey.port, context) as port, tls_in_front(valkey.port, strict) as strict_port:
        trusting = f"127.0.0.1:{port}/0?ssl_ca_certs={authority.certificate}"
        for url in (
            f"rediss://127.0.0.1:{port}/0",
            f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={foreign.certificate}",
            f"rediss://{trusting}",
            f"rediss://127.0.0.1:{strict_port}/0?ssl_ca_certs={authority.certificate}",
            f"redis://127.0.0.1:{port}/0",
            f"rediss://127.0.0.1:{valkey.port}/0",
        ):
            store = Store(url, pool)
            with pytest.raises(StoreUnavailable):
                await store.read_head()
            await store.close()
        store = Store(f"rediss://{trusting}&ssl_check_hostname=false", pool)
        assert await store.read_head() == Head()
        await store.close()


def documented_users(pool: str) -> list[str]:
    """Return the rules of docs/redis.md for this pool."""
    rules = re.findall(r"^ACL SETUSER .*$", DOCUMENT.read_text(), re.M)
    assert len(rules) == 3
    return [rule.replace("PASSWORD", PASSWORD).replace("POOL", pool) for rule in rules]


async def test_the_documented_rights_suffice_and_are_needed(own_valkey: Server, pool: str) -> None:
    """With the documented users every call of service, planner and reader works, and no user does more."""
    public = {name for name in dir(Ledger) if not name.startswith("_")} - {"close"}
    assert public == SERVICE_CALLS.keys() | PLANNER_CALLS.keys(), "whoever adds a call adds its rights to docs/redis.md"
    with redis.Redis(port=own_valkey.port) as admin:
        for rule in documented_users(pool):
            admin.execute_command(*rule.split())
        admin.execute_command("ACL", "SETUSER", "default", "off")
    calls = {"service": SERVICE_CALLS, "planner": PLANNER_CALLS, "reader": READER_CALLS}
    where = f"{ENCODED}@127.0.0.1:{own_valkey.port}/0"
    stores = {user: Ledger(f"redis://cacheroute-{user}:{where}", pool) for user in calls}
    await stores["service"].write_ack("other", version=1, epoch=1, error="")
    await publish(stores["planner"], 1)
    await publish(stores["planner"], 1)
    for user, those in calls.items():
        for name, call in those.items():
            try:
                await call(stores[user])
            except StoreUnavailable as exc:
                pytest.fail(f"{user} may not {name}: {exc}")
    for user, call in (
        ("service", PLANNER_CALLS["publish"]),
        ("planner", SERVICE_CALLS["add_rates"]),
        ("planner", SERVICE_CALLS["exchange_load"]),
        ("service", PLANNER_CALLS["lead"]),
        ("service", PLANNER_CALLS["freeze"]),
        ("reader", PLANNER_CALLS["publish"]),
        ("reader", PLANNER_CALLS["freeze"]),
        ("reader", SERVICE_CALLS["write_ack"]),
    ):
        with pytest.raises(StoreUnavailable, match="NoPermission"):
            await call(stores[user])
    client: Any = stores["service"]._redis
    for key in ("head", "plan:1"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.hset(f"{{cacheroute:{pool}}}:{key}", "version", 9)
    for store in stores.values():
        await store.close()


async def test_a_wrong_password_is_one_error_without_it(own_valkey: Server, pool: str) -> None:
    """A user that is unknown, and a server that wants none, are told by name of the error; no secret is in it."""
    with redis.Redis(port=own_valkey.port) as admin:
        admin.config_set("requirepass", "something")
    for user in ("nobody:hunter2@", ":hunter2@", ""):
        store = Store(f"redis://{user}127.0.0.1:{own_valkey.port}/0", pool)
        with pytest.raises(StoreUnavailable, match="Authentication") as caught:
            await store.read_head()
        assert "hunter2" not in str(caught.value)
        await store.close()


async def test_a_server_that_forgot_the_scripts_is_sent_them(own_valkey: Server, pool: str) -> None:
    """Scripts are called by digest; one that is unknown after a restart or failover goes over again, unnoticed."""
    store = Store(own_valkey.url, pool)
    with redis.Redis(port=own_valkey.port) as admin:
        for batch in (1, 2):
            admin.script_flush()
            await publish(store, batch)
            await store.add_rates(60, {7: 1}, instance="x", batch=batch, ttl_s=60)
        admin.config_resetstat()
        await publish(store, 9)
        assert "cmdstat_eval" not in admin.info("commandstats"), "a known script is not sent again"
    assert await store.read_rates([60]) == {60: {7: 2}}
    await store.close()


class Rig:
    """The tasks of one service, which hear of plans by events alone: the poll comes once an hour."""

    def __init__(self, url: str, pool: str) -> None:
        self.settings = load_settings(
            {},
            endpoint=("a=10.0.0.1:80", "b=10.0.0.2:80"),
            pool=pool,
            plan_poll_s=3600,
            rate_flush_s=0.05,
            load_exchange_s=0.05,
            instance="x",
        )
        self.fleet = Fleet((("a", "10.0.0.1:80"), ("b", "10.0.0.2:80")))
        # As the service does: batches of a restarted process of one name go on above those of the one before.
        self.current, self.rates = Current(), Rates(30, 3600, first_batch=int(time.time() * 1000))
        self.telemetry = Telemetry(CollectorRegistry())
        self.store, self.other = Store(url, pool), Store(url, pool)
        self.feed = Feed(self.store, self.settings, self.fleet, self.current, self.rates, self.telemetry)

    def failures(self, call: str) -> float:
        return self.telemetry.registry.get_sample_value("cacheroute_store_failures_total", {"call": call}) or 0.0

    def count(self, key: int) -> int:
        """Count one request; return its window."""
        now = time.time()
        self.rates.count(key, now)
        return int(now) // 30 * 30

    async def has_planned(self, *keys: int) -> None:
        """Publish, as often as it takes, and wait for the service to serve it."""

        async def published() -> bool:
            return bool(await publish(self.other, *keys))

        await until(published, "nothing can be published")
        await until(lambda: set(self.current.table.targets) == set(keys), f"the plan of {keys} never arrived")

    async def shares_load(self) -> None:
        """Wait until it sees what another process has in flight."""

        async def seen() -> bool:
            await self.other.exchange_load("other", {"10.0.0.2:80": (3, 30)})
            return self.fleet.by_name["b"].work_elsewhere == 30

        await until(seen, "load is not shared")


@contextlib.asynccontextmanager
async def following(url: str, pool: str) -> AsyncIterator[Rig]:
    rig = Rig(url, pool)
    task = asyncio.create_task(rig.feed.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.store.close()
        await rig.other.close()


async def survives(url: str, pool: str, replica: redis.Redis, disaster: Callable[[], object]) -> None:
    """Publish, count and share before and after a disaster; counts of the time between arrive once."""
    async with following(url, pool) as rig:
        await rig.has_planned(1)
        first = rig.count(7)
        await rig.shares_load()
        # Replication is asynchronous: what a master takes with it into death is lost, and none of our business here.
        prefix = f"{{cacheroute:{pool}}}:"
        await until(lambda: bool(replica.hexists(f"{prefix}head", "version")), "the head is not replicated")
        await until(lambda: bool(replica.hexists(f"{prefix}rates:{first}", f"{7:016x}")), "no count is replicated")
        disaster()
        await until(lambda: rig.failures("load") > 0, "nobody noticed")
        assert set(rig.current.table.targets) == {1}, "the last table stays"
        second = rig.count(8)
        await rig.has_planned(1, 2)
        await rig.shares_load()
        await rig.has_planned(1, 2, 3)

        async def arrived() -> bool:
            found = await rig.other.read_rates(sorted({first, second}))
            return [sum(counts.get(key, 0) for counts in found.values()) for key in (7, 8)] == [1, 1]

        await until(arrived, "a count is lost or doubled")


async def test_a_slot_that_moves_is_followed(cluster: Cluster) -> None:
    """While the pool's slot moves to another master, and after it, every call goes to who has it."""
    source, target = (redis.Redis(port=cluster.ports[i]) for i in (cluster.owner, (cluster.owner + 1) % 3))
    ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (source, target)]
    async with following(cluster.url, MOVING) as rig:
        await rig.has_planned(1)
        slot = source.execute_command("CLUSTER", "KEYSLOT", f"{{cacheroute:{MOVING}}}:head")
        for new, old in ((1, 0), (0, 1)):  # there and back, since another test needs it where it was
            clients = (source, target)
            clients[new].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
            clients[old].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
            port = clients[new].connection_pool.connection_kwargs["port"]

            def moved(old: int = old, port: int = port, clients: Any = clients) -> bool:
                keys = clients[old].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
                if keys:
                    clients[old].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "REPLACE", "KEYS", *keys)
                return not keys

            await until(moved, "the keys do not move")
            for client in clients:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
            await rig.has_planned(1, 2 + new)
            await rig.shares_load()
            window = rig.count(9)

            async def arrived(window: int = window) -> bool:
                return 9 in (await rig.other.read_rates([window])).get(window, {})

            await until(arrived, "counts do not arrive")
    source.close()
    target.close()


async def test_a_master_of_a_cluster_dies(cluster: Cluster) -> None:
    """When the master of the pool's slot dies, its replica takes over, and so does everything of ours."""
    with redis.Redis(port=cluster.ports[3]) as replica:
        replica.execute_command("READONLY")
        await survives(cluster.url, MOVING, replica, cluster.nodes[cluster.owner].kill)


async def test_sentinels_name_another_master(watched: Watched, pool: str) -> None:
    """When the master dies, Sentinels make the replica master, and everything of ours goes on there."""
    with redis.Redis(port=watched.replica_port) as replica:
        await survives(watched.url, pool, replica, watched.master.kill)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("rest", ["://me:pw@h:1/0", "+sentinel://me:pw@h:1/m", "+cluster://me:pw@h:1"])
async def test_every_mode_waits_briefly(scheme: str, rest: str, pool: str) -> None:
    """In each mode, with TLS and without, every connection has our timeouts, users and wire format, and one retry."""
    for query, timeout_s in (("", 0.5), ("?socket_timeout=2", 2.0)):
        store = Store(f"{scheme}{rest}{query}", pool)
        client: Any = store._redis
        if "cluster" in rest:
            nodes = list(client.nodes_manager.startup_nodes.values())
            connections = [node.connection_class(**node.connection_kwargs) for node in nodes]
            assert client.retry.get_retries() == 1
        else:
            connections = [client.connection_pool.make_connection()]
            assert connections[0].retry.get_retries() == 1
        if "sentinel" in rest:
            sentinels = client.connection_pool.sentinel_manager.sentinels
            watchers = [sentinel.connection_pool.make_connection() for sentinel in sentinels]
            assert [watcher.username for watcher in watchers] == [None]
        else:
            watchers = []
        assert [(c.username, c.password) for c in connections] == [("me", "pw")]
        for connection in (*connections, *watchers):
            assert (connection.socket_timeout, connection.socket_connect_timeout) == (timeout_s, timeout_s)
            assert int(connection.protocol) == 2
            assert isinstance(connection, SSLConnection) == (scheme == "rediss")
        await store.close()


def test_no_password_is_in_a_log(pool: str) -> None:
    """The first line of a service with the settings in force, and the lines about Redis, show a URL without secrets."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    url = "redis+sentinel://me:hunter2@127.0.0.1:1/m?sentinel_username=me&sentinel_password=hunter3"
    serve = [sys.executable, "-m", "planner.cli", "serve", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]
    process = subprocess.Popen(
        [*serve, "--endpoint=a=127.0.0.1:1", "--pool", pool],
        env={**clean, "CACHEROUTE_REDIS_URL": url, "CACHEROUTE_DRAIN_NOTICE_S": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while "store unavailable" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "it ended"
    finally:
        process.terminate()
        lines.append(process.communicate(timeout=30)[1])
    assert any("redis+sentinel://127.0.0.1:1/m" in line for line in lines)
    assert not any("hunter" in line for line in lines)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_wrong_url_ends_the_start(workers: str) -> None:
    """`serve` says in one line what is wrong with the URL, without it, and exits with 2, workers or not."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    serve = [sys.executable, "-m", "planner.cli", "serve", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]
    done = subprocess.run(
        [*serve, "--endpoint=a=127.0.0.1:1", "--redis=redis://:hunter2@h?db=x"],
        env={**clean, "CACHEROUTE_WORKERS": workers},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert done.stderr.startswith(
        "cacheroute: the Redis URL (--redis, CACHEROUTE_REDIS_URL) cannot be used: the database"
    )
    assert (done.stderr.count("\n"), "hunter" in done.stderr) == (1, False)
