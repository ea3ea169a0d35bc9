// What:    RMSNorm (Zhang and Sennrich, 2019) of rows; `add_rmsnorm` first finishes the residual addition that a
//          GEMM left as FP32 segments.
// Formula: y = x / sqrt(mean(x^2) + RMS_EPS) * weight in FP32, rounded once.
//          add_rmsnorm: x := BF16(x + (segment 0 + segment 1 + ...)), then the same; x itself is written only where all
//          its rows are asked for (row_ids null), so that it is never half done.
// Shapes:  x BF16 [n, HIDDEN_SIZE], weight BF16 [HIDDEN_SIZE], y BF16 [rows, HIDDEN_SIZE], segments FP32
//          [num_segments, stride], each holding [n, HIDDEN_SIZE]. Row i of y belongs to row row_ids[i] of x; row_ids
//          null: to row i.
// Threads: one block of NORM_THREADS a row; a thread holds 8 neighbouring values (several times 8 where
//          HIDDEN_SIZE > 8 * NORM_THREADS).
#include "common.cuh"

constexpr int CHUNKS = (HIDDEN_SIZE + 8 * NORM_THREADS - 1) / (8 * NORM_THREADS);

__device__ __forceinline__ int chunk_start(int chunk) { return (chunk * NORM_THREADS + threadIdx.x) * 8; }

__device__ __forceinline__ void normalize(const float (&x)[CHUNKS][8], const bf16* __restrict__ weight, bf16* y) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[c][i], x[c][i], sum);
    }
    const float mean = __fmul_rn(block_sum<NORM_THREADS>(sum), 1.0f / HIDDEN_SIZE);
    const float scale = 1.0f / sqrtf(__fadd_rn(mean, RMS_EPS));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int start = chunk_start(c);
        if (start >= HIDDEN_SIZE) continue;
        float w[8], out[8];
        unpack8(load8(weight + start), w);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i] = x[c][i] * scale * w[i];
        store8(y + start, pack8(out));
    }
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    rmsnorm(const bf16* __restrict__ x, const int* __restrict__ row_ids, const bf16* __restrict__ weight,
            bf16* __restrict__ y) {
    wait_for_previous_kernel();
    const long long row = row_ids ? row_ids[blockIdx.x] : blockIdx.x;
    float values[CHUNKS][8] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int start = chunk_start(c);
        if (start < HIDDEN_SIZE) unpack8(load8(x + row * HIDDEN_SIZE + start), values[c]);
    }
    normalize(values, weight, y + static_cast<long long>(blockIdx.x) * HIDDEN_SIZE);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    add_rmsnorm(const float* __restrict__ segments, int num_segments, long long stride, bf16* __restrict__ x,
                const int* __restrict__ row_ids, const bf16* __restrict__ weight, bf16* __restrict__ y) {
    wait_for_previous_kernel();
    const long long row = row_ids ? row_ids[blockIdx.x] : blockIdx.x;
    float values[CHUNKS][8] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int start = chunk_start(c);
        if (start >= HIDDEN_SIZE) continue;
        const long long at = row * HIDDEN_SIZE + start;
        float sum[8];
        sum_segments8(segments + at, num_segments, stride, sum);
        unpack8(load8(x + at), values[c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += values[c][i];
        const uint4 rounded = pack8(sum);
        if (!row_ids) store8(x + at, rounded);
        unpack8(rounded, values[c]);
    }
    normalize(values, weight, y + static_cast<long long>(blockIdx.x) * HIDDEN_SIZE);
}
