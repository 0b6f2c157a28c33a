"""Rules of the settings: all faults at once, unknown names refused, units and formats checked."""

from pathlib import Path

import pytest

from planner.settings import PlannerSettings
from planner.settings import load_settings as load_planner_settings
from service.errors import InvalidInput
from service.settings import SERVICE_LINK, ServiceSettings, load_settings, parse_endpoints, split_address


def test_command_line_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value given as an option replaces the variable's; what is not given stays."""
    monkeypatch.setenv("CACHEROUTE_POOL", "blue")
    monkeypatch.setenv("CACHEROUTE_ENDPOINT", "a=10.0.0.1:8000, b=10.0.0.2:8000")
    settings = load_settings({"CACHEROUTE_POOL": "blue"}, pool="green", listen=None)
    assert settings.pool == "green"
    assert settings.endpoint == ("a=10.0.0.1:8000", "b=10.0.0.2:8000")
    assert settings.listen == "0.0.0.0:9002"


def test_unknown_name_is_refused_and_other_rooms_are_not() -> None:
    """A misspelt variable is an error that lists the right ones; variables of other rooms pass."""
    with pytest.raises(InvalidInput, match=r"CACHEROUTE_REDIS_ULR.*CACHEROUTE_REDIS_URL"):
        load_settings({"CACHEROUTE_REDIS_ULR": "x"})
    others = {"CACHEROUTE_PLANNER_SLOTS": "3", "CACHEROUTE_TRACES": "/x", "PATH": "/bin"}
    load_settings(others, endpoint=("a=10.0.0.1:80",))


# What kubelet puts into pods for the Services cacheroute, cacheroute-planner and cacheroute-http.
SERVICE_LINKS = {
    f"CACHEROUTE_{service}{name}": "tcp://10.96.0.7:9002"
    for service in ("", "PLANNER_", "HTTP_")
    for name in (
        *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "SERVICE_PORT_HTTP_METRICS", "PORT", "PORT_9002_TCP"),
        *("PORT_9002_TCP_PROTO", "PORT_9002_TCP_PORT", "PORT_9002_TCP_ADDR", "PORT_53_UDP", "PORT_53_SCTP_ADDR"),
    )
}


def test_variables_of_kubernetes_services_are_nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service may be called as we are: what every pod is told of it changes nothing, in service and planner."""
    planner = {"redis_url": "redis://h", "endpoint": ("a",), "slots_per_endpoint": 1, "replica_cap_rps": 1}
    before = load_settings({}, endpoint=("a=10.0.0.1:80",), instance="i")
    planner_before = load_planner_settings({}, name="n", **planner)
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    assert load_settings(SERVICE_LINKS, endpoint=("a=10.0.0.1:80",), instance="i") == before
    assert load_planner_settings(SERVICE_LINKS, name="n", **planner) == planner_before
    for misspelt in ("CACHEROUTE_HTTP_PROT", "CACHEROUTE_PORTS", "CACHEROUTE_SERVICE", "CACHEROUTE_PORT_GRPC_TCP"):
        with pytest.raises(InvalidInput, match=misspelt):
            load_settings({misspelt: "1"}, endpoint=("a=10.0.0.1:80",))


def test_no_setting_looks_like_a_variable_of_a_kubernetes_service() -> None:
    """Else a misspelling of it, or the setting itself, would be taken for one."""
    settings = (*ServiceSettings.model_fields, *PlannerSettings.model_fields)
    assert [name for name in settings if SERVICE_LINK.fullmatch(name.upper())] == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"state_dir": "/x"}, "STATE_DIR keeps plans.*REDIS_URL"),
        ({"fair_weight": ("acme=3",)}, "FAIR_WEIGHT divides CACHEROUTE_FLEET_INFLIGHT_MAX"),
        ({"dns_server": "10.0.0.1:53"}, "DNS_SERVER is named"),
        ({"dns_server": "10.0.0.1:53", "endpoint": None, "discover": "k8s:ns/svc"}, "DNS_SERVER is named"),
        ({"rate_window_s": 3600, "rate_keep_s": 7199}, "RATE_KEEP_S = 7199 is less than two windows of 3600"),
        ({"discover_interval_s": 0.001}, "DISCOVER_INTERVAL_S"),
        ({"probe_path": "health"}, "PROBE_PATH"),
        ({"probe_path": ""}, "PROBE_PATH"),
        ({"probe_path": "/a b"}, "PROBE_PATH"),
    ],
)
def test_settings_that_do_nothing_or_cannot_work_are_refused(given: dict[str, object], why: str) -> None:
    """What is set and has no effect beside the others, or breaks only when it is used, is told at the start."""
    with pytest.raises(InvalidInput, match=why) as caught:
        load_settings({}, **{"endpoint": ("a=10.0.0.1:80",), **given})
    assert "acme" not in str(caught.value)


def test_settings_that_belong_together_are_taken() -> None:
    """The same settings beside those that they need."""
    given = {"redis_url": "redis://h", "state_dir": "/x", "fair_weight": ("acme=3",), "fleet_inflight_max": 9}
    load_settings({}, discover="dns:h:80", dns_server="10.0.0.1:53", rate_window_s=60, rate_keep_s=120, **given)


def test_keys_of_tenants_stand_in_no_error() -> None:
    """A weight that is none is told by its place; what stands there may be a secret."""
    with pytest.raises(InvalidInput, match=r"FAIR_WEIGHT = …: number 2 ") as caught:
        load_settings({}, endpoint=("a=10.0.0.1:80",), fair_weight=("b=1", "acme corp=x"))
    assert "acme" not in str(caught.value)


def test_an_empty_pool_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Service and planner take an empty name as the commands do that look at a pool."""
    monkeypatch.setenv("CACHEROUTE_POOL", "")
    assert load_settings({}, endpoint=("a=10.0.0.1:80",)).pool == "default"
    planner = {"redis_url": "redis://h", "endpoint": ("a",), "slots_per_endpoint": 1, "replica_cap_rps": 1}
    assert load_planner_settings({}, **planner).pool == "default"


def test_a_service_without_endpoints_is_refused() -> None:
    """Nothing to pick from is a mistake to tell at the start, not at each request."""
    with pytest.raises(InvalidInput, match=r"no endpoint.*--endpoint NAME=IP:PORT"):
        load_settings({})


@pytest.mark.parametrize("name", ["probe_interval_s", "load_exchange_s", "drain_s", "plan_poll_s", "rate_flush_s"])
def test_endless_times_are_refused(name: str) -> None:
    """A period without end is the same as switching the part off by accident."""
    with pytest.raises(InvalidInput, match=name.upper()):
        load_settings({}, endpoint=("a=10.0.0.1:80",), **{name: float("inf")})


def test_a_short_salt_is_refused_and_not_shown() -> None:
    """A salt that can be guessed is none; the message does not repeat it."""
    with pytest.raises(InvalidInput, match="16 bytes") as caught:
        load_settings({}, endpoint=("a=10.0.0.1:80",), key_salt="hunter2")
    assert "hunter2" not in str(caught.value)


def test_every_fault_is_listed_at_once() -> None:
    """One start shows all that is wrong, each with its option, its variable and its value."""
    with pytest.raises(InvalidInput) as caught:
        load_settings({}, listen="nope", probe_interval_s=0, pool="a b", endpoint=("x=1.2.3.4",))
    text = str(caught.value)
    for part in ("--listen (CACHEROUTE_LISTEN) = 'nope'", "CACHEROUTE_PROBE_INTERVAL_S", "'a b'", "1.2.3.4"):
        assert part in text


@pytest.mark.parametrize(
    "bad",
    ["", "host", "host:", ":80", "h:99999", "h:-1", "h:8x", "h:²", "h:" + "0" * 5000, "::1:80", "[::1:80", "::1]:80"],
)
def test_bad_addresses(bad: str) -> None:
    """An address is HOST:PORT with a port of 0 to 65535, an IPv6 one in brackets."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(bad)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (("10.0.0.1:80",), "NAME=IP:PORT"),
        (("=10.0.0.1:80",), "NAME=IP:PORT"),
        (("a=host:80",), "not an IP"),
        (("a=[fe80::1%eth0]:80",), "not an IP"),
        (("a=::1:80",), "HOST:PORT"),
        (("a=10.0.0.1:0",), "port 0"),
        (("a=10.0.0.1:8000", "b=10.0.0.1:08000"), "address 10.0.0.1:8000 stands twice"),
        (("a=[fd00::1]:80", "b=[fd00:0::0:1]:80"), r"address \[fd00::1\]:80 stands twice"),
        (("a=10.0.0.1:80", "a=10.0.0.2:80"), "name a stands twice"),
        (("a=10.0.0.1:80", "b=10.0.0.1:80"), "address 10.0.0.1:80 stands twice"),
    ],
)
def test_bad_endpoints(bad: tuple[str, ...], why: str) -> None:
    """Endpoints have distinct names and distinct IP addresses."""
    with pytest.raises(ValueError, match=why):
        parse_endpoints(bad)


def test_ipv6() -> None:
    """An IPv6 address stands in brackets, as Envoy writes it."""
    assert split_address("[::1]:80") == ("::1", 80)
    assert parse_endpoints(("a=[fd00::1]:8000",)) == (("a", "[fd00::1]:8000"),)


def test_addresses_are_as_envoy_writes_them() -> None:
    """Envoy reports addresses in its own form, and compares text; what is in force is shown so too."""
    given = ("a=10.0.0.1:08000", "b=[FD00:0:0::0:1]:80", "c=[::ffff:10.0.0.1]:80")
    expected = (("a", "10.0.0.1:8000"), ("b", "[fd00::1]:80"), ("c", "[::ffff:10.0.0.1]:80"))
    assert parse_endpoints(given) == expected
    assert load_settings({}, endpoint=given).endpoint == tuple(f"{name}={address}" for name, address in expected)


def test_every_setting_is_documented() -> None:
    """docs/settings.md names each variable of the service and of the planner with its default."""
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for name, field in ServiceSettings.model_fields.items():
        assert f"| `CACHEROUTE_{name.upper()}` |" in text, name
        if isinstance(field.default, int | float) and field.default:
            row = next(line for line in text.splitlines() if f"`CACHEROUTE_{name.upper()}`" in line)
            assert f"{field.default:g}" in row or f"{field.default}" in row, row
    for name in PlannerSettings.model_fields:
        assert f"`CACHEROUTE_PLANNER_{name.upper()}`" in text or f"`CACHEROUTE_{name.upper()}`" in text, name


@pytest.mark.parametrize("name", ["key_inflight_max", "fleet_inflight_max"])
def test_limits_fit_into_the_rows_that_processes_exchange(name: str) -> None:
    """A limit beyond what a lease's row can hold is refused at the start instead of failing every exchange."""
    with pytest.raises(InvalidInput, match=name.upper()):
        load_settings({}, endpoint=("a=10.0.0.1:80",), **{name: 2**31 + 1})
