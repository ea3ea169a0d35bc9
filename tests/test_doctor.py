"""``doctor`` and the CUDA probes: each thing missing is one row with a remedy, and never a traceback."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_tokenize_cli import write_tokenizer

from samir_vllm import hub
from samir_vllm.backends import cuda_probe
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.backends.cuda_probe import CupyInstall, Gpu, Unavailable
from samir_vllm.extras import doctor

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "golden" / "tiny-llama3"
GIB = 2**30
H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 138 * GIB, 140 * GIB)
needs_cupy = pytest.mark.skipif(cuda_probe.cuda_major() is None, reason="CuPy is not installed")
T4 = Gpu(1, "Tesla T4", (7, 5), 40, 14 * GIB, 15 * GIB)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder, the only one there is."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(hub, "_checkout", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("SAMIR_VLLM_MODEL", raising=False)
    return folder


@pytest.fixture
def tiny(models: Path) -> Path:
    """A whole model under the default name."""
    return add_model(models, hub.DEFAULT_MODEL)


def add_model(models: Path, name: str) -> Path:
    folder = models / name
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(TINY / file)
    write_tokenizer(folder, ["<s>"])
    return folder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine where all of CUDA is there."""
    kernels = tmp_path / "cuda_src"
    kernels.mkdir()
    (kernels / "rmsnorm.cu").touch()
    answers = {
        "cupy_install": CupyInstall("cupy-cuda12x", "14.2.0", 12),
        "cuda_major": 12,
        "driver_version": (12, 8),
        "nvrtc_version": (12, 9),
        "compile_test_kernel": 3000,
        "cublas_version": (12, 9, 1),
        "gpus": [H200],
        "find_cuda_src": kernels,
    }
    for name, answer in answers.items():
        answer_with(monkeypatch, name, answer)
    monkeypatch.setenv("SAMIR_VLLM_CACHE_DIR", str(tmp_path / "kernels"))


def answer_with(monkeypatch: pytest.MonkeyPatch, name: str, answer: Any) -> None:
    def probe(*_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cuda_probe, name, probe)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    status = doctor.run(parser.parse_args(words))
    return status, capsys.readouterr().out


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], dict[str, dict[str, str]]]:
    """Exit status, devices, and the rows by name."""
    status, out = run(capsys, "--json", *words)
    found = json.loads(out)
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    for row in rows.values():
        assert row["status"] in ("ok", "warning", "missing")
        assert bool(row["remedy"]) == (row["status"] != "ok"), row
        assert "\n" not in row["found"] + row["remedy"]
    return status, found["devices"], rows


# The report


@pytest.mark.usefixtures("tiny", "cuda")
def test_everything_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, devices, rows = look(capsys)
    assert (status, devices) == (0, ["cpu", "cuda"])
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert "132 SMs, 138.0 GiB free of 140.0" in rows["cuda:0"]["found"]
    assert "compute capability 9.0" in rows["cuda:0"]["found"]


@pytest.mark.usefixtures("tiny", "cuda")
def test_text_has_the_rows_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "driver_version", Unavailable("no driver here", "get a driver"))
    monkeypatch.setattr(doctor, "host_memory", lambda: (2 * doctor.GIB, 4 * doctor.GIB))  # else it moves
    _, _, rows = look(capsys)
    status, text = run(capsys)
    assert status == 0
    for row in rows.values():
        (line,) = [
            line
            for line in text.splitlines()
            if line.split()[: 1 + len(row["name"].split())] == [row["status"], *row["name"].split()]
        ]
        assert line.endswith(row["found"])
    assert "-> get a driver" in text
    assert text.endswith("can run on: cpu\n")


@pytest.mark.usefixtures("tiny", "cuda")
def test_a_path_that_can_not_be_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", os.fsdecode(b"/opt/\xff"))
    assert r"/opt/\udcff" in run(capsys)[1]


@pytest.mark.usefixtures("tiny", "cuda")
@pytest.mark.parametrize(
    ("probe", "answer", "row", "remedy"),
    [
        ("cupy_install", Unavailable("no CuPy", "pip install cupy-cuda12x"), "CuPy", "pip install"),
        ("cupy_install", OSError("a\nb"), "CuPy", "report this"),
        ("driver_version", Unavailable("no NVIDIA driver", "install one"), "driver", "install one"),
        ("driver_version", (11, 8), "driver", "update the NVIDIA driver"),
        ("nvrtc_version", Unavailable("NVRTC can't be loaded", "pip install x"), "NVRTC", "pip install"),
        ("compile_test_kernel", Unavailable("log", "pip install z"), "test kernel", "pip install z"),
        ("cublas_version", Unavailable("no cuBLAS", "pip install y"), "cuBLAS", "pip install y"),
        ("find_cuda_src", None, "kernels", "reinstall"),
        ("find_cuda_src", ROOT / "tests", "kernels", "--device cpu"),
        ("gpus", [], "GPU", "CUDA_VISIBLE_DEVICES"),
        ("gpus", Unavailable("no NVIDIA driver", "install one"), "GPU", "install one"),
        ("gpus", [T4], "cuda:1", "8.0 or more"),
    ],
)  # fmt: skip
def test_one_thing_missing_leaves_the_cpu(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    answer: Any,
    row: str,
    remedy: str,
) -> None:
    answer_with(monkeypatch, probe, answer)
    status, devices, rows = look(capsys)
    assert (status, devices) == (0, ["cpu"])
    assert [name for name, r in rows.items() if r["status"] != "ok"] == [row]
    assert rows[row]["status"] == "missing"
    assert remedy in rows[row]["remedy"]


@pytest.mark.usefixtures("tiny", "cuda")
def test_one_good_gpu_of_two_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "gpus", [H200, T4])
    _, devices, rows = look(capsys)
    assert devices == ["cpu", "cuda"]
    assert (rows["cuda:0"]["status"], rows["cuda:1"]["status"]) == ("ok", "missing")


@pytest.mark.usefixtures("tiny", "cuda")
def test_warnings_do_not_forbid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "nvrtc_version", (13, 0))
    answer_with(monkeypatch, "gpus", [Gpu(0, "busy", (8, 9), 100, None, 24 * GIB)])
    monkeypatch.setattr(doctor, "host_memory", lambda: (1000, GIB))
    _, devices, rows = look(capsys)
    assert devices == ["cpu", "cuda"]
    warned = {name for name, row in rows.items() if row["status"] == "warning"}
    assert warned == {"NVRTC", "cuda:0", hub.DEFAULT_MODEL}
    assert "unknown GiB free" in rows["cuda:0"]["found"]


@pytest.mark.usefixtures("tiny", "cuda")
@pytest.mark.parametrize("error", [ImportError("libx.so: no\nsuch file"), ValueError("bad ABI"), None])
def test_a_missing_or_broken_package_stops_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def import_module(name: str) -> Any:
        if name == "ml_dtypes":
            raise error or ModuleNotFoundError("No module named 'ml_dtypes'", name="ml_dtypes")
        return sys.modules.get(name)

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    status, devices, rows = look(capsys)
    assert (status, devices) == (2, [])
    assert rows["ml-dtypes"]["status"] == "missing"
    assert rows["ml-dtypes"]["remedy"].startswith("pip install")
    assert ("--force-reinstall" in rows["ml-dtypes"]["remedy"]) == (error is not None)


@pytest.mark.usefixtures("tiny", "cuda")
def test_the_kernel_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    _, _, rows = look(capsys)
    assert rows["kernel cache"]["found"] == f"{folder}: 0 entries, 0.0 MiB"
    assert not folder.exists()
    for name in "ab":
        Cache(folder).write(name, "key", "cubin", bytes(2**20))
    _, _, rows = look(capsys)
    assert rows["kernel cache"]["found"] == f"{folder}: 2 entries, 2.0 MiB"
    monkeypatch.setenv("SAMIR_VLLM_CACHE_DIR", str(tmp_path / "models" / hub.DEFAULT_MODEL / "config.json"))
    status, devices, rows = look(capsys)
    assert (status, devices) == (0, ["cpu", "cuda"])
    assert rows["kernel cache"]["status"] == "warning"
    assert "can't be written (Not a directory)" in rows["kernel cache"]["found"]
    assert "SAMIR_VLLM_CACHE_DIR" in rows["kernel cache"]["remedy"]


# Models


@pytest.mark.usefixtures("models", "cuda")
def test_no_model_can_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, devices, rows = look(capsys)
    assert (status, devices) == (2, [])
    assert "pull smollm2-135m-instruct" in rows["default"]["remedy"]
    assert "can't run" in run(capsys)[1]


@pytest.mark.usefixtures("cuda")
def test_models_of_other_names(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_model(models, "mine")
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text("{")
    status, _, rows = look(capsys)
    assert status == 0
    assert rows["default"]["status"] == "missing"
    assert "--model broken" in rows["default"]["remedy"]
    assert rows["broken"]["status"] == "missing"
    assert rows["mine"]["status"] == "ok"
    assert str(models / "mine") in rows["mine"]["found"]
    assert look(capsys, "--model", "mine")[0] == 0
    assert look(capsys, "--model", "broken")[0] == 2
    assert look(capsys, "--model", "other")[0] == 2


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_is_looked_at_whole(tiny: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    (tiny / file).unlink()
    (tiny / file).write_text("{}")
    status, _, rows = look(capsys)
    assert status == 2
    assert file in rows[hub.DEFAULT_MODEL]["found"]


@pytest.mark.usefixtures("cuda", "tiny")
def test_model_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = add_model(tmp_path, "elsewhere")
    monkeypatch.setenv("SAMIR_VLLM_MODEL", str(elsewhere))
    _, _, rows = look(capsys)
    assert {str(elsewhere), hub.DEFAULT_MODEL} <= rows.keys()


def test_host_memory_heeds_the_container(tmp_path: Path) -> None:
    assert doctor.host_memory(tmp_path) is None
    for folder in ("proc", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\n")
    assert doctor.host_memory(tmp_path) == (2048 * 1024, 4096 * 1024)
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.write_text("max\n")
    assert doctor.host_memory(tmp_path) == (2048 * 1024, 4096 * 1024)
    limit.write_text("1048576\n")
    assert doctor.host_memory(tmp_path) == (1048576, 1048576)


# CuPy


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts distributions (and no others) where they are looked for."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(cuda_probe, "_search_path", lambda: [str(tmp_path / "nothing"), str(site)])

    def add(name: str) -> None:
        info = site / f"{name.replace('-', '_')}-14.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.0\n")

    return add


def fake_cupy(monkeypatch: pytest.MonkeyPatch, **runtime: Any) -> None:
    """A ``cupy`` whose runtime has these members."""
    members = {"is_hip": False, "runtimeGetVersion": lambda: 12090, "CUDARuntimeError": CudaError} | runtime
    cuda = SimpleNamespace(runtime=SimpleNamespace(**members), Device=FakeDevice)
    cupy = SimpleNamespace(__version__="14.0", cuda=cuda)
    monkeypatch.setattr(cuda_probe, "_import_cupy", lambda: cupy)


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeDevice:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        if self.index == 1:
            raise CudaError(2)

    def __exit__(self, *_: object) -> None: ...


def test_cupy_distributions(install: Callable[[str], None]) -> None:
    assert cuda_probe.cuda_major() is None
    for name in ("cupy-cuda13x", "cupy-stubs", "numpy"):
        install(name)
    assert cuda_probe.cupy_distributions() == {"cupy-cuda13x": "14.0"}
    assert cuda_probe.cuda_major() == 13
    install("cupy_cuda12x")
    assert cuda_probe.cupy_distributions().keys() == {"cupy-cuda12x", "cupy-cuda13x"}
    assert cuda_probe.cuda_major() is None


def test_two_cupys_conflict(install: Callable[[str], None]) -> None:
    install("cupy-cuda12x")
    install("cupy-cuda13x")
    with pytest.raises(
        Unavailable, match=r"cupy-cuda12x, cupy-cuda13x; pip uninstall -y cupy-cuda12x cupy-cu"
    ):
        cuda_probe.cupy_install()


@pytest.mark.parametrize(
    ("name", "runtime", "cause"),
    [
        ("cupy-cuda11x", {"runtimeGetVersion": lambda: 11020}, "built for CUDA 11"),
        ("cupy-rocm-7-0", {"is_hip": True}, "built for ROCm"),
    ],
)
def test_cupy_for_something_else(
    install: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    runtime: dict[str, Any],
    cause: str,
) -> None:
    install(name)
    fake_cupy(monkeypatch, **runtime)
    with pytest.raises(Unavailable, match=f"{cause}.*pip uninstall -y {name}"):
        cuda_probe.cupy_install()


def test_cupy_of_cuda_13(install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("cupy-cuda13x")
    fake_cupy(monkeypatch, runtimeGetVersion=lambda: 13000)
    assert cuda_probe.cupy_install() == CupyInstall("cupy-cuda13x", "14.0", 13)


def test_cupy_not_installed(install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(Unavailable, match="CuPy isn't installed; pip install cupy-cuda12x"):
        cuda_probe.cupy_install()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("error", ["ImportError('libcudart:\\n no such file')", "RuntimeError('ABI')"])
def test_broken_cupy_is_rows_not_a_traceback(tmp_path: Path, error: str) -> None:
    """A real process, with a ``cupy`` that fails to import before the installed one."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(f"raise {error}\n")
    code = (
        "import argparse, sys; from samir_vllm.extras import doctor; "
        "sys.exit(doctor.run(argparse.Namespace(model='models/llama-3.2-1b-instruct', json=True)))"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["devices"] == ["cpu"]
    for name in ("CuPy", "NVRTC", "test kernel", "cuBLAS"):
        assert rows[name]["found"].startswith("CuPy can't be imported: ")
        assert "--force-reinstall cupy-cuda" in rows[name]["remedy"]


@pytest.fixture
def homes(tmp_path: Path) -> dict[str, dict[str, str]]:
    """What HOME may be like, by name."""
    (tmp_path / "file").touch()
    (tmp_path / "locked" / ".cupy").mkdir(parents=True)
    (tmp_path / "locked" / ".cupy" / "kernel_cache").touch()  # a file there stops root too
    return {
        "usable": {"HOME": str(tmp_path)},
        "a file": {"HOME": str(tmp_path / "file")},
        "locked": {"HOME": str(tmp_path / "locked")},
        "below a file": {"HOME": str(tmp_path / "file" / "home")},
        "not there": {"HOME": "/proc/nobody"},  # where nobody can make it
        "unset": {},
        "a cache that can't be": {"HOME": str(tmp_path), "CUPY_CACHE_DIR": str(tmp_path / "file" / "x")},
        "no cache": {"HOME": str(tmp_path), "CUPY_CACHE_DIR": ""},
    }


IMPORT = """
import os
from samir_vllm.backends import cuda_probe
before = dict(os.environ)
if UNKNOWN_USER:
    os.path.expanduser = lambda path: path
cuda_probe._import_cupy()
from cupy.cuda import compiler
assert dict(os.environ) == before
print(compiler._kernel_cache_backend._cache_dir)
assert os.path.isdir(compiler._kernel_cache_backend._cache_dir)
"""


def import_cupy(variables: dict[str, str], cwd: Path, unknown_user: bool = False) -> str:
    """Imports CuPy in a process with only these variables; returns where its cache went."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.replace("UNKNOWN_USER", str(unknown_user))],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd)} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@needs_cupy
@pytest.mark.parametrize(
    "home", ["a file", "locked", "below a file", "not there", "a cache that can't be", "no cache"]
)
def test_cupy_imports_whatever_the_home_is_like(
    homes: dict[str, dict[str, str]], tmp_path: Path, home: str
) -> None:
    """CuPy alone would fail; the folder it gets instead goes with the process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    assert import_cupy(homes[home], folder).startswith(str(folder / "cupy-"))
    assert list(folder.iterdir()) == []


@needs_cupy
def test_a_usable_home_stays_cupys(homes: dict[str, dict[str, str]], tmp_path: Path) -> None:
    assert import_cupy(homes["usable"], tmp_path) == str(tmp_path / ".cupy" / "kernel_cache")
    import_cupy(homes["unset"], tmp_path)  # the user's own home, or a temporary folder where there is none


@needs_cupy
def test_a_user_that_the_system_does_not_know(tmp_path: Path) -> None:
    """CuPy alone would make a folder named ``~`` here."""
    assert import_cupy({}, tmp_path, unknown_user=True).startswith(str(tmp_path / "cupy-"))
    assert list(tmp_path.iterdir()) == []


def test_unavailable_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(Unavailable("cause", "remedy")))
    assert (str(error), error.remedy) == ("cause; remedy", "remedy")


# Driver


def fake_libcuda(monkeypatch: pytest.MonkeyPatch, version: int, status: int = 0) -> None:
    def get_version(pointer: Any) -> int:
        pointer._obj.value = version
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))


def test_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libcuda(monkeypatch, 12080)
    assert cuda_probe.driver_version() == (12, 8)
    fake_libcuda(monkeypatch, 13000)
    assert cuda_probe.driver_version() == (13, 0)


@pytest.mark.parametrize(("version", "status"), [(12080, 34), (0, 0)])
def test_stub_driver(monkeypatch: pytest.MonkeyPatch, version: int, status: int) -> None:
    fake_libcuda(monkeypatch, version, status)
    with pytest.raises(Unavailable, match=r"has no driver behind it.*--device cpu"):
        cuda_probe.driver_version()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(Unavailable, match=r"libcuda.so.1: cannot open\); install an NVIDIA driver"):
        cuda_probe.driver_version()


def test_driver_must_serve_the_major_version() -> None:
    cuda_probe.check_driver((12, 0), 12)
    cuda_probe.check_driver((13, 0), 12)
    with pytest.raises(Unavailable, match=r"serves CUDA 12\.9, CuPy needs 13\.0; .*pip install cupy-cuda12x"):
        cuda_probe.check_driver((12, 9), 13)
    with pytest.raises(Unavailable) as caught:
        cuda_probe.check_driver((11, 8), 12)
    assert "pip install" not in str(caught.value)  # there is no CuPy of ours for CUDA 11


# Compiler


@needs_cupy
def test_the_compiler_works_without_a_gpu() -> None:
    assert cuda_probe.nvrtc_version()[0] == cuda_probe.cuda_major()
    sizes = {arch: cuda_probe.compile_test_kernel(arch) for arch in ("sm_80", "sm_90")}
    assert min(sizes.values()) > 500  # a CUBIN is an ELF file: some hundred bytes of headers, then code


@needs_cupy
def test_compile_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "TEST_KERNEL", "#include <cuda_bf16.h>\nint x = undefined_name;")
    with pytest.raises(Unavailable, match=r"cuda_bf16\.h.*pip install") as caught:
        cuda_probe.compile_test_kernel()
    assert "\n" not in str(caught.value)


LIBRARY = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two places of packages, the first with a compiler; no library is loaded."""
    folders = [tmp_path / "venv", tmp_path / "user"]
    for folder in folders:
        (folder / LIBRARY).parent.mkdir(parents=True)
    (folders[0] / LIBRARY).write_bytes(b"12.9.86")
    (folders[0] / LIBRARY).with_name("libnvrtc.alt.so.12").touch()
    (folders[0] / LIBRARY).with_name("libnvrtc-builtins.so.12.9").touch()
    monkeypatch.setattr(cuda_probe, "_mapped_files", lambda name: set())
    monkeypatch.setattr(cuda_probe.site, "getsitepackages", lambda: [str(folders[0])])
    monkeypatch.setattr(cuda_probe.site, "getusersitepackages", lambda: str(folders[1]))
    monkeypatch.setattr(cuda_probe.site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(cuda_probe, "nvrtc_version", lambda: pytest.fail("the library was loaded"))
    return folders


def test_the_compilers_build_is_known_unloaded(wheels: list[Path]) -> None:
    first = cuda_probe.nvrtc_build()
    assert first == cuda_probe.nvrtc_build()
    (wheels[0] / LIBRARY).write_bytes(b"12.9.861")
    second = cuda_probe.nvrtc_build()
    os.utime(wheels[0] / LIBRARY, (1, 1))  # another of the same size
    assert len({first, second, cuda_probe.nvrtc_build()}) == 3


@pytest.mark.parametrize("wheels_with_it", [0, 2])
def test_where_it_is_not_clear_the_compiler_is_loaded(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch, wheels_with_it: int, tmp_path: Path
) -> None:
    if wheels_with_it == 0:
        (wheels[0] / LIBRARY).unlink()
    else:
        (wheels[1] / LIBRARY).write_bytes(b"12.4")
    toolkit = tmp_path / "libnvrtc.so.13.0.48"
    toolkit.write_bytes(b"of a toolkit")
    loaded: set[str] = set()

    def load() -> tuple[int, int]:
        loaded.add(str(toolkit))
        return 13, 0

    monkeypatch.setattr(cuda_probe, "_mapped_files", lambda name: loaded)
    monkeypatch.setattr(cuda_probe, "nvrtc_version", load)
    assert cuda_probe.nvrtc_build().startswith("libnvrtc.so.13.0.48 12 ")


def test_a_compiler_that_is_loaded_counts(wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loaded it: CuPy takes what is there."""
    other = wheels[1] / "libnvrtc.so.12.4.99"
    other.write_bytes(b"12.4")
    loaded = {str(other)}
    monkeypatch.setattr(cuda_probe, "_mapped_files", lambda name: loaded)
    build = cuda_probe.nvrtc_build()
    assert build.startswith("libnvrtc.so.12.4.99 4 ")
    loaded.add(str(wheels[0] / LIBRARY))
    assert cuda_probe.nvrtc_build() != build
    # Replaced on disk since: what did the work can't be told, so it is like no other.
    loaded.add("/gone/libnvrtc.so.12 (deleted)")
    assert cuda_probe.nvrtc_build() != cuda_probe.nvrtc_build()


@needs_cupy
def test_the_guess_is_what_cupy_loads() -> None:
    """A real process: the build told before the library is loaded, and after."""
    code = """
from samir_vllm.backends import cuda_probe
before = cuda_probe.nvrtc_build()
assert before == cuda_probe.nvrtc_build()
guessed = cuda_probe._nvrtc_of_a_wheel()
assert bool(cuda_probe._mapped_files("libnvrtc.so")) == (not guessed)
cuda_probe.nvrtc_version()
assert cuda_probe._mapped_files("libnvrtc.so")
assert cuda_probe.nvrtc_build() == before, before
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr == ""


@needs_cupy
def test_nvrtc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_backends.cuda import libs

    def fail() -> None:
        raise RuntimeError("Failure finding\nlibnvrtc.so.12")

    broken = SimpleNamespace(getVersion=fail)
    monkeypatch.setattr(libs, "nvrtc", broken, raising=False)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", broken)
    for probe in (cuda_probe.nvrtc_version, cuda_probe.compile_test_kernel):
        with pytest.raises(
            Unavailable, match=r"NVRTC can't be loaded: Failure finding libnvrtc.*pip install"
        ):
            probe()


def test_the_library_is_of_cupys_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of another CUDA that something else brought into the process."""
    asked: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append(name))
    monkeypatch.setattr(
        cuda_probe,
        "_import_cupy",
        lambda: SimpleNamespace(
            cuda=SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 13010))
        ),
    )
    cuda_probe.loaded_library("libcublas.so")
    assert asked == ["libcublas.so.13"]


@needs_cupy
def test_cublas_loads_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_probe.cublas_version()[0] == cuda_probe.cuda_major()

    def fail(*_: object, **__: object) -> None:
        raise OSError("not there")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(Unavailable, match=r"cuBLAS can't be loaded: not there; pip install"):
        cuda_probe.cublas_version()


# GPUs


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is busy: no context can be made, and its free memory is unknown."""
    properties = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132}
    fake_cupy(
        monkeypatch,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda index: properties | {"totalGlobalMem": 140 * GIB},
        memGetInfo=lambda: (138 * GIB, 140 * GIB),
    )
    answer_with(monkeypatch, "driver_version", (12, 8))
    first, second = cuda_probe.gpus()
    assert first == H200
    assert (second.index, second.free_bytes, second.total_bytes) == (1, None, 140 * GIB)


def test_no_gpu_and_no_driver_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    status = 100

    def count() -> int:
        raise CudaError(status)

    fake_cupy(monkeypatch, getDeviceCount=count)
    answer_with(monkeypatch, "driver_version", (12, 8))
    assert cuda_probe.gpus() == []
    status = 35
    with pytest.raises(Unavailable, match="CUDA can't list the GPUs: cudaError 35; check the NVIDIA driver"):
        cuda_probe.gpus()
    answer_with(monkeypatch, "driver_version", Unavailable("no NVIDIA driver", "install one"))
    with pytest.raises(Unavailable, match="no NVIDIA driver"):
        cuda_probe.gpus()


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_ampere_or_later(capability: tuple[int, int], supported: bool) -> None:
    assert Gpu(0, "x", capability, 1, 1, 1).supported == supported


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    for gpu in cuda_probe.gpus():
        assert gpu.name
        assert gpu.num_sms > 0
        assert gpu.free_bytes is None or 0 < gpu.free_bytes <= gpu.total_bytes


# Kernel sources


def test_kernel_sources_of_wheel_and_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lib" / "samir_vllm"
    (package / "backends").mkdir(parents=True)
    monkeypatch.setattr(cuda_probe, "__file__", str(package / "backends" / "cuda_probe.py"))
    assert cuda_probe.find_cuda_src() is None
    (tmp_path / "lib" / "cuda_src").mkdir()
    assert cuda_probe.find_cuda_src() == tmp_path / "lib" / "cuda_src"
    (package / "cuda_src").mkdir()
    assert cuda_probe.find_cuda_src() == package / "cuda_src"
    shutil.rmtree(tmp_path / "lib")


def test_long_messages_become_one_short_line() -> None:
    assert cuda_probe.one_line("a\n  b") == "a b"
    assert len(cuda_probe.one_line("x" * 1000)) == 240
    assert cuda_probe.one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
