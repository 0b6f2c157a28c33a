"""What commands that ask vLLM servers with the engine patch share: which servers, the key, how answers are gathered.

1. Servers are asked at `/v1/wakman`, all at once; one that fails hides no other.
2. The worst exit code of all is the command's: 5 one cannot be reached or does not answer, 3 one refused (no such
   route, a wrong key, an unknown policy, an engine that is not attached).
3. Each fault is one line on standard error that begins with the server's URL. In the tables of several servers, one
   that said nothing has a row all the same.
"""

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from planner.cli.output import Format, Table, emit, note
from service.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.wakman_client import Answer

UrlOption = Annotated[
    list[str], typer.Option("--url", metavar="URL", envvar="CACHEROUTE_ENGINE_URLS", help="A server; may be repeated.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar="CACHEROUTE_ENGINE_API_KEY", help="The servers' --api-key."),
]


class Server(TypedDict):
    """What one server said. error: empty, or why it said nothing.  engines: its data-parallel engines."""

    url: str
    error: str
    engines: list[dict[str, Any]]


def ask_all(
    urls: "Sequence[str]", what: str, api_key: str | None, order: dict[str, str] | None = None
) -> "tuple[list[Server], list[Answer], int]":
    """Return what all servers say, in order, as documents and as answers, and the worst exit code.

    Faults go to standard error; InvalidInput when no server is named.
    """
    from concurrent.futures import ThreadPoolExecutor

    from planner.wakman_client import ask, base_of

    bases = list(dict.fromkeys(base_of(url) for listed in urls for url in listed.split(",") if url.strip()))
    if not bases:
        raise InvalidInput("--url names no server", "write it as http://host:8000")
    with ThreadPoolExecutor(min(32, len(bases))) as threads:
        answers = list(threads.map(lambda base: ask(base, what, api_key, order), bases))
    for base, answer in zip(bases, answers, strict=True):
        if answer.error:
            note(f"{base}: {answer.error}")
    servers = [
        Server(url=base, error=answer.error, engines=answer.engines)
        for base, answer in zip(bases, answers, strict=True)
    ]
    return servers, answers, max(answer.exit_code for answer in answers)


def show(document: object, output: Format, *tables: Table) -> None:
    """Print the document, or its tables; nothing, not even an empty line, where all that is to say are faults."""
    if tables or output is not Format.TABLE:
        emit(document, output, *tables)


def answered(engine: dict[str, Any], yes: object) -> str:
    """Return `yes` or `no` for a table; of an engine that did not answer nothing is known."""
    if not engine or engine.get("silent"):
        return "unknown"
    return "yes" if yes else "no"


def time_of(at: object) -> str | None:
    """Return unix seconds as people read them."""
    from datetime import UTC, datetime

    if not isinstance(at, int | float) or not at:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds")
