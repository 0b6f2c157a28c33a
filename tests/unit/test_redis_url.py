"""The setting that says where Redis is: every documented form is read, every other is refused, no secret is shown."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.connect import Link
from service.errors import InvalidInput
from service.redis_url import RedisTarget, parse_redis_url, without_password

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "expected", "shown"),
    [
        ("redis://h", {"hosts": (("h", 6379),)}, "redis://h:6379/0"),
        ("redis://h:1/3", {"hosts": (("h", 1),), "db": 3}, "redis://h:1/3"),
        ("REDIS://h:1?db=3", {"hosts": (("h", 1),), "db": 3}, "redis://h:1/3"),
        ("redis://[fd00::1]:7/0", {"hosts": (("fd00::1", 7),)}, "redis://[fd00::1]:7/0"),
        ("redis://[fd00::1]", {"hosts": (("fd00::1", 6379),)}, "redis://[fd00::1]:6379/0"),
        ("redis://:hunter2@h", {"password": SECRET, "username": None}, "redis://h:6379/0"),
        ("redis://me@h", {"username": "me", "password": None}, "redis://h:6379/0"),
        ("redis://a%40b:h%2Fu%3An%23t@h/0", {"username": "a@b", "password": "h/u:n#t"}, "redis://h:6379/0"),
        ("redis://h?username=me&password=hunt%26er", {"username": "me", "password": "hunt&er"}, "redis://h:6379/0"),
        ("redis://h?password=a+b%2B%20c&username=d+e", {"username": "d+e", "password": "a+b+ c"}, "redis://h:6379/0"),
        ("redis://me@h?password=hunter2", {"username": "me", "password": SECRET}, "redis://h:6379/0"),
        ("redis://[fe80::1%25eth0]:7", {"hosts": (("fe80::1%eth0", 7),)}, "redis://[fe80::1%25eth0]:7/0"),
        ("redis://h?socket_timeout=2.5", {"timeout_s": 2.5}, "redis://h:6379/0"),
        ("rediss://h:1", {"tls": {}}, "rediss://h:1/0"),
        (
            "rediss://h:1?ssl_cert_reqs=none",
            {"tls": {"ssl_cert_reqs": "none", "ssl_check_hostname": False}},
            "rediss://h:1/0",
        ),
        ("unix:///run/redis.sock?db=2", {"socket": "/run/redis.sock", "db": 2}, "unix:///run/redis.sock"),
        (
            "redis+sentinel://me:hunter2@a:1,b,[::1]:3/my-master?db=2&sentinel_username=s&sentinel_password=hunter2",
            {
                "mode": "sentinel",
                "hosts": (("a", 1), ("b", 26379), ("::1", 3)),
                "master": "my-master",
                "db": 2,
                "sentinel_username": "s",
                "sentinel_password": SECRET,
            },
            "redis+sentinel://a:1,b:26379,[::1]:3/my-master",
        ),
        ("rediss+sentinel://a/m", {"mode": "sentinel", "tls": {}}, "rediss+sentinel://a:26379/m"),
        (
            "redis+cluster://:hunter2@a:1,b:2",
            {"mode": "cluster", "hosts": (("a", 1), ("b", 2)), "password": SECRET},
            "redis+cluster://a:1,b:2",
        ),
        ("rediss+cluster://a:1/0", {"mode": "cluster", "tls": {}}, "rediss+cluster://a:1"),
    ],
)
def test_every_documented_form_is_read(url: str, expected: dict[str, object], shown: str) -> None:
    """Hosts, users, databases, masters and options arrive decoded; what is shown has none of the secrets."""
    target = parse_redis_url(url)
    assert {name: getattr(target, name) for name in expected} == expected
    assert target.shown() == without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:6379", "does not start with"),
        ("http://h", "does not start with"),
        ("hunter2", "does not start with"),
        ("redis://", "a host is missing"),
        ("redis://:hunter2@", "a host is missing"),
        ("redis://:hunt?er2@h", "no URL"),
        ("redis://:hunt?er2=@h", "other names"),
        ("redis://:hunt#er2@h", "it has a #"),
        ("redis://:hunter2/x@h:6379/0", "port"),
        ("redis://user:12/hunter2@h", "database"),
        ("redis://hunter2 @h", "blanks"),
        ("redis://h:0", "port"),
        ("redis://h:hunter2", "port"),
        ("redis://h:70000", "port"),
        ("redis://[::1:7", "an IPv6 host is written"),
        ("redis://[hunter2]:7", "no IPv6 address"),
        ("redis://h%00unter2", "a host is missing"),
        ("redis://h:٣", "port"),
        ("redis://h/" + "9" * 5000, "database"),
        ("redis://h/0?db=5", "both after the host"),
        ("redis://u:hunter2@h?password=b", "both before the host"),
        ("redis://u:hunter2@h?username=z", "both before the host"),
        ("redis://h?db=1&db=2", "stands twice"),
        ("redis://h?password=hunter2&password=hunter2", "stands twice"),
        ("redis://h?socket_timeout=1e-9", "socket_timeout"),
        ("redis://h?socket_timeout=nan", "socket_timeout"),
        ("rediss://h?ssl_ca_certs=", "ssl_ca_certs is empty"),
        ("redis://::1:7", "host"),
        ("redis://h/hunter2", "database"),
        ("redis://h?db=-1", "database"),
        ("redis://a,b", "several hosts"),
        ("redis://h?hunter2=1", "other names"),
        ("redis://h?hunter2", "no URL"),
        ("redis://h?socket_timeout=0", "socket_timeout"),
        ("redis://h?socket_timeout=60", "socket_timeout"),
        ("redis://h?sentinel_password=hunter2", "belong to redis\\+sentinel"),
        ("redis://h?ssl_ca_certs=/x", "need rediss"),
        ("rediss://h?ssl_cert_reqs=hunter2", "ssl_cert_reqs is"),
        ("rediss://h?ssl_check_hostname=hunter2", "ssl_check_hostname is"),
        ("rediss://h?ssl_keyfile=/x", "needs ssl_certfile"),
        ("rediss://h?ssl_ciphers=hunter2", "ssl_ciphers"),
        ("unix://h/x", "followed by the path"),
        ("unix+sentinel:///x", "does not start with"),
        ("redis+raft://h", "sentinel or cluster"),
        ("redis+sentinel://a,b", "master's name"),
        ("redis+sentinel://a,b/hunter2@c", "master's name"),
        ("redis+sentinel://a,,b/m", "a host is missing"),
        ("redis+cluster://a/1", "database 0"),
        ("redis+cluster://a?db=1", "database 0"),
    ],
)
def test_anything_else_is_refused_and_not_repeated(url: str, why: str) -> None:
    """A URL that cannot be used says what is wrong and what is right, exit code 2, and shows nothing of itself."""
    with pytest.raises(InvalidInput, match=why) as caught:
        parse_redis_url(url)
    said = str(caught.value)
    assert "--redis" in said
    assert "redis+sentinel://host:port" in said
    assert "hunt" not in said
    assert caught.value.__cause__ is None
    assert "hunt" not in without_password(url)


def test_files_are_looked_at_when_the_url_is_read(tmp_path: Path) -> None:
    """A certificate that is missing or none is told at the start, by its parameter and path."""
    none, garbage = tmp_path / "none.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for parameter in ("ssl_ca_certs", "ssl_certfile"):
        for path in (none, garbage):
            with pytest.raises(InvalidInput, match=f"{parameter} {path}"):
                parse_redis_url(f"rediss://h?{parameter}={path}")


@pytest.mark.parametrize("query", ["", "?ssl_cert_reqs=none"])
def test_a_server_that_is_not_verified_is_told_once(query: str) -> None:
    """TLS that keeps nobody from posing as Redis is a warning with the remedy, and shows no secret."""
    with capture_logs() as lines:
        Link(f"rediss://:{SECRET}@h:1{query}")
    assert [(line["log_level"], line["redis"]) for line in lines] == [("warning", "rediss://h:1/0")] * bool(query)
    assert all("ssl_ca_certs" in line["remedy"] for line in lines)
    assert SECRET not in str(lines)


def test_what_the_client_says_is_scrubbed() -> None:
    """Passwords that a server or the client repeats do not pass; those of Sentinels neither."""
    target = RedisTarget("sentinel", "redis", (("h", 1),), password=SECRET, sentinel_password="other")
    assert target.scrub("ERR AUTH hunter2 or other") == "ERR AUTH … or …"
    assert RedisTarget("server", "redis", (("h", 1),)).scrub("text") == "text"
