"""Writes the tables of docs/engine-evaluation.md from kept runs of `cacheroute engine evaluate` (a second).

`python -m tests.claims.engine_tables [FILE.jsonl …]`: the files' runs become the runs of record beside the document
(docs/engine-evaluation.jsonl); without a file those that are there are read again. What stands between the marks in
the document is replaced. The targets are those that the engine patch was built to; each is said to be met or missed.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from replay.evaluation import Settings, summarise
from replay.mixes import MIXES
from tests.claims.engine_plots import DOCS, RECORD

DRIFTS = ("swap-60", "swap-30", "swap-15", "swap-7.5", "drift", "near-tie")
POLICIES = ("lru", "s3fifo", "arc")
DOCUMENT = DOCS / "engine-evaluation.md"
BEGIN, END = "<!-- begin: python -m tests.claims.engine_tables -->", "<!-- end -->"
Lines = list[dict[str, Any]]


def read(paths: Iterable[Path]) -> Lines:
    """Return all runs, each once: the last of equal ones."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found[tuple(str(line[name]) for name in ("settings", "mix", "seed", "name"))] = line
    return [found[key] for key in sorted(found)]


def of(found: Lines, manager: str, blocks: int) -> Lines:
    """Return the runs on one block manager with pools of one size."""
    kept = []
    for line in found:
        settings = json.loads(line["settings"])
        if (settings["manager"], settings["blocks"], settings["reading"]) == (manager, blocks, "requests"):
            kept.append(line)
    return kept


def document(found: Lines, mixes: Iterable[str]) -> dict[str, Any]:
    """Return the evaluation of these mixes, in their order, as the command would print it."""
    settings = Settings(policies=POLICIES, presets=("default", "paper"))
    order = {mix: place for place, mix in enumerate(mixes)}
    lines = sorted((line for line in found if line["mix"] in order), key=lambda line: order[line["mix"]])
    result = summarise(lines, settings)
    result["mixes"].sort(key=lambda row: order[row["mix"]])
    return result


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line a mix."""
    text = [
        "| mix | seeds | LRU | S3-FIFO | ARC | WAKMan `paper` | WAKMan `default` | regret | recovered | switches |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        hit = row["hit"]
        cells = [
            row["mix"],
            str(len(row["seeds"])),
            *(_rate(hit.get(name), max(hit.values())) for name in (*POLICIES, "wakman-paper", "wakman")),
            f"{100 * row['regret']:.1f}" if "regret" in row else "",
            f"{100 * row['recovered']:.0f} %" if row.get("recovered") is not None else "",
            f"{row['switches']:g}" if "wakman" in hit else "",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return [*text, ""]


def targets(mixes: dict[str, Any], drifts: dict[str, Any]) -> list[str]:
    """Return what was to be reached and what was."""
    rows = [row for row in mixes["mixes"] if {"wakman", "wakman-paper", *POLICIES} <= set(row["hit"])]
    gain = {name: statistics.fmean(r["hit"][name] - r["hit"]["lru"] for r in rows) for name in rows[0]["hit"]}
    best = statistics.fmean(max(row["hit"][name] for name in POLICIES) - row["hit"]["lru"] for row in rows)
    recovered = [row["recovered"] for row in rows if row.get("recovered") is not None]
    half = statistics.median(recovered)
    better = sum(row["hit"]["wakman"] > row["hit"]["wakman-paper"] for row in rows)
    wins = sum(row["hit"]["s3fifo"] > row["hit"]["lru"] for row in rows)
    changing = [row for row in drifts["mixes"] if {"wakman", *POLICIES} <= set(row["hit"])]
    text = [f"| target ({len(rows)} mixes, {len(changing)} drifts) | measured | |", "|---|---|---|"]
    worst = min((row["over_worse"], row["mix"]) for row in changing) if changing else (0.0, "none run")
    pair = [100 * value for row in rows if (value := row["recovered_pair"]["wakman-paper"]) is not None]
    own = [100 * value for row in rows if (value := row["recovered_pair"]["wakman"]) is not None]
    for what, measured, met in (
        (
            "`default` recovers 90 % of the gap between LRU and S3-FIFO (median, gap above 1 point; the paper's count)",
            f"{statistics.median(own):.0f} % over {len(own)} mixes, {min(own):.0f} % at worst",
            statistics.median(own) >= 90,
        ),
        (
            "`default` recovers 90 % of the gap from LRU to the best of it, S3-FIFO, ARC (median, gap above 1 point)",
            f"{100 * half:.0f} % over {len(recovered)} mixes, {100 * min(recovered):.0f} % at worst",
            half >= 0.9,
        ),
        (
            "`default` is never more than 1 point under the worst of its pool, six drifts",
            f"{100 * worst[0]:+.1f} points at worst ({worst[1]})",
            worst[0] >= -0.01,
        ),
        (
            "`default` beats the paper's preset in mean gain over LRU",
            f"{_points(gain['wakman'])} against {_points(gain['wakman-paper'])}; on {better} of {len(rows)} mixes",
            gain["wakman"] > gain["wakman-paper"],
        ),
        (
            "with ARC in the pool the mean gain over LRU is 4 points",
            f"{_points(gain['wakman'])}; the best static policy of each mix, known beforehand: {_points(best)}",
            gain["wakman"] >= 0.04,
        ),
    ):
        complete = len(changing) == len(DRIFTS) if "drifts" in what else len(rows) == len(MIXES)
        verdict = ("met" if met else "**missed**") if complete else "not all are run yet"
        text.append(f"| {what} | {measured} | {verdict} |")
    text += [
        "",
        f"Mean gain over LRU: S3-FIFO {_points(gain['s3fifo'])}, ARC {_points(gain['arc'])}. Between LRU and S3-FIFO "
        f"alone, S3-FIFO wins {wins} of {len(rows)} mixes (the paper: 12 of 20); the paper's preset recovers a median "
        f"of {statistics.median(pair):.0f} % of their difference where it is above 1 point (the paper: 84 %).",
        "",
    ]
    return text


def managers(found: Lines) -> list[str]:
    """Return how our blocks differ from vLLM's on the same runs."""
    theirs, ours = (
        {(r["mix"], r["seed"], r["name"]): r for r in of(found, which, 16_000)} for which in ("vllm", "own")
    )
    both = [key for key in sorted(set(theirs) & set(ours)) if "hit" in theirs[key]]
    text = [
        "| run | mixes | largest difference in hit rate, points | runs in which the switches differ |",
        "|---|---|---|---|",
    ]
    for name in sorted({key[2] for key in both}):
        keys = [key for key in both if key[2] == name]
        most = max(abs(ours[key]["hit"] - theirs[key]["hit"]) for key in keys)
        other = sum(ours[key]["switches"] != theirs[key]["switches"] for key in keys)
        text.append(f"| {name} | {len({key[0] for key in keys})} | {100 * most:.4f} | {other} |")
    return [*text, ""]


def mooncake(found: Lines) -> list[str]:
    """Return the rates on the recorded trace, by pool size."""
    names = ("lru", "s3fifo", "s3fifo-25", "arc", "paper", "default:lru,s3fifo,arc")
    text = [
        "| blocks | LRU | S3-FIFO | S3-FIFO 25 % | ARC | WAKMan `paper` | WAKMan `default` | Belady | infinite |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for blocks in (4000, 8000, 16000):
        runs = {line["name"]: line for line in of(found, "vllm", blocks) if line["mix"].startswith("mooncake")}
        if runs:
            best = max(line["hit"] for line in runs.values() if "hit" in line)
            bounds = runs.get("bounds", {})
            cells = [_rate(runs[name]["hit"] if name in runs else None, best) for name in names]
            cells += [_rate(bounds.get(name), 2) for name in ("belady", "infinite")]
            text.append(f"| {blocks} | " + " | ".join(cells) + " |")
    return [*text, ""]


def curves(found: Lines) -> list[str]:
    """Return the points of the curves."""
    text = ["| traffic | LRU | S3-FIFO | WAKMan `default` | S3-FIFO - LRU |", "|---|---|---|---|---|"]
    points: dict[str, dict[str, float]] = {}
    for line in found:
        if "=" in line["mix"] and "hit" in line:
            points.setdefault(line["mix"], {})[line["name"].partition(":")[0]] = line["hit"]
    for mix, hit in sorted(points.items(), key=lambda item: (item[0].split("=")[0], float(item[0].split("=")[1]))):
        if {"lru", "s3fifo"} <= set(hit):
            rates = [_rate(hit.get(name), max(hit.values())) for name in ("lru", "s3fifo", "default")]
            text.append(f"| {mix} | " + " | ".join(rates) + f" | {100 * (hit['s3fifo'] - hit['lru']):+.1f} |")
    return [*text, ""]


def main(arguments: Sequence[str]) -> None:
    """Keep the runs, and write the tables."""
    found = read(map(Path, arguments) if arguments else [RECORD])
    RECORD.write_text("".join(json.dumps(line) + "\n" for line in found))
    own = of(found, "own", 16_000)
    mixes, drifts = document(own, map(str, MIXES)), document(own, DRIFTS)
    text = ["### Targets", "", *targets(mixes, drifts), "### Mixes", "", *table(mixes["mixes"])]
    text += ["### Traffic that changes", "", *table(drifts["mixes"]), "### One parameter at a time", "", *curves(own)]
    text += ["### A real trace", "", *mooncake(found), "### vLLM's block manager and ours", "", *managers(found)]
    whole = DOCUMENT.read_text()
    head, tail = whole[: whole.index(BEGIN) + len(BEGIN)], whole[whole.index(END) :]
    DOCUMENT.write_text(head + "\n\n" + "\n".join(text) + tail)
    print("\n".join(text))


def _points(gain: float) -> str:
    return f"{100 * gain:+.2f} points"


def _rate(rate: float | None, best: float) -> str:
    if rate is None:
        return ""
    return f"**{100 * rate:.1f}**" if rate == best else f"{100 * rate:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
