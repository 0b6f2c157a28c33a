"""What every benchmark prints: the machine, and min/median/max of repeated figures."""

import os
import platform
import statistics
from collections.abc import Sequence


def machine() -> str:
    """Return one line about this machine."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `min / median / max`."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{low:.{digits}f} / {mid:.{digits}f} / {high:.{digits}f}"


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
