"""How a server's URL is read as people paste it."""

import pytest

from planner.wakman_client import base_of
from service.errors import InvalidInput


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/wakman", "/v1/wakman/status", "/v1/wakman/policy/"])
@pytest.mark.parametrize("base", ["http://vllm-0:8000", "https://host/behind/a/path", "http://[::1]:8000"])
def test_what_follows_v1_is_left_out(base: str, path: str) -> None:
    """The base URL of the API and a route of ours name the same server; a path before them stays."""
    assert base_of(base + path) == base


def test_http_is_what_is_meant() -> None:
    """A host, with or without a port, is asked by HTTP; spaces around it are nobody's intention."""
    assert base_of(" vllm-0:8000 ") == "http://vllm-0:8000"
    assert base_of("vllm-0/v1") == "http://vllm-0"


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "http://", "http://host:99999", "http://host:0", "http://u:secret@host", "http://h?a", "a b", "::1"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    """One sentence with the remedy, and never a password."""
    with pytest.raises(InvalidInput, match="write it as http://host:8000") as caught:
        base_of(url)
    assert "secret" not in str(caught.value)
