"""The wheel: what it carries, and that it runs, and compiles its kernels, from a clean environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import TINY

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(ROOT)],
        check=True,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, far from the checkout."""
    path = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(path), str(wheel)],
        check=True,
    )
    return path


@pytest.fixture
def env(site: Path, tmp_path: Path) -> dict[str, str]:
    """An empty home, and the package found is the wheel's."""
    env = os.environ | {
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    env.pop("SAMIR_VLLM_MODEL", None)
    return env


def test_wheel_carries_kernels_and_nothing_foreign(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for source in (ROOT / "cuda_src").iterdir():
        assert f"samir_vllm/cuda_src/{source.name}" in names
    assert "samir_vllm/engine.py" in names
    assert {n.split("/")[0].split("-")[0] for n in names} == {"samir_vllm"}
    assert not any(n.endswith((".safetensors", ".pyc")) for n in names)


def test_wheel_answers_from_a_clean_environment(site: Path, env: dict[str, str], tmp_path: Path) -> None:
    code = "import samir_vllm; print(samir_vllm.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(site))
    result = subprocess.run(
        [sys.executable, "-m", "samir_vllm", "generate", "hi"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "pull smollm2-135m-instruct" in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_wheel_compiles_a_kernel(site: Path, env: dict[str, str], tmp_path: Path) -> None:
    """One whose source includes others; machine code for a GPU comes out, with none needed."""
    shutil.copy(TINY / "config.json", tmp_path)
    code = """
from pathlib import Path
from samir_vllm.backends import cuda_compile, cuda_probe
from samir_vllm.config import ModelConfig
compiled = cuda_compile.compile_cubin("rmsnorm", ModelConfig.from_dir(Path.cwd()), "sm_90a")
print(cuda_probe.find_cuda_src(), *(kernel.name for kernel in compiled.resources))
assert compiled.cubin.startswith(b"\\x7fELF")
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    source, *kernels = done.stdout.split()
    assert Path(source) == site / "samir_vllm" / "cuda_src"
    assert sorted(kernels) == ["add_rmsnorm", "rmsnorm"]
