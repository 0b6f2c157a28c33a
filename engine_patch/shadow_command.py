"""How the shadow process is called: this interpreter, with this package and numpy, and nothing of vLLM's settings."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engine_patch.shadow_process import Options

# Appended, not put first: what the environment itself offers goes before. `-m` would need the engine's directory.
BOOT = (
    "import sys; sys.path.extend(sys.argv.pop(1).split('\\n')); "
    "from engine_patch.shadow_process import main; sys.exit(main())"
)


def command(options: Options) -> list[str]:
    """Return the process's command line; the package and numpy are found where this process has them."""
    roots = dict.fromkeys(str(Path(file).resolve().parents[1]) for file in (__file__, np.__file__))
    return [sys.executable, "-c", BOOT, "\n".join(roots), options.to_json()]


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the process's environment: none of vLLM's variables, and one thread for numpy."""
    kept = {name: value for name, value in ours.items() if not name.startswith(("VLLM_", "WAKMAN_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
