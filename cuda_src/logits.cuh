// What the kernels over rows of logits share: keys whose order is that of the tokens, and ways through a row.
#pragma once

#include "common.cuh"

// A value and its id in one number: greater values give greater keys, of equal values (-0 equals 0) the lower id does.
typedef unsigned long long Key;

constexpr Key NAN_KEY = ~0ull;

// Whole numbers in the order of the values, of which none is NaN.
__device__ __forceinline__ unsigned int rank_of(float logit) {
    unsigned int bits = __float_as_uint(logit);
    if (bits == 0x80000000u) bits = 0;
    return bits ^ (static_cast<unsigned int>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

// The key of a value that isn't NaN.
__device__ __forceinline__ Key number_key(float logit, int id) {
    return static_cast<Key>(rank_of(logit)) << 32 | ~static_cast<unsigned int>(id);
}

__device__ __forceinline__ Key key_of(float logit, int id) {
    return (__float_as_uint(logit) & 0x7fffffffu) > 0x7f800000u ? NAN_KEY : number_key(logit, id);
}

// The upper half of a key.
__device__ __forceinline__ unsigned int rank_of(Key key) { return static_cast<unsigned int>(key >> 32); }

__device__ __forceinline__ float value_at(unsigned int rank) {
    return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

__device__ __forceinline__ int id_of(Key key) { return static_cast<int>(~static_cast<unsigned int>(key)); }

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

__device__ __forceinline__ Key warp_max(Key key) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(FULL_MASK, key, offset));
    return key;
}

// A row of logits; 16 bytes can be read at a time where rows start at multiples of them.
struct Logits {
    const float* __restrict__ values;
    bool aligned;
};

__device__ __forceinline__ Logits row_at(const float* logits, int row, int stride) {
    return {logits + static_cast<long long>(row) * stride, stride % 4 == 0};
}

// The greatest key of this thread's part of a row: every gridDim.y * blockDim.x-th piece of 4 values.
__device__ __forceinline__ Key part_max(const Logits& row) {
    const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    const int quads = row.aligned ? VOCAB_SIZE / 4 : 0;
    Key key = 0;
    for (int i = first; i < quads; i += step) {
        const float4 v = reinterpret_cast<const float4*>(row.values)[i];
        key = larger(key, larger(larger(key_of(v.x, i * 4), key_of(v.y, i * 4 + 1)),
                                 larger(key_of(v.z, i * 4 + 2), key_of(v.w, i * 4 + 3))));
    }
    for (int i = quads * 4 + first; i < VOCAB_SIZE; i += step) key = larger(key, key_of(row.values[i], i));
    return key;
}

// Four values from id `at` on; for each behind the end the last. The end of a row, and all of one that isn't aligned, is
// read one by one.
__device__ __forceinline__ float4 quad_at(const Logits& row, int at, int end) {
    if (row.aligned && at + 4 <= end) return *reinterpret_cast<const float4*>(row.values + at);
    return {row.values[min(at, end - 1)], row.values[min(at + 1, end - 1)],
            row.values[min(at + 2, end - 1)], row.values[min(at + 3, end - 1)]};
}

// One warp's way through the ids from `begin`, a multiple of 4, to before `end`, four at a time: visit(values, id, n) with
// the first's id and their number, 4 but at the end of a row, by the lane `owner_of` them.
template <class Visit>
__device__ __forceinline__ void walk(const Logits& row, int begin, int end, Visit visit) {
    constexpr int AHEAD = 3;  // loads in flight in each lane
    int at = begin + threadIdx.x % 32 * 4;
    float4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) ahead[i] = quad_at(row, at + i * 128, end);
#pragma unroll 1  // or the compiler takes seconds
    for (; at < end; at += 128) {
        const float values[4] = {ahead[0].x, ahead[0].y, ahead[0].z, ahead[0].w};
#pragma unroll
        for (int i = 1; i < AHEAD; ++i) ahead[i - 1] = ahead[i];
        ahead[AHEAD - 1] = quad_at(row, at + AHEAD * 128, end);
        visit(values, at, min(4, end - at));
    }
}

__device__ __forceinline__ int owner_of(int id, int begin) { return (id - begin) / 4 % 32; }

// The part of a row from `begin` to before `end` that one of `parts` warps takes: a multiple of 4 ids.
__device__ __forceinline__ int part_width(int begin, int end, int parts) {
    return ((end - begin + parts - 1) / parts + 3) & ~3;
}
