"""Tells a demonstration's result: a table, one sentence of verdict, what to know about the figures; and JSON."""

import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine_patch.settings import AUTO
from replay.verdict import PolicySummary, Verdict
from service.errors import InvalidInput
from service.files import write_whole

DASH = "–"
PICTURE_COLUMNS = 100
COLOURS = {"win": "green", "tie": "yellow", "lose": "red"}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the figures hold for. rate_rps: offered, per engine second; span_s: engine seconds from first to last send.

    replica_cap_rps: requests per engine second of one key above which the plan gives it another engine.

    lag_s: the latest that the generator sent a request, wall seconds.  tenants: keys that were overlaid.
    """

    trace: str
    seed: int
    engines: int
    requests: int
    tenants: int
    rate_rps: float
    span_s: float
    speed: float
    replica_cap_rps: float
    lag_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """An engine that changed its eviction policy, at_s engine seconds after its pass began, and its own reason."""

    engine: str
    at_s: float
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """What the third pass showed: the policy asked for, the verdict on it beside the second pass, who switched."""

    policy: str
    verdict: Verdict
    switches: tuple[Switch, ...]


def document(
    verdict: Verdict, policies: Sequence[PolicySummary], conditions: Conditions, eviction: Eviction | None = None
) -> dict[str, Any]:
    """Return the report as it is written by `--report`; figures are not rounded."""
    report = {
        "verdict": verdict.outcome,
        "reason": verdict.reason,
        "seed": conditions.seed,
        "trace": conditions.trace,
        "engines": conditions.engines,
        "requests": conditions.requests,
        "policies": [asdict(policy) for policy in policies],
    }
    if eviction is not None:
        report["eviction"] = {
            "policy": eviction.policy,
            "verdict": eviction.verdict.outcome,
            "reason": eviction.verdict.reason,
            "switches": [
                {"engine": s.engine, "at_s": s.at_s, "from": s.before, "to": s.after, "why": s.why}
                for s in eviction.switches
            ],
        }
    return report


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON, whole or not at all; raise InvalidInput when it cannot be written."""
    write_whole("--report", path, (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode())


def draw(
    path: Path,
    verdict: Verdict,
    policies: Sequence[PolicySummary],
    conditions: Conditions,
    eviction: Eviction | None = None,
) -> None:
    """Write what `show` prints as an SVG picture, whole or not at all; raise InvalidInput when it cannot be written."""
    console = Console(record=True, width=PICTURE_COLUMNS, file=io.StringIO(), force_terminal=True)
    show(verdict, policies, conditions, console, eviction)
    write_whole("--picture", path, console.export_svg(title="cacheroute demo").encode())


def check_writable(option: str, path: Path) -> None:
    """Raise InvalidInput when a file could not be written to `path`, before anything is measured for it."""
    if path.is_dir():
        raise InvalidInput(f"{option} {path} is a folder", "give the name of a file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} {path}: folder {path.parent} does not exist", "create it or give another path")
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"{option} {path} cannot be written", "give a file in a folder you may write")


def show(
    verdict: Verdict,
    policies: Sequence[PolicySummary],
    conditions: Conditions,
    console: Console,
    eviction: Eviction | None = None,
) -> None:
    """Print table, sentences and conditions."""
    table = Table(
        box=SIMPLE_HEAD if console.is_terminal else None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in ("policy", "hit rate", "TTFT p50", "TTFT p99", "max/mean", "planned", "plan", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy in policies:
        table.add_row(
            policy.policy,
            DASH if policy.token_hit_rate is None else f"{100 * policy.token_hit_rate:.1f} %",
            _seconds(policy.ttft_p50_s),
            _seconds(policy.ttft_p99_s),
            DASH if policy.max_over_mean is None else f"{policy.max_over_mean:.2f}",
            f"{100 * policy.planned_share:.0f} %",
            str(policy.plan_version or DASH),
            f"{policy.failed}/{policy.requests}",
        )
    console.print()
    console.print(table)
    console.print()
    for judged in (verdict, *(() if eviction is None else (eviction.verdict,))):
        said = f"[bold {COLOURS[judged.outcome]}]{judged.outcome.upper()}[/] {judged.reason}"
        console.print(said, highlight=False, soft_wrap=not console.is_terminal)
        console.print()
    if eviction is not None:
        for switch in eviction.switches or (None,):
            console.print(_switched(switch), markup=False, highlight=False, soft_wrap=not console.is_terminal)
        console.print()
    for note in notes(conditions, eviction):
        console.print(f"· {note}", highlight=False, style="dim", soft_wrap=not console.is_terminal)


def _switched(switch: Switch | None) -> str:
    if switch is None:
        return "No engine switched."
    return f"{switch.at_s:.0f} s  {switch.engine}: {switch.before} → {switch.after}. {switch.why}"


def _third_pass(policy: str) -> str:
    how = (
        "each engine of it chose by itself and began with LRU" if policy == AUTO else f"its engines evicted by {policy}"
    )
    return f"The third pass had the second one's requests, plan and empty caches; {how}."


def notes(conditions: Conditions, eviction: Eviction | None = None) -> tuple[str, ...]:
    """Return what a reader must know not to misread the figures, one sentence or two each."""
    c = conditions
    who = "Both policies" if eviction is None else "All passes"
    evicted = () if eviction is None else (_third_pass(eviction.policy),)
    return (
        f"{who} got the same {c.requests} requests of {c.trace} at the same times: {c.rate_rps:.2f} requests/s "
        f"over {c.span_s:.0f} engine seconds on {c.engines} simulated engines, caches emptied in between. Hit rate is "
        "that of prompt tokens, max/mean the busiest engine's requests over the mean.",
        f"Tenant keys are overlaid: the trace has none, so each of its conversations was given to one of {c.tenants} "
        "synthetic tenants by the steep head law.",
        "The plan was made from the rates that the service measured in the first pass, so it knows this traffic's "
        f"tenants, as a plan knows yesterday's. It gives a key one engine per {c.replica_cap_rps:.2f} requests/s; "
        "requests beyond the planned share found their engine with too much in flight and went to another.",
        *evicted,
        f"Latencies are engine seconds: the engines ran {c.speed:g}× faster than real time. The load generator was "
        f"{c.lag_s * 1000:.0f} ms late at most ({c.lag_s * c.speed:.2f} engine seconds).",
    )


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f} s"
