"""Draws the pictures of docs/planner.md from the claims' own functions (some minutes; needs matplotlib)."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from planner.admission import Rules
from planner.build import build
from planner.diff import diff
from planner.sticky import Limits
from tests.claims.churn import HELD_OUT, WALKS, replans
from tests.claims.noise import WARM, Estimator, History, default_for, mean_of
from tests.claims.workloads import Walk, lognormal

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEDS = range(100, 106)
COLOURS = {"lpt": "#9aa0a6", "sticky": "#1a73e8"}


def churn_and_imbalance() -> None:
    """Keys changed at a replan, and max / mean after it, beside fresh LPT."""
    walks = WALKS | HELD_OUT
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for row, (_name, walk) in enumerate(walks.items()):
        for method, offset in (("lpt", 0.18), ("sticky", -0.18)):
            found = [r for seed in SEEDS for r in replans(walk, seed, method)]  # type: ignore[arg-type]
            for axis, values in (
                (left, [r.keys * 100 for r in found]),
                (right, [r.max_over_mean for r in found]),
            ):
                axis.plot([min(values), max(values)], [row + offset] * 2, color=COLOURS[method], lw=2, alpha=0.5)
                label = {"lpt": "fresh LPT", "sticky": "sticky"}[method] if not row else None
                axis.plot(statistics.fmean(values), row + offset, "o", color=COLOURS[method], label=label)
    left.set_yticks(range(len(walks)), list(walks))
    left.set_xlabel("keys changed at a replan, % (mean, range)")
    left.axvline(10, color="#d93025", lw=0.8, ls=":")
    right.set_xlabel("max / mean load after it")
    left.legend(loc="upper center")
    for axis in (left, right):
        axis.invert_yaxis() if axis is left else None
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle("Replanning under drift, six seeds that were not tuned on, six intervals each")
    _save(figure, "planner-churn.png")


def membership() -> None:
    """A lost endpoint, and one that joins."""
    rates = next(Walk(lognormal, 512).rates(100, 0))
    names = tuple(f"endpoint-{i}" for i in range(32))
    rules = Rules(slots_per_endpoint=512, replica_cap_rps=4.0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    for method in ("lpt", "sticky"):
        changed = []
        for lost in (1, 2, 3, 5):
            before = build(rates, names[:30], rules=rules, key_check=0).plan
            after = build(rates, names[lost:30], rules=rules, key_check=0, previous=before, method=method)  # type: ignore[arg-type]
            changed.append(diff(before, after.plan).keys_changed_fraction * 100)
        label = {"lpt": "fresh LPT", "sticky": "sticky"}[method]
        left.plot([1, 2, 3, 5], changed, "o-", color=COLOURS[method], label=label)
    left.plot([1, 2, 3, 5], [n / 30 * 100 for n in (1, 2, 3, 5)], "k:", lw=1, label="what was there")
    left.set_xlabel("endpoints lost of 30")
    left.set_ylabel("keys changed, %")
    left.legend()
    plan, shares = build(rates, names[:30], rules=rules, key_check=0).plan, []
    # No more slots than before, so that all that comes to the new endpoint has to move there.
    same = Rules(slots_per_endpoint=512 * 30 // 31, replica_cap_rps=4.0)
    for _ in range(7):
        made = build(rates, names[:31], rules=same, key_check=0, previous=plan, limits=Limits())
        loads = made.shape.loads_rps
        shares.append((loads[30] / statistics.fmean(loads), diff(plan, made.plan).keys_changed_fraction * 100))
        plan = made.plan
    right.plot(
        range(1, 8), [s for s, _ in shares], "o-", color=COLOURS["sticky"], label="load of the new endpoint / mean"
    )
    right.plot(range(1, 8), [c / 100 for _, c in shares], "s--", color="#e37400", label="keys changed (share of 1)")
    right.set_xlabel("cycles after a 31st endpoint joined")
    right.set_ylim(0, 1.1)
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    _save(figure, "planner-membership.png")


def noise() -> None:
    """Turnover of admission without any drift, by how rates are averaged."""
    figure, axis = plt.subplots(figsize=(8, 3.6))
    history = History.of(0, 2 * WARM + 1)
    found: dict[str, dict[int, float]] = {}
    for name, how, bonus in (
        ("mean of 300 s", mean_of(1), 0.0),
        ("mean of 900 s", mean_of(3), 0.0),
        ("mean of 3600 s", mean_of(12), 0.0),
        ("by requests", Estimator(half_life=250_000.0), 0.0),
        ("by requests, bonus 0.25", default_for(512), 0.25),
    ):
        estimates = list(history.estimates(how))
        found[name] = {
            w: statistics.fmean(r.turnover for r in history.replans(estimates, w, bonus)) * 100 for w in (128, 512)
        }
    names = list(found)
    for offset, w in ((-0.18, 128), (0.18, 512)):
        values = [found[name][w] for name in names]
        axis.bar([i + offset for i in range(len(names))], values, 0.36, label=f"W = {w}")
    axis.set_xticks(range(len(names)), names, rotation=12)
    axis.set_ylabel("admitted keys replaced a plan, %")
    axis.legend()
    axis.grid(axis="y", alpha=0.3)
    _save(figure, "planner-noise.png")


def _save(figure: "plt.Figure", name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / name, dpi=110)
    print(f"wrote {DOCS / name}")


def main() -> None:
    """Draw all."""
    membership()
    noise()
    churn_and_imbalance()


if __name__ == "__main__":
    main()
