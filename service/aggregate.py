"""Makes one answer of the answers of several workers, for the HTTP port that they share.

1. /metrics: every series of every worker, told apart by a label `worker`; each family is described once.
2. /fleet: in flight is the sum; an endpoint is ready when all workers say so, draining or warming when one does.
3. /table: the oldest that a worker serves, and each worker's own.
A worker that did not answer is left out, and seen in `cacheroute_worker_up` and in /healthz.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

LABEL = "worker"
# What ends a text in the OpenMetrics format.
EOF = b"# EOF\n"
# Names hold no space, so these find the end of a sample's name, whatever its labels hold; a line is a line of the text.
_LABELLED = re.compile(rb"^([^#\s{]+)\{", re.MULTILINE)
_PLAIN = re.compile(rb"^([^#\s{]+) ", re.MULTILINE)
# A family is its description, its other comments, its samples.
_FAMILY = re.compile(rb"^# HELP ", re.MULTILINE)
_HEAD = re.compile(rb"(?P<name>\S+) [^\n]*\n(?:# (?:TYPE|UNIT) [^\n]*\n)*")

# address -> (requests in flight, work in bytes)
Load = dict[str, tuple[int, int]]


def together_metrics(own: bytes, texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the text of several texts; all in one format of Prometheus, and as prometheus_client writes it.

    own: families of ours, as they are.  texts: (what the label says, text).  The label is put in by text: to parse and
    write again takes seconds of CPU where this takes tenths (16 workers, 400 endpoints).
    """
    families: dict[bytes, tuple[bytes, list[bytes]]] = {}
    _gather(families, own)
    for worker, text in texts:
        label = b'%s="%s"' % (LABEL.encode(), worker.encode())
        labelled = _LABELLED.sub(rb"\1{" + label + b",", text)
        _gather(families, _PLAIN.sub(rb"\1{" + label + b"} ", labelled))
    parts = [part for head, samples in families.values() for part in (head, *samples)]
    return b"".join((*parts, EOF if own.endswith(EOF) else b""))


def _gather(families: dict[bytes, tuple[bytes, list[bytes]]], text: bytes) -> None:
    """Add a text's samples to those of each family; the first that has a family describes it."""
    for block in _FAMILY.split(text.removesuffix(EOF))[1:]:
        found = _HEAD.match(block)
        assert found is not None, "a family starts with its description"
        families.setdefault(found["name"], (b"# HELP " + found[0], []))[1].append(block[found.end() :])


def together_fleet(answers: Iterable[Mapping[str, Any]], *, others_known: bool) -> dict[str, Any]:
    """Return the /fleet of several; others_known: workers hear of other instances' load through Redis.

    A worker's `inflight_elsewhere` holds its siblings' requests too; what is left beyond them is the other instances'.
    """
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    everywhere: dict[tuple[str, str], list[int]] = {}
    for answer in answers:
        for endpoint in answer["endpoints"]:
            identity = endpoint["name"], endpoint["address"]
            everywhere.setdefault(identity, []).append(endpoint["inflight"] + endpoint["inflight_elsewhere"])
            kept = merged.setdefault(identity, {**endpoint, "inflight": 0})
            kept["inflight"] += endpoint["inflight"]
            kept["ready"] = kept["ready"] and endpoint["ready"]
            for fact in ("draining", "warming"):
                kept[fact] = kept[fact] or endpoint[fact]
    for identity, kept in merged.items():
        kept["inflight_elsewhere"] = max(0, min(everywhere[identity]) - kept["inflight"]) if others_known else 0
    return {"endpoints": list(merged.values())}


def together_table(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the oldest table of several, and each under `workers`; answers: by worker number, at least one."""
    oldest = min(answers.values(), key=lambda table: (table["epoch"], table["version"]))
    return {**oldest, "workers": [{LABEL: worker, **table} for worker, table in sorted(answers.items())]}


def load_of_others(loads: Mapping[int, Load], worker: int) -> Load:
    """Return the sum of all loads but one worker's own."""
    total: Load = {}
    for other, load in loads.items():
        if other != worker:
            for address, (requests, work) in load.items():
                before = total.get(address, (0, 0))
                total[address] = before[0] + requests, before[1] + work
    return total
