// What:    what cuBLAS leaves to do around a GEMM: adding FP32 segments, and the one reduction order as a kernel of
//          its own, to compare cuBLAS with and to stand in for it where it sums otherwise.
// Formula: add_segments: out = BF16((segment 0 + segment 1 + ...) + residual), in FP32 in that order.
//          ordered_linear: y = x w^T; in each of num_segments equal segments of K the sum of m16n8k16 steps in K order,
//          the segments added in order.
// Shapes:  segments FP32 [num_segments, stride]; residual, out BF16 [8 * chunks] (residual null: none);
//          x BF16 [T, K], w BF16 [N, K], y FP32 [T, N], K / num_segments a multiple of 16.
// Threads: add_segments: 8 neighbouring values each. ordered_linear: a warp computes 16 tokens x 32 features, a
//          block 128 features.
#include "common.cuh"

extern "C" __global__ void add_segments(const float* __restrict__ segments, int num_segments, long long stride,
                                        const bf16* residual, bf16* out, long long chunks) {
    wait_for_previous_kernel();
    const long long chunk = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (chunk >= chunks) return;
    float sum[8];
    sum_segments8(segments + chunk * 8, num_segments, stride, sum);
    if (residual) {
        float r[8];
        unpack8(load8(residual + chunk * 8), r);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += r[i];
    }
    store8(out + chunk * 8, pack8(sum));
}

// Two neighbouring values of row `row`; zeros for a row that doesn't exist.
__device__ __forceinline__ unsigned int pair_at(const bf16* __restrict__ m, int row, int rows, int k, int K) {
    return row < rows ? *reinterpret_cast<const unsigned int*>(m + static_cast<long long>(row) * K + k) : 0u;
}

extern "C" __global__ void __launch_bounds__(128)
    ordered_linear(const bf16* __restrict__ x, const bf16* __restrict__ w, float* __restrict__ y, int T, int N, int K,
                   int num_segments) {
    wait_for_previous_kernel();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int token = blockIdx.y * 16 + g, feature = blockIdx.x * 128 + threadIdx.x / 32 * 32;
    const int length = K / num_segments;
    float sum[4][4] = {};
    for (int s = 0; s < num_segments; ++s) {
        float part[4][4] = {};
        for (int k = s * length + t * 2; k < (s + 1) * length; k += 16) {
            const unsigned int a[4] = {pair_at(x, token, T, k, K), pair_at(x, token + 8, T, k, K),
                                       pair_at(x, token, T, k + 8, K), pair_at(x, token + 8, T, k + 8, K)};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = feature + n * 8 + g;
                mma_m16n8k16(part[n], a, pair_at(w, row, N, k, K), pair_at(w, row, N, k + 8, K));
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[n][e] = s == 0 ? part[n][e] : sum[n][e] + part[n][e];
        }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = token + e / 2 * 8, column = feature + n * 8 + t * 2 + e % 2;
            if (row < T && column < N) y[static_cast<long long>(row) * N + column] = sum[n][e];
        }
    }
}

// Adds to *count the number of i < n where the bits of a and b differ.
extern "C" __global__ void count_differences(const unsigned int* __restrict__ a, const unsigned int* __restrict__ b,
                                             long long n, unsigned int* count) {
    wait_for_previous_kernel();
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n && a[i] != b[i]) atomicAdd(count, 1u);
}
