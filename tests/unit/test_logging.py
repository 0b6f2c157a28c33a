"""What is logged of a fault."""

import json

import pytest
import structlog

from service.telemetry import configure_logging


def test_a_trace_has_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """A logged exception says where it came from, and nothing of what the variables held: keys and secrets do."""
    configure_logging("info")
    try:
        secret = "".join(("key-", "of-a-tenant"))
        try:
            raise ValueError(len(secret))
        except ValueError:
            structlog.get_logger().exception("broken")
    finally:
        structlog.reset_defaults()
    line = capsys.readouterr().err
    assert secret not in line
    assert json.loads(line)["exception"][0]["frames"][0]["name"] == "test_a_trace_has_no_variables"


def test_every_line_is_json_for_every_reader(capsys: pytest.CaptureFixture[str]) -> None:
    """Infinity, which a setting may be, is no JSON: it is written as text, wherever it stands."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    configure_logging("info")
    try:
        structlog.get_logger().info("x", spill=float("inf"), nested={"a": [float("nan"), 1.5]}, pair=(1, float("-inf")))
    finally:
        structlog.reset_defaults()
    line = json.loads(capsys.readouterr().err, parse_constant=refuse)
    assert (line["spill"], line["nested"], line["pair"]) == ("inf", {"a": ["nan", 1.5]}, [1, "-inf"])
