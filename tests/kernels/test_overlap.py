"""Kernels that may begin while the one before them runs wait before they touch what it writes.

Read from the compiler's PTX; no GPU. What may stand before the wait: loads that say so (``load_here``).
"""

from __future__ import annotations

import functools
import re

import pytest
from twins import REAL

from samir_vllm.backends import cuda_probe
from samir_vllm.backends.cuda_compile import (
    KERNELS,
    MAX_SHARED_BYTES,
    compiler_options,
    definitions,
    kernel_source,
)

WAIT = "griddepcontrol.wait;"
TRIGGER = "griddepcontrol.launch_dependents;"
GLOBAL_ACCESS = re.compile(
    r"\b(ld\.global|ld\.volatile|st\.global|atom\.|red\.|cp\.async\.(ca|cg|bulk)|exit;|ret;)"
)
EARLY = re.compile(r"ld\.relaxed\.gpu\.global\.s32")

WITH_EARLY_LOADS = {"paged_attention_decode"}
WITH_TRIGGER = {"rope_kv_write"}


@functools.cache
def ptx_of(stem: str) -> dict[str, str]:
    """PTX of each kernel of a file, by name."""
    nvrtc = cuda_probe._nvrtc()
    options = compiler_options("sm_90a", definitions(REAL["llama_1b"], MAX_SHARED_BYTES["sm_90a"]))
    program = nvrtc.createProgram(kernel_source(stem), f"{stem}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = text if isinstance(text, str) else text.decode()
    parts = re.split(r"\.visible \.entry (\w+)\(", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("stem", "kernel"), [(stem, name) for stem, names in KERNELS.items() for name in names]
)
def test_nothing_is_touched_before_the_wait(stem: str, kernel: str) -> None:
    before, wait, _ = ptx_of(stem)[kernel].partition(WAIT)
    assert wait, "a kernel without a wait"
    early = EARLY.findall(before)
    touched = [line.strip() for line in before.splitlines() if GLOBAL_ACCESS.search(line)]
    assert touched == []
    assert bool(early) == (kernel in WITH_EARLY_LOADS)


def test_few_kernels_let_the_next_one_start_early() -> None:
    """None of them comes next to another: a successor could then run beside the kernel before the last."""
    assert {
        name for stem in KERNELS for name, text in ptx_of(stem).items() if TRIGGER in text
    } == WITH_TRIGGER
