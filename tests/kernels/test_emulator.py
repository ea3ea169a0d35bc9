"""The emulator's own tests: each mistake it is there for is found, and what is right isn't called wrong."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
from emulated import EmulatorError

# Slow: each test builds a program of its own.
pytestmark = [pytest.mark.emulated, emulated.needs_compiler, pytest.mark.slow]


PTX = emulated.header("ptx.cuh")


def launch(
    body: str,
    *args: Any,
    threads: int = 64,
    blocks: int = 1,
    shared: int = 0,
    parameters: str = "float* out",
    bounds: str = "",
) -> Any:
    """Runs a kernel of this body; its first line is line 1 of ``planted.cu``."""
    source = (
        f"{PTX}\n"
        f'extern "C" __global__ void {bounds} planted({parameters})\n#line 0 "planted.cu"\n{{\n{body}\n}}\n'
    )
    program = emulated.builder().program(source, ["planted"], ()).result()
    emulated.run(program, "planted", (blocks,), (threads,), args, shared)
    return args[0]


def floats(n: int = 64) -> Any:
    array = emulated.empty((n,), np.float32)
    array[:] = np.arange(n)
    return array


def fails(pattern: str, body: str, *args: Any, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=re.compile(pattern, re.DOTALL)):
        launch(body, *(args or (floats(),)), **options)


NEIGHBOUR = """__shared__ float x[64];
    x[threadIdx.x] = out[threadIdx.x];
    BARRIER
    out[threadIdx.x] = x[threadIdx.x ^ 33];"""


# Races and copies


def test_a_missing_barrier_is_a_race() -> None:
    fails("planted: .*a race: element", NEIGHBOUR.replace("BARRIER", ""))
    got = launch(NEIGHBOUR.replace("BARRIER", "__syncthreads();"), floats())
    np.testing.assert_array_equal(got, np.arange(64) ^ 33)


def test_blocks_that_need_an_order_are_a_race() -> None:
    fails("a race.*argument 0", "if (threadIdx.x == 0) out[0] = blockIdx.x;", blocks=3)


COPY = """__shared__ __align__(16) float x[2][64];
    if (threadIdx.x < 16) cp_async_16(&x[0][threadIdx.x * 4], out + threadIdx.x * 4, true);
    cp_async_commit();
    WAIT
    __syncthreads();
    out[threadIdx.x] = x[0][63 - threadIdx.x];"""


def test_a_missing_wait_for_a_copy_is_a_race() -> None:
    fails("a race", COPY.replace("WAIT", ""))
    fails("a race", COPY.replace("WAIT", "cp_async_wait<1>();"))
    np.testing.assert_array_equal(
        launch(COPY.replace("WAIT", "cp_async_wait<0>();"), floats()), np.arange(64)[::-1]
    )


STAGES = """__shared__ __align__(16) float stage[2][64];
    float sum = 0;
    auto load = [&](int i) {
        if (threadIdx.x >= 16) return;
        cp_async_16(&stage[i % 2][threadIdx.x * 4], from + i * 64 + threadIdx.x * 4, true);
    };
    load(0);
    cp_async_commit();
    for (int i = 0; i < 4; ++i) {
        if (i + 1 < 4) load(i + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        sum += stage[i % 2][63 - threadIdx.x];
        BARRIER
    }
    out[threadIdx.x] = sum;"""


def test_a_stage_taken_while_others_read_it_is_a_race() -> None:
    parameters = "float* out, const float* from"
    options: dict[str, Any] = {"parameters": parameters}
    fails("a race", STAGES.replace("BARRIER", ""), floats(), floats(256), **options)
    got = launch(STAGES.replace("BARRIER", "__syncthreads();"), floats(), floats(256), **options)
    np.testing.assert_array_equal(got, 4 * np.arange(64)[::-1] + 64 * 6)


@pytest.mark.parametrize("memory", ["x", "dynamic_shared<float>()"])
def test_use_of_unwritten_shared_memory_is_found(memory: str) -> None:
    """Even by a maximum, which passes over NaN."""
    body = f"__shared__ float x[64]; out[threadIdx.x] = fmaxf(out[threadIdx.x], {memory}[threadIdx.x]);"
    fails("a race", body, shared=256)
    got = launch(
        f"__shared__ float x[64]; if (threadIdx.x == 64) out[0] = {memory}[0];", floats(), shared=256
    )
    np.testing.assert_array_equal(got, np.arange(64))


# Memory


def test_an_overrun_of_global_memory_is_found_where_it_is() -> None:
    fails(
        "heap-buffer-overflow.*read of size 4.*planted.cu:2",
        "float y = 0;\n    y = out[threadIdx.x + 1]; out[0] = y;",
    )
    fails("heap-buffer-overflow.*write of size 4.*planted.cu:1", "out[64] = 1;")


def test_a_view_is_as_exact_as_its_array() -> None:
    whole = floats(128)
    fails("heap-buffer-overflow.*write", "out[threadIdx.x + 1] = 1;", whole[:64])
    launch("out[threadIdx.x + 1] = 1;", whole)


def test_views_of_one_array_stay_views() -> None:
    whole = floats(96)
    launch("b[0] = 7; out[63] = 8;", whole[:64], whole[32:], parameters="float* out, float* b", threads=1)
    assert whole[32] == 7
    assert whole[63] == 8


def test_an_overrun_of_static_shared_memory_is_found() -> None:
    body = """__shared__ float x[64], y[64]; float* volatile hidden = x; float* p = hidden; INDEX = 1;
        y[0] = 1; out[0] = x[0] + y[0];"""
    fails("index 64 out of bounds.*planted.cu:1", body.replace("INDEX", "x[threadIdx.x + 1]"))
    fails("global-buffer-overflow.*planted.cu:1", body.replace("INDEX", "p[threadIdx.x + 1]"))


def test_an_overrun_of_dynamic_shared_memory_is_found() -> None:
    fails(
        "heap-buffer-overflow.*planted.cu:1", "dynamic_shared<float>()[threadIdx.x] = out[0];", shared=63 * 4
    )


def test_a_misaligned_vector_is_found() -> None:
    fails("misaligned address.*planted.cu:1", "out[0] = reinterpret_cast<float4*>(out + 1)->x;", threads=1)


def test_a_misaligned_or_foreign_copy_is_found() -> None:
    fails("outside the block's shared memory", "cp_async_16(out, out, true);", threads=1)
    fails(
        "no multiple of 16", "__shared__ __align__(16) float x[64]; cp_async_16(x + 1, out, true);", threads=1
    )
    fails(
        "no multiple of 16", "__shared__ __align__(16) float x[64]; cp_async_16(x, out + 1, true);", threads=1
    )
    fails(
        "heap-buffer-overflow",
        "__shared__ __align__(16) float x[64]; cp_async_16(x, out + 64, true);",
        threads=1,
    )
    launch("__shared__ __align__(16) float x[64]; cp_async_16(x, out + 64, false);", floats(), threads=1)


# Threads that wait


def test_barriers_in_different_places_are_found() -> None:
    fails(r"__syncthreads at planted.cu:[13].*__syncthreads at planted.cu:[13]",
          "if (threadIdx.x < 32) __syncthreads();\n    else\n    __syncthreads();")  # fmt: skip


def test_lanes_at_different_collectives_are_found() -> None:
    fails("__shfl_xor_sync at planted.cu:[12].*__shfl_xor_sync at planted.cu:[12]",
          "if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);\n"
          "    else out[threadIdx.x] = __shfl_xor_sync(~0u, 2.0f, 1);")  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        "mma_m16n8k16(c, a, 1, 2);",
        "ldmatrix_x4(a, x + threadIdx.x * 4);",
        "ldmatrix_x4_trans(a, x + threadIdx.x * 4);",
        "named_barrier(1, 32);",
    ],
)
def test_lanes_that_come_to_a_warps_instruction_from_two_places_are_found(call: str) -> None:
    prepare = (
        "__shared__ __align__(16) float x[128]; x[threadIdx.x] = 0; float c[4] = {}; unsigned int a[4] = {};"
    )
    name = call.partition("(")[0]
    fails(rf"{name} at planted.cu:[23].*{name} at planted.cu:[23]",
          f"{prepare}\nif (threadIdx.x % 2) {call}\nelse {call}", threads=32)  # fmt: skip
    launch(f"{prepare}\n{call}", floats(), threads=32)


def test_a_named_barrier_takes_whole_warps() -> None:
    body = "if (threadIdx.x PART) named_barrier(1, 64);"
    fails("of warp 0 only lanes 0x55555555 have come", body.replace("PART", "% 2 == 0"), threads=128)
    launch(body.replace("PART", "/ 32 % 2 == 0"), floats(), threads=128)


def test_a_lane_that_has_ended_is_found() -> None:
    body = "if (threadIdx.x == 40) return; __syncwarp();"
    fails("end", body)
    fails("lanes 0xffff0000 of the mask have ended", "__syncwarp();", threads=16)


def test_a_lane_outside_the_mask_is_found() -> None:
    fails("isn't in its own mask", "__syncwarp(0xffffu);")
    fails("reads lane 31", "if (threadIdx.x < 16) out[0] = __shfl_sync(0xffffu, 1.0f, 31);")


def test_a_deadlock_is_found() -> None:
    fails("deadlock: .*named_barrier", "if (threadIdx.x < 32) named_barrier(1, 64);")
    fails(
        "deadlock: .*mbarrier_wait",
        "__shared__ Mbarrier b; mbarrier_init(&b, 2); mbarrier_wait(&b, 0);",
        threads=1,
    )


def test_a_bulk_copy_that_nobody_waits_for_is_found() -> None:
    body = """__shared__ __align__(16) float x[64];
        __shared__ Mbarrier b;
        mbarrier_init(&b, 1);
        mbarrier_arrive_expect_tx(&b, 256);
        bulk_copy(x, out, 256, &b);
        WAIT"""
    only_one = body.replace("WAIT", "if (blockIdx.x == 0) mbarrier_wait(&b, 0);")
    fails(r"block \(1, 0, 0\) ends.*256 bytes", only_one, threads=1, blocks=2)
    launch(body.replace("WAIT", "mbarrier_wait(&b, 0);"), floats(), threads=1, blocks=2)


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CPU_SECONDS", "1")
    fails("no end after 1 s of processor time.*planted.cu:1", "while (*(volatile float*)out >= 0);")


def test_threads_that_have_ended_hold_up_no_block_barrier() -> None:
    got = launch("if (threadIdx.x >= 32) return; __syncthreads(); out[threadIdx.x] = -1;", floats())
    np.testing.assert_array_equal(got, [*[-1] * 32, *range(32, 64)])


# Launches


def test_arguments_that_do_not_fit_the_kernel_are_found() -> None:
    parameters = "float* out, int n"
    launch("out[0] = n;", floats(), np.int32(5), parameters=parameters)
    fails("1 arguments of a kernel with 2", "out[0] = n;", floats(), parameters=parameters)
    fails("number of 8 bytes, the kernel's parameter a number of 4", "out[0] = n;", floats(), np.int64(5),
          parameters=parameters)  # fmt: skip
    fails("a pointer of 8 bytes, the kernel's parameter a number", "out[0] = n;", floats(), floats(),
          parameters=parameters)  # fmt: skip
    fails(
        "argument 1 is a int, which CuPy would pass as 64 bits",
        "out[0] = n;",
        floats(),
        5,
        parameters=parameters,
    )


@pytest.mark.parametrize("bounds", ["__launch_bounds__(32 * 2)", "__launch_bounds__((32 + 32), 4)"])
def test_more_threads_than_the_kernel_allows_are_found(bounds: str) -> None:
    launch("out[threadIdx.x] = 0;", floats(), bounds=bounds)
    fails("blocks of 65 threads, where the kernel allows 64", "out[0] = 0;", threads=65, bounds=bounds)


def test_a_grid_or_block_that_cuda_refuses_is_found() -> None:
    for size in ({"blocks": 0}, {"blocks": 2**31}, {"threads": 0}, {"threads": 1025}):
        fails("CUDA refuses", "", **size)


def test_more_shared_memory_than_a_block_may_have_is_found() -> None:
    body = "__shared__ float x[64]; x[threadIdx.x] = 0; dynamic_shared<float>()[threadIdx.x] = x[63];"
    most = emulated.MAX_SHARED_BYTES - 256
    launch(body, floats(), shared=most)
    fails(
        f"256 bytes of shared memory and {most + 4} dynamic ones, where a block may have",
        body,
        shared=most + 4,
    )


def test_a_builder_leaves_alone_what_others_take_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_remove = shutil.rmtree

    def second(folder: Path, **options: Any) -> None:
        really_remove(folder)
        really_remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", second)
    (tmp_path / "gone").symlink_to("nowhere")  # listed, but not there
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    emulated.Builder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gone"]


def test_text_that_does_not_compile_says_where() -> None:
    fails("planted.cu:1.*undefined_name", "out[0] = undefined_name;")


# What CUDA says they mean


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("__shfl_sync(~0u, lane, 5)", [5] * 32),
        ("__shfl_sync(~0u, lane, 1, 8)", [i // 8 * 8 + 1 for i in range(32)]),
        ("__shfl_xor_sync(~0u, lane, 9)", [i ^ 9 for i in range(32)]),
        ("__shfl_xor_sync(~0u, lane, 8, 8)", [i if i & 8 == 0 else i ^ 8 for i in range(32)]),
        ("__shfl_up_sync(~0u, lane, 3)", [i - 3 if i >= 3 else i for i in range(32)]),
        ("__shfl_down_sync(~0u, lane, 3, 16)", [i + 3 if i % 16 < 13 else i for i in range(32)]),
        ("__ballot_sync(~0u, lane % 3 == 0)", [sum(1 << i for i in range(0, 32, 3))] * 32),
        ("__any_sync(~0u, lane == 7)", [1] * 32),
        ("__all_sync(~0u, lane != 7)", [0] * 32),
        ("__syncthreads_count(lane < 5)", [5] * 32),
        ("__syncthreads_or(lane == 5)", [1] * 32),
        ("__syncthreads_and(lane == 5)", [0] * 32),
    ],
)
def test_exchanges(expression: str, expected: list[int]) -> None:
    out = emulated.empty((32,), np.uint32)
    body = f"const int lane = threadIdx.x; out[lane] = {expression};"
    launch(body, out, threads=32, parameters="unsigned int* out")
    np.testing.assert_array_equal(out, np.array(expected, np.uint32))


def test_upper_halves_of_products() -> None:
    factors = [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1, 0xD2511F53_9E3779B9]
    x, low, high = (emulated.empty((36,), np.uint64) for _ in range(3))
    x[:12] = np.array([*factors, *factors], np.uint64)
    body = """const unsigned long long a = x[threadIdx.x / 6], b = x[threadIdx.x % 6];
        high[threadIdx.x] = __umul64hi(a, b);
        low[threadIdx.x] = __umulhi(a, b);"""
    parameters = "unsigned long long* high, unsigned long long* low, const unsigned long long* x"
    launch(body, high, low, x, threads=36, parameters=parameters)
    pairs = [(a, b) for a in factors for b in factors]
    assert high.tolist() == [a * b >> 64 for a, b in pairs]
    assert low.tolist() == [(a % 2**32) * (b % 2**32) >> 32 for a, b in pairs]


def test_atomics() -> None:
    out = emulated.empty((8,), np.int32)
    out[:] = [0, -5, 900, 0, 0, -1, 0, 0]
    body = """const int i = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(out, 1);
        atomicMax(out + 1, i);
        atomicMin(out + 2, i);
        if (i == 9) atomicExch(out + 3, 4);
        atomicOr(out + 4, 1 << i % 5);
        atomicAnd(out + 5, ~(1 << i % 5));
        if (atomicCAS(out + 6, 0, 77) == 0) atomicAdd(out + 7, 1);"""
    launch(body, out, blocks=4, parameters="int* out")
    np.testing.assert_array_equal(out, [256, 255, 0, 4, 31, ~31, 77, 1])


def test_subnormals_are_flushed() -> None:
    out = floats()
    out[:2] = 1e-30, 1e-39
    launch("out[2] = out[0] * 1e-10f; out[3] = out[1] * 2.0f;", out, threads=1)
    assert out[2] == 0
    assert out[3] == 0
