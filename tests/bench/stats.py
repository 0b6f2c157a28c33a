"""What every benchmark prints: the machine, and min/median/max of repeated figures; and a process's CPU time."""

import os
import platform
import statistics
import time
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


def cpu_s(pid: int) -> float:
    """Return the CPU time, user and system, of all threads of a process so far, children not included.

    Linux's process clock has nanoseconds where `/proc/<pid>/stat` counts in hundredths of a second; its id is the
    complement of the process id, shifted, and 2 for the scheduler's own count (clock_getcpuclockid).
    """
    return time.clock_gettime(~pid << 3 | 2)
