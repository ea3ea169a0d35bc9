"""The wheel: what it carries, and that it runs, and compiles its kernels, from a clean environment."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_config import LLAMA32_1B

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


BUILD = """
from pathlib import Path
from samir_vllm.backends import cuda_compile, cuda_probe
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.config import ModelConfig
cache = Cache()
built = cuda_compile.build_kernels(ModelConfig.from_dir(Path.cwd()), "sm_90a", 227 << 10, cache)
assert cache.notices == [], cache.notices
assert all(cubin.startswith(b"\\x7fELF") for cubin in built.cubins.values())
print(cuda_probe.find_cuda_src(), cache.folder, built.compiled, built.cached, *built.cubins)
"""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_wheel_compiles_every_kernel_once(site: Path, env: dict[str, str], tmp_path: Path) -> None:
    """With no GPU and no CUDA toolkit to be found; the second process finds the first one's work."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA32_1B))
    toolkit = ("CUDA_PATH", "CUDA_HOME", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "SAMIR_VLLM_CACHE_DIR")
    env = {name: value for name, value in env.items() if name not in toolkit} | {"PATH": "/nowhere"}
    stems = sorted({path.stem for path in (ROOT / "cuda_src").glob("*.cu")} - {"roofline"})  # of bench alone
    cache = tmp_path / ".cache" / "samir_vllm"
    for numbers in ([len(stems), 0], [0, len(stems)]):
        done = subprocess.run(
            [sys.executable, "-c", BUILD], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        source, folder, compiled, cached, *built = done.stdout.split()
        assert (Path(source), Path(folder)) == (site / "samir_vllm" / "cuda_src", cache)
        assert [int(compiled), int(cached)] == numbers
        assert sorted(built) == stems
        assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == stems
