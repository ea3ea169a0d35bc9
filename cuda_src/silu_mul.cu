// What:    the gated activation of the MLP (Shazeer, 2020).
// Formula: out = gate / (1 + exp(-gate)) * up in FP32, rounded once.
// Shapes:  gate_up BF16 [rows, 2 * INTERMEDIATE_SIZE], gate first; out BF16 [rows, INTERMEDIATE_SIZE]
// Threads: each 8 neighbouring values; blockIdx.x is the row.
#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

extern "C" __global__ void silu_mul(const bf16* __restrict__ gate_up, bf16* __restrict__ out) {
    wait_for_previous_kernel();
    const int start = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (start >= INTERMEDIATE_SIZE) return;
    const long long row = blockIdx.x;
    const bf16* from = gate_up + row * 2 * INTERMEDIATE_SIZE + start;
    float gate[8], up[8];
    unpack8(load8(from), gate);
    unpack8(load8(from + INTERMEDIATE_SIZE), up);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // Where the exponential overflows the result is 0, as it should be.
        gate[i] = gate[i] / (1.0f + exp2_approx(-gate[i] * LOG2_E)) * up[i];
    }
    store8(out + row * INTERMEDIATE_SIZE + start, pack8(gate));
}
