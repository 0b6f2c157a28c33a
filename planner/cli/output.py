"""What commands share: how an answer is printed, and the options that name a pool.

1. `-o json` and `-o yaml` print one document on standard output and nothing else; words for people go to standard
   error.
2. `-o table` is for people: lines and colours on a terminal, plain aligned columns when piped.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import InvalidInput

if TYPE_CHECKING:
    from service.ledger import Ledger


class Format(StrEnum):
    """How to print an answer."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to print the answer.")]
RedisOption = Annotated[
    str | None, typer.Option("--redis", metavar="URL", envvar="CACHEROUTE_REDIS_URL", help="Where plans are kept.")
]
PoolOption = Annotated[
    str | None, typer.Option("--pool", metavar="NAME", envvar="CACHEROUTE_POOL", help="Which pool.  [default]")
]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows as people read them; numbers are cut to what a person compares."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


def pairs(document: Mapping[str, object]) -> Table:
    """Return a document as one row for each of its plain fields; nested mappings are written out by dots."""
    return Table(("field", "value"), list(_flat(document)))


def emit(document: object, fmt: Format, *tables: Table) -> None:
    """Print `document` as JSON or YAML, or `tables` in its place, on standard output."""
    if fmt is Format.JSON:
        print(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))
    elif fmt is Format.YAML:
        try:
            import yaml
        except ModuleNotFoundError:
            raise InvalidInput("-o yaml needs PyYAML", "pip install 'cacheroute[planner]', or use -o json") from None
        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), end="")
    elif sys.stdout.isatty():
        _print_rich(tables)
    else:
        print("\n\n".join(_plain(table) for table in tables))


def open_store(redis: str | None, pool: str | None) -> "Ledger":
    """Return the pool's data; raise InvalidInput when no Redis is named, or it cannot be one."""
    from service.ledger import Ledger

    if not redis:
        raise InvalidInput("no Redis is named", "give --redis redis://host:port/db or set CACHEROUTE_REDIS_URL")
    return Ledger(redis, pool or "default")


def note(words: str) -> None:
    """Say something to a person, on standard error."""
    typer.echo(words, err=True)


def _flat(document: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)


def _plain(table: Table) -> str:
    cells = [[str(name) for name in table.columns], *([_text(v) for v in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([table.title, *lines] if table.title else lines)


def _print_rich(tables: Sequence[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        drawn = RichTable(*table.columns, title=table.title or None, title_justify="left")
        for row in table.rows:
            drawn.add_row(*(Text(_text(value)) for value in row))
        console.print(drawn)
