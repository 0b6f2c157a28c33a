"""engine_patch enters a process that is not ours: what its files import, and when, is held here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import engine_patch

FOLDER = Path(engine_patch.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
# Found in vLLM's environment; imported inside functions only.
LATE = {"vllm", "torch", "fastapi", "starlette", "prometheus_client", "opentelemetry"}
ALWAYS = {"numpy", "engine_patch"} | set(sys.stdlib_module_names)


def _imported(nodes: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_imports_numpy_and_the_standard_library_alone(file: Path) -> None:
    """At import time nothing but numpy and the standard library; what belongs to vLLM only inside functions."""
    tree = ast.parse(file.read_text())
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    inside = {
        id(node)
        for function in everywhere
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    assert _imported([node for node in everywhere if id(node) not in inside]) <= ALWAYS
    assert _imported(everywhere) <= ALWAYS | LATE


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_python_3_10(file: Path) -> None:
    """The syntax is that of the oldest Python that the supported vLLM versions run on."""
    ast.parse(file.read_text(), feature_version=(3, 10))


def test_everything_imports_where_only_numpy_is_installed() -> None:
    """A process that has nothing of ours but this package, and no vLLM, can import every file."""
    program = f"""
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "engine_patch"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nothing())
import importlib
for name in {[file.stem for file in FILES]!r}:
    importlib.import_module("engine_patch" if name == "__init__" else f"engine_patch.{{name}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=FOLDER.parent, timeout=60
    )
    assert done.returncode == 0, done.stderr
