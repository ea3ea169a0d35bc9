"""Import direction and the lightness of the package, read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "samir_vllm"

# A module may import only from layers below its own; modules of one layer don't know each other.
LAYERS = [
    {"errors", "timing", "interrupts"},
    {"config"},
    {"sampling"},
    {"tokenizer", "chat", "stopping", "sequence", "page_pool", "weights", "hub", "backends"},
    {"scheduler", "batch", "llama", "outputs"},
    {"decode_loop"},
    {"model_runner", "answers"},
    {"loading"},
    {"engine"},
    {"commandline"},
    {"extras", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The command line dispatches to extras; extras never import each other.
ALLOWED = {("__main__", "extras")}

MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imports(path: Path) -> set[str]:
    """Full dotted names imported anywhere in the file, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unit(path: Path) -> str:
    """The module or subpackage that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def leaf(path: Path) -> str:
    """The extra, a module or a folder, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[1].removesuffix(".py")


def wrong_imports(path: Path) -> list[str]:
    own, wrong = unit(path), []
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "samir_vllm" or len(parts) < 2 or parts[1] not in LEVEL:
            continue
        other = parts[1]
        if other == own:
            if own == "extras" and len(parts) > 2 and parts[2] != leaf(path):
                wrong.append(name)
        elif LEVEL[other] >= LEVEL[own] and (own, other) not in ALLOWED:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert unit(path) in LEVEL, f"{path}: give the new module a layer"
    assert wrong_imports(path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_cupy_only_in_the_cuda_backend(path: Path) -> None:
    allowed = path.parent.name == "backends" and (path.stem.startswith("cuda") or path.stem == "cublas")
    users = {n for n in imports(path) if n.split(".")[0] in {"cupy", "cupy_backends"}}
    assert allowed or not users


def test_the_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    bad = tmp_path / "page_pool.py"
    bad.write_text(
        "def f():\n    from samir_vllm.scheduler import Scheduler\n    import samir_vllm.sequence\n"
    )
    assert len(wrong_imports(bad)) == 2


@pytest.mark.parametrize(
    "code",
    [
        "import samir_vllm",
        "from samir_vllm import Engine, SamplingParams",
        "import samir_vllm.backends.numpy_backend",
    ],
)
def test_numpy_path_never_imports_cupy(code: str) -> None:
    check = f"{code}\nimport sys\nassert 'cupy' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_every_module_says_what_it_does_not_know() -> None:
    for path in MODULES:
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert path.name == "__init__.py" or "know" in doc.lower() or path.name == "__main__.py", path
