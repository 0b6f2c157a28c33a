"""`cacheroute engine` on several servers of which some fail: what was changed, what was not, and what is not known."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.contract.wakman_servers import Engine, constant, patched, run

AWAY = "http://127.0.0.1:1"
ORDER = ("--reason", "scans", "--actor", "mira")


@contextmanager
def dropping() -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads what it is asked, and hangs up; yields its URL and what it read."""
    read: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                # All of the order: what is left unread would make a reset of the end.
                asked = b""
                while not asked.endswith(b"}") and (more := connection.recv(65536)):
                    asked += more
                read.append(asked)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", read
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """Return the rows of the first table by server and engine."""
    lines = table.partition("\n\n")[0].splitlines()[1:]
    return {(line.split()[0], line.split()[1]): line.split()[2:] for line in lines}


def test_one_server_of_two_is_away() -> None:
    """What the other says is printed all the same, the first has a row of unknowns, and the exit code is the worst."""
    with patched(Engine()) as url:
        done = run("status", "--url", AWAY, "--url", url, "-o", "json", exit_code=5)
        away, there = json.loads(done.stdout)["servers"]
        assert away["error"] == "cannot be reached (Connection refused)"
        assert there["engines"][0]["policy"] == "lru"
        found = rows(run("status", "--url", AWAY, "--url", url, exit_code=5).stdout)
        assert found[AWAY, "-"][0] == "unknown"
        assert found[url, "0"][:2] == ["yes", "lru"]
        assert run("status", "--url", AWAY, exit_code=5).stdout == ""


def test_an_order_that_one_server_misses() -> None:
    """Those that can be reached obey; the others are named, with what to repeat; nothing is taken back; exit code 5."""
    one, two = Engine(), Engine()
    with patched(one) as first, patched(two) as second:
        urls = ("--url", first, "--url", AWAY, "--url", second)
        done = run("policy", "s3fifo", *urls, *ORDER, exit_code=5)
        assert [engine.orders for engine in (one, two)] == [[("s3fifo", "mira", "scans")]] * 2
        found = rows(done.stdout)
        assert [found[key][0] for key in ((first, "0"), (AWAY, "-"), (second, "0"))] == ["yes", "no", "yes"]
        assert found[first, "0"][1:4] == ["lru", "s3fifo", "s3fifo"]
        *faults, summary = done.stderr.splitlines()
        assert faults == [f"{AWAY}: cannot be reached (Connection refused)"]
        assert summary.startswith("obeyed: 2 yes, 1 no.")
        assert summary.endswith(f"give the same order again with --url {AWAY}")
        document = json.loads(run("policy", "s3fifo", *urls, *ORDER, "-o", "json", exit_code=5).stdout)
        assert [(server["url"], server["obeyed"]) for server in document["servers"]] == [
            (first, True),
            (AWAY, False),
            (second, True),
        ]
        assert one.told["policy"] == "s3fifo"


def test_an_order_that_one_engine_refuses() -> None:
    """One engine of a server is not attached: its neighbour and the other server have obeyed; exit code 3."""
    left = Engine(attached=False, reason="a KV connector is on", policy=None, mode="off", shadow=None)
    with patched(Engine(), left) as mixed, patched(Engine()) as whole:
        done = run("policy", "arc", "--url", mixed, "--url", whole, *ORDER, exit_code=3)
        found = rows(done.stdout)
        assert [found[key][0] for key in ((mixed, "0"), (mixed, "1"), (whole, "0"))] == ["yes", "no", "yes"]
        assert "not attached: a KV connector is on" in " ".join(found[mixed, "1"])
        assert done.stderr.splitlines()[-1].startswith("obeyed: 2 yes, 1 no.")
        assert done.stderr.splitlines()[-1].endswith(f"with --url {mixed}")


def test_refused_and_away_is_the_worse_of_both() -> None:
    """A wrong key (3) and a server that is away (5): 5, and the one that obeyed has obeyed."""
    good = Engine()
    with patched(good, key="k") as url, patched(Engine(), key="other") as locked:
        done = run("policy", "arc", "--url", url, "--url", locked, "--url", AWAY, *ORDER, "--api-key", "k", exit_code=5)
        assert good.orders == [("arc", "mira", "scans")]
        assert "refuses the key" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("obeyed: 1 yes, 2 no.")
        found = rows(done.stdout)
        assert (found[locked, "-"][0], found[AWAY, "-"][0]) == ("no", "no")


def test_an_answer_that_is_lost_is_not_a_no() -> None:
    """A server that took the order and hung up may have obeyed: `unknown`, null in JSON, and how to find out."""
    with patched(Engine()) as url, dropping() as (lost, read):
        done = run("policy", "arc", "--url", url, "--url", lost, *ORDER, exit_code=5)
        assert b'"arc"' in b"".join(read)
        assert rows(done.stdout)[lost, "-"][0] == "unknown"
        assert done.stderr.splitlines()[-1].startswith("obeyed: 1 yes, 1 unknown; unknown: it may have been obeyed")
        document = json.loads(run("policy", "arc", "--url", lost, *ORDER, "-o", "json", exit_code=5).stdout)
        assert document["servers"][0]["obeyed"] is None


@pytest.mark.parametrize(
    ("code", "page", "word", "exit_code"),
    [
        (404, b"{}", "no", 3),
        (502, b"<html>", "unknown", 5),
        (503, b'{"error": "engine 0 did not answer within 10 s; it may obey yet"}', "unknown", 5),
        (400, b'{"error": "unknown policy", "policies": []}', "no", 3),
    ],
)
def test_what_an_answer_says_of_the_order(code: int, page: bytes, word: str, exit_code: int) -> None:
    """Who refuses has not obeyed; who failed in between may have."""
    with patched(Engine()) as url, constant(code, page) as other:
        done = run("policy", "arc", "--url", other, "--url", url, *ORDER, exit_code=exit_code)
        assert rows(done.stdout)[other, "-"][0] == word
        assert rows(done.stdout)[url, "0"][0] == "yes"


def test_one_silent_engine_of_two() -> None:
    """503 with what the others did: `yes` for them, `unknown` for it, in orders and in `status`, and said once."""
    silent = {"engine": 1, "silent": True, "error": "engine 1 did not answer within 10 s"}
    answers: Mapping[str, dict[str, object]] = {
        "policy": {"engine": 0, "ok": True, "from": "lru", "to": "arc", "mode": "arc", "error": None},
        "status": {"engine": 0, "attached": True, "policy": "lru", "mode": "lru"},
    }
    for command, there in answers.items():
        page = json.dumps({"error": silent["error"], "engines": [there, silent]}).encode()
        with constant(503, page) as url:
            order = ("arc", *ORDER) if command == "policy" else ()
            done = run(command, *order, "--url", url, exit_code=5)
            found = rows(done.stdout)
            assert (found[url, "0"][0], found[url, "1"][0]) == ("yes", "unknown")
            assert done.stderr.count("did not answer") == 1
            if command == "policy":
                document = json.loads(run(command, *order, "--url", url, "-o", "json", exit_code=5).stdout)
                assert document["servers"][0]["obeyed"] is None
