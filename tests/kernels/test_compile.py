"""Every kernel compiles without a GPU: for each architecture and model, no warning, no spill, no stack, and
no more shared memory than a block may have.

Also how kernels come from the cache to the GPU, and how the sources are arranged: what each file opens
with, where PTX may stand, what ``KERNELS`` lists.
Run with ``-s`` to see each kernel's registers and shared memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import HEADS, REAL

from harness import TINY, Chunk, make_cuda_model, run
from samir_vllm.backends import cuda_compile, cuda_probe
from samir_vllm.backends.cuda_cache import Cache
from samir_vllm.backends.cuda_compile import (
    KERNELS,
    MAX_SHARED_BYTES,
    RULERS,
    STEMS,
    BuiltKernels,
    Compiled,
    build_kernels,
    compile_source,
    load_kernels,
)
from samir_vllm.backends.cuda_probe import Gpu
from samir_vllm.config import ModelConfig
from samir_vllm.errors import DeviceError

CUDA_SRC = Path(__file__).parents[2] / "cuda_src"
ALL_KERNELS = KERNELS | RULERS
SOURCES = sorted(p for p in CUDA_SRC.iterdir() if p.suffix in {".cu", ".cuh"})

ARCHS = [
    pytest.param(arch, marks=[] if arch == "sm_90a" else [pytest.mark.slow])
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy, which calls the compiler, is not installed"
)


def names(paths: list[Path]) -> list[str]:
    return [p.name for p in paths]


def code_of(path: Path) -> str:
    """The text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


# Compiling


def problems(compiled: Compiled) -> list[str]:
    """What must not be: any complaint of the compiler, spilled registers, a stack frame."""
    found = [compiled.log] if compiled.log else []
    for kernel in compiled.resources:
        if kernel.spill_bytes:
            found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
        if kernel.stack_bytes:
            found.append(f"{kernel.name} has a stack frame of {kernel.stack_bytes} bytes")
    return found


def dynamic_bytes(kernel: str, model: ModelConfig, max_shared_bytes: int) -> int:
    """What the host asks for beside the kernel's static shared memory."""
    if kernel == "paged_attention_decode":
        return cuda_compile.decode_shared_bytes(model, max_shared_bytes)
    if kernel == "paged_attention_prefill":
        return cuda_compile.prefill_shared_bytes(model)
    return 0


def too_much_shared_memory(compiled: Compiled, model: ModelConfig, arch: str) -> list[str]:
    most = MAX_SHARED_BYTES[arch]
    bytes_of = {k.name: (k.shared_bytes, dynamic_bytes(k.name, model, most)) for k in compiled.resources}
    return [
        f"{name} takes {static} + {dynamic} bytes of shared memory, a block may have {most}"
        for name, (static, dynamic) in bytes_of.items()
        if static + dynamic > most
    ]


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("model", REAL)
@pytest.mark.parametrize("stem", ALL_KERNELS)
def test_kernels_compile_clean(stem: str, model: str, arch: str) -> None:
    compiled = cuda_compile.compile_cubin(stem, REAL[model], arch)
    for kernel in compiled.resources:
        print(
            f"\n{arch:7} {model:9} {kernel.name:24} {kernel.registers:4} registers "
            f"{kernel.shared_bytes:6} bytes shared {kernel.spill_bytes:4} spilled",
            end="",
        )
    assert compiled.cubin
    assert sorted(kernel.name for kernel in compiled.resources) == sorted(ALL_KERNELS[stem])
    assert problems(compiled) == []
    assert too_much_shared_memory(compiled, REAL[model], arch) == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])  # the one with the least of everything, and the newest
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("stem", ["paged_attention_decode", "paged_attention_prefill", "rope_kv_write"])
def test_every_number_of_heads_compiles_clean(stem: str, heads: str, arch: str) -> None:
    compiled = cuda_compile.compile_cubin(stem, HEADS[heads], arch)
    assert problems(compiled) == []
    assert too_much_shared_memory(compiled, HEADS[heads], arch) == []


@needs_compiler
class TestTheJudgeCanFail:
    """A compiler's complaint, a spill and a stack frame are seen where they are planted."""

    ARCH = "sm_90a"

    def compile(self, source: str) -> list[str]:
        return problems(compile_source(source, "planted.cu", self.ARCH, ()))

    def test_clean(self) -> None:
        assert self.compile('extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }') == []

    def test_warning(self) -> None:
        [complaint] = self.compile('extern "C" __global__ void f(float* x) { int unused; x[0] = 1.0f; }')
        assert "unused" in complaint

    def test_spill(self) -> None:
        """64 sums in flight in the 32 registers that 2 blocks of 1,024 threads leave to each."""
        found = self.compile("""
            extern "C" __global__ void __launch_bounds__(1024, 2) f(float* x, int n) {
                float sum[64] = {};
                for (int i = 0; i < n; ++i) {
            #pragma unroll
                    for (int j = 0; j < 64; ++j) sum[j] = sum[j] * x[i] + x[i + j];
                }
            #pragma unroll
                for (int j = 0; j < 64; ++j) x[threadIdx.x * 64 + j] = sum[j];
            }""")
        assert any("spills" in line for line in found)

    def test_stack(self) -> None:
        """An array indexed at run time can't live in registers."""
        [complaint] = self.compile("""
            extern "C" __global__ void f(float* x, const int* at) {
                float values[32];
                for (int i = 0; i < 32; ++i) values[at[i]] = x[i];
                for (int i = 0; i < 32; ++i) x[i] = values[at[i + 32]];
            }""")
        assert "stack frame" in complaint

    def test_shared_memory(self, sources: Path) -> None:
        """32 KiB more, which the compiler takes: where the least is to be had, K and V fill the rest."""
        arch, model = "sm_86", REAL["llama_1b"]
        path = sources / "paged_attention_decode.cu"
        text, line = path.read_text(encoding="utf-8"), "    __shared__ bool is_last;\n"
        assert line in text
        more = "    __shared__ volatile float more[8192];\n    more[threadIdx.x] = 0.0f;\n"
        for code, verdicts in ((text, 0), (text.replace(line, line + more), 1)):
            path.write_text(code, encoding="utf-8")
            compiled = cuda_compile.compile_cubin(path.stem, model, arch)
            assert problems(compiled) == []
            assert len(too_much_shared_memory(compiled, model, arch)) == verdicts

    def test_error(self) -> None:
        with pytest.raises(DeviceError, match=r"planted\.cu.*undefined_name"):
            self.compile('extern "C" __global__ void f(float* x) { x[0] = undefined_name; }')


@needs_compiler
@pytest.mark.parametrize("stem", ALL_KERNELS)
def test_lines_of_the_expanded_source_are_the_files_own(stem: str, tmp_path: Path) -> None:
    """The compiler names file and line of the source as the reader has it."""
    source = cuda_compile.kernel_source(stem) + "\nint wrong = undefined_name;\n"
    last = len((CUDA_SRC / f"{stem}.cu").read_text(encoding="utf-8").splitlines())
    options = cuda_compile.definitions(REAL["llama_1b"], MAX_SHARED_BYTES["sm_90a"])
    with pytest.raises(DeviceError, match=rf"{stem}\.cu\({last + 1}\): error"):
        compile_source(source, f"{stem}.cu", "sm_90a", options)


# Cache and loading

MODEL = REAL["llama_1b"]
SHARED_BYTES = MAX_SHARED_BYTES["sm_90a"]
H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 2**37, 2**37, SHARED_BYTES)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuiltKernels]:
    """A cache that was empty before all kernels of the 1B model were built with it, and those kernels."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, build_kernels(MODEL, "sm_90a", SHARED_BYTES, Cache(folder))


@pytest.fixture
def warm(filled: tuple[Path, BuiltKernels], tmp_path: Path) -> Path:
    """A copy of that cache, to be spoilt."""
    return shutil.copytree(filled[0], tmp_path / "warm")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A quick compiler, whose machine code is its input; gives the names of what it compiles."""
    compiled: list[str] = []

    def run(source: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        compiled.append(name)
        return "\n".join((name, *options, source)).encode(), ""

    monkeypatch.setattr(cuda_probe, "run_nvrtc", run)
    monkeypatch.setattr(cuda_probe, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(cuda_probe, "nvrtc_build", lambda: "12.9.86")
    return compiled


@needs_compiler
def test_what_is_built_in_parallel_is_what_one_thread_builds(filled: tuple[Path, BuiltKernels]) -> None:
    folder, built = filled
    assert (built.compiled, built.cached) == (len(STEMS), 0)
    assert built.cubins == {
        stem: cuda_compile.compile_cubin(stem, MODEL, "sm_90a", SHARED_BYTES).cubin for stem in STEMS
    }
    assert sorted(p.name.split("-")[0] for p in folder.iterdir()) == sorted(STEMS)
    assert {p.read_bytes() for p in folder.iterdir()} == set(built.cubins.values())


@needs_compiler
def test_a_warm_cache_needs_no_compiler(
    filled: tuple[Path, BuiltKernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, built = filled
    monkeypatch.setattr(cuda_probe, "run_nvrtc", lambda *_: pytest.fail("compiled"))
    cache = Cache(folder)
    again = build_kernels(MODEL, "sm_90a", SHARED_BYTES, cache)
    assert (again.compiled, again.cached, again.cubins) == (0, len(STEMS), built.cubins)
    assert cache.notices == []


@needs_compiler
@pytest.mark.parametrize("what", ["truncated", "empty", "flipped", "folder", "link"])
def test_only_what_is_damaged_is_built_again(
    filled: tuple[Path, BuiltKernels], warm: Path, what: str
) -> None:
    (path,) = warm.glob("rmsnorm-*")
    cubin = path.read_bytes()
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("nowhere")
    else:
        spoilt = {"truncated": cubin[:-1], "empty": b"", "flipped": cubin[:-1] + bytes([cubin[-1] ^ 128])}
        path.write_bytes(spoilt[what])
    cache = Cache(warm)
    built = build_kernels(MODEL, "sm_90a", SHARED_BYTES, cache)
    assert (built.compiled, built.cached, built.cubins) == (1, len(STEMS) - 1, filled[1].cubins)
    [notice] = cache.notices
    assert path.name in notice
    assert path.read_bytes() == cubin
    assert build_kernels(MODEL, "sm_90a", SHARED_BYTES, Cache(warm)).compiled == 0


def test_without_a_folder_everything_is_compiled(tmp_path: Path, compiler: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    for _ in range(2):
        assert build_kernels(MODEL, "sm_90a", SHARED_BYTES, cache).compiled == len(STEMS)
    assert len(compiler) == 2 * len(STEMS)
    assert len(cache.notices) == 1


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``cuda_src`` that is compiled instead."""
    folder = shutil.copytree(CUDA_SRC, tmp_path / "cuda_src")
    monkeypatch.setattr(cuda_probe, "find_cuda_src", lambda: folder)
    return folder


def append_line(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")


def users(header: str) -> set[str]:
    """The files that have a header's text in theirs."""
    return {stem for stem in STEMS if f'#line 1 "{header}"' in cuda_compile.kernel_source(stem)}


def test_each_ingredient_of_a_kernel_changes_its_key(
    tmp_path: Path, compiler: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    arch, shared_bytes, model = "sm_90a", SHARED_BYTES, MODEL

    def rebuilt() -> set[str]:
        compiler.clear()
        built = build_kernels(model, arch, shared_bytes, cache)
        assert built.compiled == len(compiler)
        for stem, cubin in built.cubins.items():  # never another's
            options = cuda_compile.compiler_options(arch, cuda_compile.definitions(model, shared_bytes))
            assert cubin == "\n".join((f"{stem}.cu", *options, cuda_compile.kernel_source(stem))).encode()
        return {name.removesuffix(".cu") for name in compiler}

    everything = set(STEMS)
    assert rebuilt() == everything
    assert rebuilt() == set()
    append_line(sources / "argmax.cu")
    assert rebuilt() == {"argmax"}
    for header in ("common.cuh", "attention.cuh", "ptx.cuh"):
        append_line(sources / header)
        assert rebuilt() == users(header) != set()
    assert users("attention.cuh") < everything
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if type(value) is int and f"={value}" in " ".join(cuda_compile.definitions(model, shared_bytes)):
            model = dataclasses.replace(MODEL, **{field.name: 2 * value})
            assert rebuilt() == everything, field.name
    model = dataclasses.replace(MODEL, rms_norm_eps=1e-6)
    assert rebuilt() == everything
    arch = "sm_90"
    assert rebuilt() == everything
    shared_bytes = 48 << 10  # so little that decode holds K and V in turn
    assert rebuilt() == everything
    monkeypatch.setattr(cuda_compile, "OPTIONS", (*cuda_compile.OPTIONS, "-lineinfo"))
    assert rebuilt() == everything
    monkeypatch.setattr(cuda_probe, "nvrtc_build", lambda: "12.9.87")
    assert rebuilt() == everything
    monkeypatch.setattr(cuda_compile, "CACHE_FORMAT", cuda_compile.CACHE_FORMAT + 1)
    assert rebuilt() == everything
    assert rebuilt() == set()


def test_work_goes_under_the_name_of_the_compiler_that_did_it(
    tmp_path: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was loaded another one was thought to be: what it compiles is not the other's."""
    monkeypatch.setattr(cuda_probe, "nvrtc_build", lambda: "loaded" if compiler else "guessed")
    cache = Cache(tmp_path)
    for _ in range(2):
        compiler.clear()
        assert build_kernels(MODEL, "sm_90a", SHARED_BYTES, cache).compiled == len(STEMS)
    assert compiler
    assert build_kernels(MODEL, "sm_90a", SHARED_BYTES, cache).compiled == 0


@needs_compiler
def test_a_gpu_that_the_compiler_does_not_know(tmp_path: Path) -> None:
    gpu = dataclasses.replace(H200, compute_capability=(99, 0))
    with pytest.raises(DeviceError, match=r"NVRTC \d+\.\d+ doesn't know this GPU \(sm_990\); pip install"):
        load_kernels(MODEL, gpu, Cache(tmp_path))
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_file_that_does_not_compile(tmp_path: Path, sources: Path) -> None:
    """Its error comes in one line, and no other file's work is taken for the whole."""
    path = sources / "argmax.cu"
    path.write_text(path.read_text(encoding="utf-8") + "int wrong = undefined_name;\n", encoding="utf-8")
    with pytest.raises(
        DeviceError, match=r"cuda_src/argmax\.cu can't be built: .*undefined_name.*doctor"
    ) as e:
        build_kernels(MODEL, "sm_90a", SHARED_BYTES, Cache(tmp_path / "cache"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 0), "sm_120")],
)
def test_arch_of(capability: tuple[int, int], arch: str) -> None:
    assert cuda_compile.arch_of(dataclasses.replace(H200, compute_capability=capability)) == arch


class FakeDriverError(RuntimeError):
    def __init__(self, status: int, name: str) -> None:
        super().__init__(f"{name}: the driver's words")
        self.status = status


class FakeModule:
    """A module that the driver would load from ``path``; ``refusal`` is what it says to any."""

    loaded: dict[str, bytes] = {}  # noqa: RUF012
    refusal: FakeDriverError | None = None

    def __init__(self, *, path: str) -> None:
        self.path = path

    def compile(self) -> None:
        if self.refusal:
            raise self.refusal
        self.loaded[self.path] = Path(self.path).read_bytes()

    def get_function(self, name: str) -> Any:
        assert self.path in self.loaded
        return dataclasses.make_dataclass("Kernel", ["name", "max_dynamic_shared_size_bytes"])(name, 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[FakeModule]:
    """CuPy as it would load files on a machine with a GPU."""
    import cupy

    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", FakeDriverError)
    monkeypatch.setattr(FakeModule, "loaded", {})
    return FakeModule


@needs_compiler
def test_every_kernel_is_loaded(filled: tuple[Path, BuiltKernels], driver: type[FakeModule]) -> None:
    folder, built = filled
    loaded = load_kernels(MODEL, H200, Cache(folder))
    assert (loaded.compiled, loaded.cached) == (0, len(STEMS))
    assert sorted(loaded.kernels) == sorted(name for names in KERNELS.values() for name in names)
    assert all(kernel.name == name for name, kernel in loaded.kernels.items())
    assert sorted(driver.loaded.values()) == sorted(built.cubins.values())
    limits = {
        name: size for name, k in loaded.kernels.items() if (size := k.max_dynamic_shared_size_bytes) > 0
    }
    assert limits == {
        "paged_attention_decode": cuda_compile.decode_shared_bytes(MODEL, SHARED_BYTES),
        "paged_attention_prefill": cuda_compile.prefill_shared_bytes(MODEL),
    }


@needs_compiler
def test_a_path_never_gives_other_content(
    tmp_path: Path, compiler: list[str], driver: type[FakeModule]
) -> None:
    """CuPy remembers modules by their path; the cache's files may change or go, with or without our doing."""
    first = load_kernels(MODEL, H200, Cache(tmp_path / "a"))
    of_first = dict(driver.loaded)
    load_kernels(MODEL, H200, Cache(tmp_path / "a"))
    assert driver.loaded == of_first  # the same paths, and nothing leaks
    shutil.rmtree(tmp_path / "a")
    second = load_kernels(REAL["smollm2"], H200, Cache(Path("/proc/nowhere")))
    assert first.kernels.keys() == second.kernels.keys()
    assert len(driver.loaded) == 2 * len(STEMS)
    assert all(Path(path).read_bytes() == content for path, content in driver.loaded.items())


@needs_compiler
def test_a_driver_that_refuses(
    filled: tuple[Path, BuiltKernels], driver: type[FakeModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "refusal", FakeDriverError(218, "CUDA_ERROR_UNSUPPORTED"))
    with pytest.raises(
        DeviceError, match=r"refuses .*embedding\.cu: CUDA_ERROR_UNSUP.*; update the driver, or"
    ):
        load_kernels(MODEL, H200, Cache(filled[0]))
    # That one is the backend's to tell, as any lack of memory.
    monkeypatch.setattr(driver, "refusal", FakeDriverError(2, "CUDA_ERROR_OUT_OF_MEMORY"))
    with pytest.raises(FakeDriverError):
        load_kernels(MODEL, H200, Cache(filled[0]))


def gathers(loaded: cuda_compile.LoadedKernels) -> bool:
    """Whether a kernel does its work on the real GPU: the last of three rows."""
    import cupy

    table = np.arange(3 * MODEL.hidden_size, dtype=np.uint16).reshape(3, -1)
    with cupy.cuda.Device(0):
        x, ids, out = (
            cupy.empty(shape, t) for shape, t in ((table.shape, "u2"), (1, "i4"), ((1, 2048), "u2"))
        )
        x.set(table)
        ids.set(np.array([2], np.int32))
        loaded.kernels["embedding"]((1,), (256,), (x, ids, out))
        return bool((out.get() == table[2:]).all())


@pytest.mark.gpu
def test_a_real_gpu_takes_what_is_compiled_and_what_is_cached(tmp_path: Path) -> None:
    gpu = cuda_probe.require_gpu(0)
    cold = load_kernels(MODEL, gpu, Cache(tmp_path))
    warm = load_kernels(MODEL, gpu, Cache(tmp_path))
    (path,) = tmp_path.glob("embedding-*")
    path.write_bytes(path.read_bytes()[:-1])
    mended = load_kernels(MODEL, gpu, Cache(tmp_path))
    without = load_kernels(MODEL, gpu, Cache(Path("/proc/nowhere")))
    assert [k.compiled for k in (cold, warm, mended, without)] == [len(STEMS), 0, 1, len(STEMS)]
    assert all(map(gathers, (cold, warm, mended, without)))


@pytest.mark.gpu
def test_a_real_gpu_refuses_what_is_no_machine_code(
    tmp_path: Path, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_probe, "run_nvrtc", lambda *_: (b"not machine code", ""))
    with pytest.raises(DeviceError, match=r"refuses the machine code of cuda_src/\w+\.cu: CUDA_ERROR_"):
        load_kernels(MODEL, cuda_probe.require_gpu(0), Cache(tmp_path))


@pytest.mark.gpu
def test_the_model_computes_the_same_whatever_the_cache_is_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(folder: Path) -> tuple[bytes, list[str]]:
        monkeypatch.setenv("SAMIR_VLLM_CACHE_DIR", str(folder))
        model = make_cuda_model(TINY)
        return run(model, [Chunk(0, np.arange(7, 40))]).tobytes(), model.backend.notices

    cold, notices = logits(tmp_path)
    assert notices == []
    assert logits(tmp_path) == (cold, [])
    paths = sorted(tmp_path.glob("*.cubin"))
    assert len(paths) == len(STEMS)
    for path in paths[:2]:
        path.write_bytes(path.read_bytes()[:100])
    mended, [notice] = logits(tmp_path)
    assert mended == cold
    assert "2 damaged files" in notice
    assert logits(tmp_path) == (cold, [])
    without, [notice] = logits(Path("/proc/nowhere"))
    assert without == cold
    assert "/proc/nowhere" in notice


# Arrangement


def test_every_file_has_its_stem() -> None:
    assert sorted(ALL_KERNELS) == [p.stem for p in SOURCES if p.suffix == ".cu"]
    assert set(KERNELS) == set(STEMS)
    assert KERNELS.keys().isdisjoint(RULERS)


@pytest.mark.parametrize("stem", ALL_KERNELS)
def test_kernels_lists_the_global_functions(stem: str) -> None:
    # __launch_bounds__ may stand on either side of `void`, with one more pair of brackets inside its own.
    bare = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", code_of(CUDA_SRC / f"{stem}.cu"))
    found = re.findall(r'extern "C" __global__\s+void\s+(\w+)\s*\(', bare)
    assert found == list(ALL_KERNELS[stem])
    assert len(found) == bare.count("__global__")


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_includes_are_our_own_files(path: Path) -> None:
    """Nothing from a CUDA toolkit, so that none need be installed; and only in the form that is expanded."""
    for line in re.findall(r"^\s*#\s*include.*$", code_of(path), flags=re.MULTILINE):
        found = re.fullmatch(r'#include "([\w.]+)"', line.strip("\n"))
        assert found, f"{path.name}: {line}"
        assert (CUDA_SRC / found[1]).is_file(), f"{path.name}: {line}"


@pytest.mark.parametrize("stem", ALL_KERNELS)
def test_no_include_is_left_after_expansion(stem: str) -> None:
    assert "#include" not in re.sub(r"//[^\n]*", "", cuda_compile.kernel_source(stem))


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_ptx_only_in_its_file(path: Path) -> None:
    holds_ptx = re.search(r"\b(asm|__asm__|__asm)\b", code_of(path)) is not None
    assert holds_ptx == (path.name == "ptx.cuh")


@pytest.mark.parametrize("stem", ALL_KERNELS)
def test_files_open_with_what_formula_shapes_threads(stem: str) -> None:
    text = (CUDA_SRC / f"{stem}.cu").read_text(encoding="utf-8")
    opening = re.match(r"(?://[^\n]*\n)+", text)
    assert opening, f"{stem}.cu opens with no comment"
    labels = re.findall(r"^// ([A-Z]\w+):", opening[0], flags=re.MULTILINE)
    assert labels[:4] == ["What", "Formula", "Shapes", "Threads"]


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_headers_open_with_a_comment(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("// ")
