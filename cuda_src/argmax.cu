// What:    greedy choice over FP32 logits.
// Formula: ids[i] = the lowest id among the greatest of logits[i]; -1 where the row holds a NaN.
// Shapes:  logits FP32 [rows, VOCAB_SIZE], rows `stride` values apart; ids int32 [rows]; best u64 [rows] and arrived
//          u32 [rows], zero at the start and left zero.
// Threads: blockIdx.x is the row, blockIdx.y one of gridDim.y parts of it. A value and its id make one 64-bit key whose
//          order is theirs, so that maxima may meet in any order; the row's last block writes the id.
#include "common.cuh"

typedef unsigned long long Key;

constexpr Key NAN_KEY = ~0ull;

// Greater values give greater keys; of equal values (-0 equals 0) the lower id does.
__device__ __forceinline__ Key key_of(float logit, int id) {
    unsigned int bits = __float_as_uint(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return NAN_KEY;
    if (bits == 0x80000000u) bits = 0;
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<Key>(bits) << 32 | ~static_cast<unsigned int>(id);
}

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

__device__ __forceinline__ Key warp_max(Key key) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(FULL_MASK, key, offset));
    return key;
}

// The greatest key of this block's part of a row.
__device__ __forceinline__ Key part_max(const float* __restrict__ row, bool aligned) {
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    const int quads = aligned ? VOCAB_SIZE / 4 : 0;  // 16 bytes at a time where rows start at multiples of them
    Key key = 0;
    for (int i = first; i < quads; i += step) {
        const float4 v = reinterpret_cast<const float4*>(row)[i];
        key = larger(key, larger(larger(key_of(v.x, i * 4), key_of(v.y, i * 4 + 1)),
                                 larger(key_of(v.z, i * 4 + 2), key_of(v.w, i * 4 + 3))));
    }
    for (int i = quads * 4 + first; i < VOCAB_SIZE; i += step) key = larger(key, key_of(row[i], i));
    return key;
}

extern "C" __global__ void argmax(const float* __restrict__ logits, int stride, Key* best, unsigned int* arrived,
                                  int* __restrict__ ids) {
    __shared__ Key warp_keys[32];
    const int row = blockIdx.x;
    Key key = warp_max(part_max(logits + static_cast<long long>(row) * stride, stride % 4 == 0));
    if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < blockDim.x / 32; ++w) key = larger(key, warp_keys[w]);
    atomicMax(&best[row], key);
    __threadfence();  // the maximum is there before the arrival is counted
    if (atomicAdd(&arrived[row], 1u) != gridDim.y - 1) return;
    __threadfence();
    const Key winner = atomicExch(&best[row], 0ull);
    ids[row] = winner == NAN_KEY ? -1 : static_cast<int>(~static_cast<unsigned int>(winner));
    arrived[row] = 0;
}
