"""Every kernel compiles without a GPU: for each architecture and model, no warning, no spill, no stack.

Also how the sources are arranged: what each file opens with, where PTX may stand, what ``KERNELS`` lists.
Run with ``-s`` to see each kernel's registers and shared memory.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from twins import HEADS, REAL

from samir_vllm.backends import cuda_compile
from samir_vllm.backends.cuda_compile import KERNELS, MAX_SHARED_BYTES, STEMS, Compiled, compile_source
from samir_vllm.errors import DeviceError

CUDA_SRC = Path(__file__).parents[2] / "cuda_src"
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


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("model", REAL)
@pytest.mark.parametrize("stem", STEMS)
def test_kernels_compile_clean(stem: str, model: str, arch: str) -> None:
    compiled = cuda_compile.compile_cubin(stem, REAL[model], arch)
    for kernel in compiled.resources:
        print(
            f"\n{arch:7} {model:9} {kernel.name:24} {kernel.registers:4} registers "
            f"{kernel.shared_bytes:6} bytes shared {kernel.spill_bytes:4} spilled",
            end="",
        )
    assert compiled.cubin
    assert sorted(kernel.name for kernel in compiled.resources) == sorted(KERNELS[stem])
    assert problems(compiled) == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])  # the one with the least of everything, and the newest
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("stem", ["paged_attention_decode", "paged_attention_prefill", "rope_kv_write"])
def test_every_number_of_heads_compiles_clean(stem: str, heads: str, arch: str) -> None:
    assert problems(cuda_compile.compile_cubin(stem, HEADS[heads], arch)) == []


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

    def test_error(self) -> None:
        with pytest.raises(DeviceError, match=r"planted\.cu.*undefined_name"):
            self.compile('extern "C" __global__ void f(float* x) { x[0] = undefined_name; }')


@needs_compiler
@pytest.mark.parametrize("stem", STEMS)
def test_lines_of_the_expanded_source_are_the_files_own(stem: str, tmp_path: Path) -> None:
    """The compiler names file and line of the source as the reader has it."""
    source = cuda_compile.kernel_source(stem) + "\nint wrong = undefined_name;\n"
    last = len((CUDA_SRC / f"{stem}.cu").read_text(encoding="utf-8").splitlines())
    options = cuda_compile.definitions(REAL["llama_1b"], MAX_SHARED_BYTES["sm_90a"])
    with pytest.raises(DeviceError, match=rf"{stem}\.cu\({last + 1}\): error"):
        compile_source(source, f"{stem}.cu", "sm_90a", options)


# Arrangement


def test_every_file_has_its_stem() -> None:
    assert sorted(STEMS) == [p.stem for p in SOURCES if p.suffix == ".cu"]
    assert set(KERNELS) == set(STEMS)


@pytest.mark.parametrize("stem", STEMS)
def test_kernels_lists_the_global_functions(stem: str) -> None:
    # __launch_bounds__ may stand on either side of `void`, with one more pair of brackets inside its own.
    bare = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", code_of(CUDA_SRC / f"{stem}.cu"))
    found = re.findall(r'extern "C" __global__\s+void\s+(\w+)\s*\(', bare)
    assert found == list(KERNELS[stem])
    assert len(found) == bare.count("__global__")


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_includes_are_our_own_files(path: Path) -> None:
    """Nothing from a CUDA toolkit, so that none need be installed; and only in the form that is expanded."""
    for line in re.findall(r"^\s*#\s*include.*$", code_of(path), flags=re.MULTILINE):
        found = re.fullmatch(r'#include "([\w.]+)"', line.strip("\n"))
        assert found, f"{path.name}: {line}"
        assert (CUDA_SRC / found[1]).is_file(), f"{path.name}: {line}"


@pytest.mark.parametrize("stem", STEMS)
def test_no_include_is_left_after_expansion(stem: str) -> None:
    assert "#include" not in re.sub(r"//[^\n]*", "", cuda_compile.kernel_source(stem))


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_ptx_only_in_its_file(path: Path) -> None:
    holds_ptx = re.search(r"\b(asm|__asm__|__asm)\b", code_of(path)) is not None
    assert holds_ptx == (path.name == "ptx.cuh")


@pytest.mark.parametrize("stem", STEMS)
def test_files_open_with_what_formula_shapes_threads(stem: str) -> None:
    text = (CUDA_SRC / f"{stem}.cu").read_text(encoding="utf-8")
    opening = re.match(r"(?://[^\n]*\n)+", text)
    assert opening, f"{stem}.cu opens with no comment"
    labels = re.findall(r"^// ([A-Z]\w+):", opening[0], flags=re.MULTILINE)
    assert labels[:4] == ["What", "Formula", "Shapes", "Threads"]


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_headers_open_with_a_comment(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("// ")
