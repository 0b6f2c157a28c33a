"""Draws the pictures of docs/engine-evaluation.md from kept runs of `cacheroute engine evaluate` (seconds; matplotlib).

`python -m tests.claims.engine_plots [FILE.jsonl]`; without a file, from the runs of record beside the documentation.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from replay.mixes import MIXES, Mix

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = DOCS / "engine-evaluation.jsonl"
COLOURS = {
    "lru": "#9aa0a6",
    "s3fifo": "#a142f4",
    "arc": "#34a853",
    "default": "#1a73e8",
    "paper": "#e37400",
}
NAMES = {"lru": "LRU", "s3fifo": "S3-FIFO", "arc": "ARC", "default": "WAKMan default", "paper": "WAKMan paper preset"}
Rates = Mapping[str, Mapping[str, float]]


def rates(path: Path) -> dict[str, dict[str, float]]:
    """Return mix -> run -> mean hit rate over the seeds, in percent; a preset's pool is left out of its name."""
    found: dict[str, dict[str, list[float]]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "hit" in line and json.loads(line["settings"])["manager"] == "own":
            name = line["name"].partition(":")[0]
            found.setdefault(line["mix"], {}).setdefault(name, []).append(100 * line["hit"])
    return {mix: {name: statistics.fmean(values) for name, values in runs.items()} for mix, runs in found.items()}


def triangle(found: Rates) -> None:
    """S3-FIFO less LRU, and the default preset less LRU, over the triangle of mixes; as the paper's Figure 1."""
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5))
    for axis, name in zip(axes, ("s3fifo", "default"), strict=True):
        shown = [(mix, found[str(mix)]) for mix in MIXES if {name, "lru"} <= set(found.get(str(mix), ()))]
        points = [_place(mix) for mix, _ in shown]
        values = [runs[name] - runs["lru"] for _, runs in shown]
        bound = max(1.0, *(abs(value) for value in values))
        dots = axis.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            c=values,
            cmap="PuOr",
            vmin=-bound,
            vmax=bound,
            s=780,
            marker="h",
            edgecolors="#5f6368",
            linewidths=0.5,
        )
        for (x, y), value in zip(points, values, strict=True):
            dark = abs(value) > 0.6 * bound
            axis.text(x, y, f"{value:+.1f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
        for mix, label, shift in (
            (Mix(1, 0, 0), "single-turn", -0.13),
            (Mix(0, 1, 0), "multi-turn", -0.13),
            (Mix(0, 0, 1), "agentic", 0.1),
        ):
            x, y = _place(mix)
            axis.text(x, y + shift, label, ha="center", va="center")
        axis.set_title(f"{NAMES[name]} - LRU, points of hit rate", fontsize=11)
        axis.set_aspect("equal")
        axis.set_xlim(-0.15, 1.15)
        axis.set_ylim(-0.2, 1.0)
        axis.axis("off")
        figure.colorbar(dots, ax=axis, shrink=0.7)
    _save(figure, "engine-triangle.png")


def curves(found: Rates) -> None:
    """The better static policy changes with one parameter; as the paper's Figure 3."""
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.9))
    for axis, (name, label) in zip(
        axes,
        (
            ("turns", "33/33/33: turns of a conversation, median"),
            ("input", "33/33/33: single-turn input, tokens"),
            ("gap", "0/50/50: gap between turns of a conversation, s"),
        ),
        strict=True,
    ):
        points = sorted(
            (float(mix.partition("=")[2]), runs) for mix, runs in found.items() if mix.startswith(f"{name}=")
        )
        for policy in ("lru", "s3fifo", "arc", "default"):
            line = [(x, runs[policy]) for x, runs in points if policy in runs]
            if line:
                axis.plot(*zip(*line, strict=True), "o-", color=COLOURS[policy], label=NAMES[policy], ms=4)
        if name != "turns":
            axis.set_xscale("log")
            axis.set_xticks([x for x, _ in points], [f"{x:g}" for x, _ in points])
            axis.minorticks_off()
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("hit rate, % of prompt tokens")
    axes[0].legend(fontsize=8)
    _save(figure, "engine-curves.png")


def drifts(found: Rates) -> None:
    """WAKMan and the static policies under traffic that changes, two hours each."""
    names = ("swap-60", "swap-30", "swap-15", "swap-7.5", "drift", "near-tie")
    shown = [name for name in names if name in found]
    figure, axis = plt.subplots(figsize=(9, 3.8))
    policies = [name for name in COLOURS if any(name in found[mix] for mix in shown)]
    width = 0.8 / max(1, len(policies))
    for place, policy in enumerate(policies):
        bars = [(x, found[mix][policy]) for x, mix in enumerate(shown) if policy in found[mix]]
        offset = (place - (len(policies) - 1) / 2) * width
        axis.bar([x + offset for x, _ in bars], [y for _, y in bars], width, color=COLOURS[policy], label=NAMES[policy])
    values = [rate for mix in shown for rate in found[mix].values()]
    axis.set_ylim(math.floor(min(values) - 2), math.ceil(max(values) + 1))
    axis.set_xticks(range(len(shown)), shown)
    axis.set_ylabel("hit rate, % of prompt tokens")
    axis.legend(fontsize=8, ncol=len(policies))
    axis.grid(axis="y", alpha=0.3)
    _save(figure, "engine-drift.png")


def _place(mix: Mix) -> tuple[float, float]:
    """Corners: single-turn left, multi-turn right, agentic on top."""
    return mix.multi + mix.agentic / 2, mix.agentic * math.sqrt(3) / 2


def _save(figure: "plt.Figure", name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / name, dpi=110)
    print(f"wrote {DOCS / name}")


def main(arguments: Sequence[str]) -> None:
    """Draw all that the runs are there for."""
    found = rates(Path(arguments[0]) if arguments else RECORD)
    triangle(found)
    if any("=" in mix for mix in found):
        curves(found)
    if any(mix.startswith("swap") for mix in found):
        drifts(found)


if __name__ == "__main__":
    main(sys.argv[1:])
