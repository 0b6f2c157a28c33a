"""Makes one answer of the answers of several workers, for the HTTP port that they share.

1. /metrics: every series of every worker, told apart by a label `worker`; each family is described once.
2. /fleet: in flight is the sum; an endpoint is ready when all workers say so, draining or warming when one does.
3. /table: the oldest that a worker serves, and each worker's own.
A worker that did not answer is left out, and seen in `cacheroute_worker_up` and in /healthz.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "worker"

# address -> (requests in flight, work in bytes)
Load = dict[str, tuple[int, int]]


class Together(Collector):
    """The series of several texts as one registry would have them."""

    def __init__(self, texts: Mapping[int, str], own: Iterable[Metric] = ()) -> None:
        """texts: worker number -> what its /metrics said, in the plain text format.  own: families of ours."""
        self._texts, self._own = texts, own

    def collect(self) -> Iterable[Metric]:
        """Return one family a name, those of the first worker first."""
        families: dict[str, Metric] = {}
        for worker, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    kept.samples.append(sample._replace(labels={**sample.labels, LABEL: str(worker)}))
        return [*self._own, *families.values()]


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
