// What several kernels share: BF16 in and out of registers, and sums whose order is fixed.
//
// The sizes in capitals (HIDDEN_SIZE, HEAD_DIM, ...) are the model's; they come with the compiler's command line
// (samir_vllm/backends/cuda_compile.py). BF16 arrays are unsigned short; 8 values travel as one uint4.
#pragma once

#include "ptx.cuh"

typedef unsigned short bf16;

constexpr unsigned int FULL_MASK = 0xffffffffu;
constexpr int KV_SPLIT = 256;  // KV tokens of one partial softmax of attention

__device__ __forceinline__ float bf16_to_float(unsigned int bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ void unpack8(const uint4& packed, float (&values)[8]) {
    const unsigned int words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
    return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                      pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
}

__device__ __forceinline__ uint4 load8(const bf16* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ void store8(bf16* p, const uint4& packed) { *reinterpret_cast<uint4*>(p) = packed; }

__device__ __forceinline__ void load8(const float* p, float (&values)[8]) {
    const float4 low = reinterpret_cast<const float4*>(p)[0], high = reinterpret_cast<const float4*>(p)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// FP32 sum of 8 neighbouring values of every segment, [num_segments, stride] at p, added in order.
__device__ __forceinline__ void sum_segments8(const float* p, int num_segments, long long stride, float (&sum)[8]) {
    load8(p, sum);
    for (int s = 1; s < num_segments; ++s) {
        float part[8];
        load8(p + s * stride, part);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += part[i];
    }
}

// Sum over a block of THREADS (a multiple of 32), the same bits in every thread: a butterfly in each warp, then
// over the warps in order.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float warp_sums[THREADS / 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_MASK, value, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = warp_sums[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) sum += warp_sums[w];
    return sum;
}
