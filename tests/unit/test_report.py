"""What the demonstration refuses, shows and writes."""

import io
import json
import math
import stat
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from replay.demo import DemoSettings, check, planned_share
from replay.live import Places, Row, Snapshot, Watch, line, panel
from replay.player import Progress
from replay.report import Conditions, Eviction, Switch, document, notes, show, write
from replay.verdict import PolicySummary, Verdict
from service.errors import InvalidInput

FLAT = PolicySummary("flat-lb", 10, 0, 0.05, 1.5, 9.25, 1.1, 0.0, 0)
ROUTED = PolicySummary("cacheroute", 10, 1, None, None, None, None, 0.8, 3)
VERDICT = Verdict("lose", "CacheRoute lost: of no account.", ())
CONDITIONS = Conditions("t.jsonl", 7, 6, 10, 64, 3.0, 480.0, 12.0, 0.49, 0.02)


SWITCH = Switch("engine-2", 121.4, "lru", "s3fifo", "Switch from lru to s3fifo [because].")
EVICTION = Eviction("auto", Verdict("tie", "Eviction by auto tied: of no account.", ()), (SWITCH,))


def _shown(width: int = 80, eviction: Eviction | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(VERDICT, (FLAT, ROUTED), CONDITIONS, console, eviction)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_document_is_the_published_one(tmp_path: Path) -> None:
    """The report has exactly the documented fields, and is one JSON document on disk, readable by others."""
    path = tmp_path / "report.json"
    write(path, document(VERDICT, (FLAT, ROUTED), CONDITIONS))
    report = json.loads(path.read_text())
    assert list(report) == ["verdict", "reason", "seed", "trace", "engines", "requests", "policies"]
    assert report["policies"][0] == {
        "policy": "flat-lb",
        "requests": 10,
        "failed": 0,
        "token_hit_rate": 0.05,
        "ttft_p50_s": 1.5,
        "ttft_p99_s": 9.25,
        "max_over_mean": 1.1,
        "planned_share": 0.0,
        "plan_version": 0,
    }
    assert report["policies"][1]["ttft_p99_s"] is None
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A failed write is a clear refusal and leaves no temporary file behind."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(InvalidInput, match="cannot be written"):
        write(tmp_path / "taken", {})
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_table_fits_eighty_columns() -> None:
    """Piped into a narrow file, no policy name and no figure is cut."""
    rows = [row.split() for row in _shown().splitlines() if row.startswith(("flat-lb", "cacheroute"))]
    assert rows == [
        ["flat-lb", "5.0", "%", "1.50", "s", "9.25", "s", "1.10", "0", "%", "–", "0/10"],
        ["cacheroute", "–", "–", "–", "–", "80", "%", "3", "1/10"],
    ]


def test_conditions_are_said() -> None:
    """Whoever reads the table is told that keys are overlaid, where rates come from and what a second is."""
    text = _shown() + " ".join(notes(CONDITIONS))
    for words in ("Tenant keys are overlaid", "measured in the first pass", "engine seconds", "LOSE"):
        assert words in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DemoSettings(engines=0), "--engines 0"),
        (DemoSettings(speed=0.0), "--speed 0"),
        (DemoSettings(speed=math.nan), "--speed nan"),
        (DemoSettings(duration_s=-1.0), "--duration -1"),
        (DemoSettings(rate_rps=math.inf), "--rate inf"),
        (DemoSettings(eviction="mru"), "--eviction 'mru' is none of auto, lru"),
        (DemoSettings(mix="100/0/0", trace=Path("t.jsonl")), "--mix and --trace"),
        (DemoSettings(mix="100/0"), "--mix '100/0' is no mix"),
        (DemoSettings(kv_blocks=0), "--kv-blocks 0"),
        (DemoSettings(report=Path("/")), "--report / is a folder"),
        (DemoSettings(report=Path("/absent/report.json")), "folder /absent does not exist"),
    ],
)
def test_option_out_of_range_is_refused(settings: DemoSettings, message: str) -> None:
    """An option that makes no sense is named before anything is started."""
    with pytest.raises(InvalidInput) as caught:
        check(settings)
    assert message in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    """Two faulty options are both named."""
    with pytest.raises(InvalidInput, match=r"--engines 0 .*--speed -2"):
        check(DemoSettings(engines=0, speed=-2.0))


def test_planned_share() -> None:
    """The planned share is that of all picks, 0 when there were none."""
    assert planned_share({'reason="planned"': 3.0, 'reason="spill"': 1.0}) == 0.75
    assert planned_share({}) == 0.0


def test_live_view_survives_parts_that_do_not_answer() -> None:
    """Whatever did not answer is a dash, in the panel and in the line."""
    nothing = Snapshot((Row("engine-0", None, None, None, None, None, 0),), None, None)
    console = Console(file=io.StringIO(), width=100)
    console.print(panel("flat-lb", Progress(), nothing, 1.0))
    assert isinstance(console.file, io.StringIO)
    assert "engine-0 │     – │" in console.file.getvalue()
    assert line("flat-lb", Progress(total=4), nothing) == (
        "flat-lb: 0/4 done, – in flight, 0 failed, hit rate –, plan –"
    )


def test_a_third_pass_adds_to_the_report() -> None:
    """A pass with another eviction policy adds one field, its verdict and each switch, and changes nothing else."""
    plain, more = document(VERDICT, (FLAT, ROUTED), CONDITIONS), document(VERDICT, (FLAT,), CONDITIONS, EVICTION)
    assert list(more) == [*plain, "eviction"]
    assert more["eviction"] == {
        "policy": "auto",
        "verdict": "tie",
        "reason": "Eviction by auto tied: of no account.",
        "switches": [
            {
                "engine": "engine-2",
                "at_s": 121.4,
                "from": "lru",
                "to": "s3fifo",
                "why": "Switch from lru to s3fifo [because].",
            }
        ],
    }
    text = _shown(eviction=EVICTION)
    assert "121 s  engine-2: lru → s3fifo. Switch from lru to s3fifo [because]." in text
    assert "TIE Eviction by auto tied" in text
    assert "All passes got the same" in text
    assert "chose by itself and began with LRU" in text
    assert "No engine switched." in _shown(eviction=Eviction("auto", VERDICT, ()))
    assert "third pass" not in _shown()


async def test_a_switch_is_told_once_with_its_reason() -> None:
    """The view shows which policy an engine runs, and says once, in the engine's own words, that it changed."""
    history: list[dict[str, str]] = []

    async def metrics(_: web.Request) -> web.Response:
        live = history[-1]["to"] if history else "lru"
        lines = [f'wakman_policy{{engine="0",policy="{p}"}} {float(p == live)}' for p in ("lru", "s3fifo", "arc")]
        counts = [f'wakman_switches_total{{from="{e["from"]}",to="{e["to"]}",cause="auto"}} 1.0' for e in history]
        return web.Response(text="\n".join([*lines, *counts, ""]))

    async def told(_: web.Request) -> web.Response:
        return web.json_response({"engines": [{"engine": 0, "history": history}]})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/v1/wakman/history", told)])
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        places = Places("http://127.0.0.1:1", {"engine-0": f"127.0.0.1:{server.port}"})
        eye = Watch(client, places, Progress())
        seen = [await eye.look()]
        history.append({"from": "lru", "to": "s3fifo", "why": "it is better"})
        seen.append(await eye.look())
        seen.append(await eye.look())
    assert [snapshot.rows[0].policy for snapshot in seen] == ["lru", "s3fifo", "s3fifo"]
    line_told = "engine-0 evicts by s3fifo now, not by lru: it is better"
    assert [snapshot.news for snapshot in seen] == [(), (line_told,), ()]
