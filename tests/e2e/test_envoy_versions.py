"""How the matrix gets its Envoys: a folder that is there is used, nothing half is left, and CI leaves out nothing."""

from pathlib import Path

import pytest

from tests.e2e import envoy_versions
from tests.e2e.envoy_versions import envoy_of

VERSION = "1.37.0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine that reaches no package index and has no Envoy in its environment."""
    folder = tmp_path / "cache"
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("CACHEROUTE_ENVOY_CACHE", str(folder))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(envoy_versions, "_of_environment", lambda: None)
    return folder


def test_wheel_that_cannot_be_had_leaves_out_its_version(cache: Path) -> None:
    """Offline the tests of a version are skipped by name, and what an interrupted run left is neither used nor kept."""
    half = cache / f"envoy-{VERSION}.part" / "envoy" / "_bin"
    half.mkdir(parents=True)
    (half / "envoy").touch(mode=0o755)
    with pytest.raises(pytest.skip.Exception, match=rf"Envoy {VERSION}.*cannot be had: "):
        envoy_of(VERSION)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_ci_leaves_out_no_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI=true a version that cannot be had is a failure."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=rf"Envoy {VERSION}.*cannot be had: "):
        envoy_of(VERSION)


def test_folder_that_is_there_needs_no_index(cache: Path) -> None:
    """What an earlier run installed is used as it is."""
    program = cache / f"envoy-{VERSION}" / "envoy" / "_bin" / "envoy"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert envoy_of(VERSION) == program
