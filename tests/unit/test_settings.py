"""Rules of the settings: all faults at once, unknown names refused, units and formats checked."""

from pathlib import Path

import pytest

from planner.settings import PlannerSettings
from service.errors import InvalidInput
from service.settings import ServiceSettings, load_settings, parse_endpoints, split_address


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


@pytest.mark.parametrize("bad", ["", "host", "host:", ":80", "h:99999", "h:-1", "h:8x"])
def test_bad_addresses(bad: str) -> None:
    """An address is HOST:PORT with a port of 0 to 65535."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(bad)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (("10.0.0.1:80",), "NAME=IP:PORT"),
        (("=10.0.0.1:80",), "NAME=IP:PORT"),
        (("a=host:80",), "not an IP"),
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
