"""The wheel: what it carries, and that it runs from a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_wheel_carries_kernels_and_nothing_foreign(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for source in (ROOT / "cuda_src").iterdir():
        assert f"samir_vllm/cuda_src/{source.name}" in names
    assert "samir_vllm/engine.py" in names
    assert {n.split("/")[0].split("-")[0] for n in names} == {"samir_vllm"}
    assert not any(n.endswith((".safetensors", ".pyc")) for n in names)


def test_wheel_answers_from_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Unpacked far from the checkout, with an empty home: the package found is the wheel's."""
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
    )
    env = os.environ | {
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    env.pop("SAMIR_VLLM_MODEL", None)
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
