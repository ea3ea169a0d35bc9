// The arithmetic of paged attention, shared by prefill and decode so that both give the same bits.
//
// One order for every query row, whatever runs beside it: the KV sequence is cut at absolute positions into splits of
// KV_SPLIT tokens, a split into tiles of KV_TILE. Inside a split the softmax is online (Milakov and Gimelshein, 2018)
// over its tiles in order; splits are merged in order. Scores, maxima, sums and outputs are FP32 in registers;
// probabilities enter P x V as BF16, their sum doesn't. A tile (of finite V) that a row can't see leaves its state as
// it was, bit by bit, so it doesn't matter who skips it.
//
// Rows of an m16n8k16 step are query rows (tokens x heads of one KV head), columns KV tokens or places of a head.
// With g = lane / 4 and t = lane % 4, a lane holds rows g and g + 8 (index 0 and 1 below).
#pragma once

#include "common.cuh"

constexpr int KV_TILE = 64;
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;  // query heads of one KV head
constexpr int ROW_CHUNKS = HEAD_DIM / 8;         // 16-byte pieces of a row of K or V
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float SCORE_SCALE = ATTENTION_SCALE * LOG2_E;  // scores are powers of two
#define NO_SCORE __int_as_float(0xff800000)  // -infinity

static_assert(HEAD_DIM % 64 == 0, "the swizzle below permutes the 16-byte pieces of a row in groups of 8");

// Where piece `chunk` of row `row` of a [rows, HEAD_DIM] tile lies in shared memory: permuted, so that the eight rows
// that ldmatrix reads at once lie in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * HEAD_DIM + (chunk ^ (row & 7)) * 8; }

// Starts the copy of K (kv = 0) or V (kv = 1) of `rows` KV tokens of one head to a tile. `pages` is the block table
// from the first of those tokens on; tokens from `count` on become zeros and are never read.
__device__ __forceinline__ void load_kv(bf16* tile, const bf16* __restrict__ kv_cache, const int* __restrict__ pages,
                                        int kv, int head, int rows, int count) {
    for (int i = threadIdx.x; i < rows * ROW_CHUNKS; i += blockDim.x) {
        const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        const bool valid = row < count;
        const long long page = valid ? pages[row / PAGE_SIZE] : 0;
        const long long block = (page * 2 + kv) * NUM_KV_HEADS + head;
        const bf16* from = kv_cache + (block * PAGE_SIZE + row % PAGE_SIZE) * HEAD_DIM + chunk * 8;
        cp_async_16(tile + swizzled(row, chunk), valid ? from : kv_cache, valid);
    }
}

typedef unsigned int QueryRows[HEAD_DIM / 16][4];

// Query rows as the first operand; a null pointer is a row of zeros.
__device__ __forceinline__ void load_query(QueryRows& q, const bf16* row0, const bf16* row1) {
    const int t = threadIdx.x % 4;
    const unsigned int* p0 = reinterpret_cast<const unsigned int*>(row0);
    const unsigned int* p1 = reinterpret_cast<const unsigned int*>(row1);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        q[k][0] = p0 ? p0[k * 8 + t] : 0u;
        q[k][1] = p1 ? p1[k * 8 + t] : 0u;
        q[k][2] = p0 ? p0[k * 8 + t + 4] : 0u;
        q[k][3] = p1 ? p1[k * 8 + t + 4] : 0u;
    }
}

typedef float Scores[KV_TILE / 8][4];  // [columns 8n + 2t, 8n + 2t + 1 of row 0, then of row 1]

// Scaled scores of a tile; NO_SCORE from column visible[i] on for row i.
__device__ __forceinline__ void tile_scores(Scores& scores, const QueryRows& q, const bf16* k_tile,
                                            const int (&visible)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < KV_TILE / 8; n += 2) {
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            unsigned int b[4];  // tokens 8n..8n+7 (b[0], b[1]) and the next eight (b[2], b[3])
            const int row = n * 8 + lane / 16 * 8 + lane % 8, chunk = k * 2 + lane / 8 % 2;
            ldmatrix_x4(b, k_tile + swizzled(row, chunk));
            mma_m16n8k16(low, q[k], b[0], b[1]);
            mma_m16n8k16(high, q[k], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = n * 8 + lane % 4 * 2 + e % 2;
            scores[n][e] = column < visible[e / 2] ? low[e] * SCORE_SCALE : NO_SCORE;
            scores[n + 1][e] = column + 8 < visible[e / 2] ? high[e] * SCORE_SCALE : NO_SCORE;
        }
    }
}

// The greatest score of each row; the same in all four lanes that share a row.
__device__ __forceinline__ void row_max(const Scores& scores, float (&max)[2]) {
    max[0] = max[1] = NO_SCORE;
#pragma unroll
    for (int n = 0; n < KV_TILE / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) max[e / 2] = fmaxf(max[e / 2], scores[n][e]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        max[i] = fmaxf(max[i], __shfl_xor_sync(FULL_MASK, max[i], 1));
        max[i] = fmaxf(max[i], __shfl_xor_sync(FULL_MASK, max[i], 2));
    }
}

// 2^(x - max), where a row that has seen nothing (max is NO_SCORE) gives 0.
__device__ __forceinline__ float weight_of(float x, float max) {
    return exp2_approx(__fsub_rn(x, max == NO_SCORE ? 0.0f : max));
}

typedef unsigned int Probabilities[KV_TILE / 16][4];  // the first operand of P x V

// Probabilities of a tile before normalisation, as BF16, and their FP32 sums.
__device__ __forceinline__ void tile_probabilities(Probabilities& p, float (&sum)[2], const Scores& scores,
                                                   const float (&max)[2]) {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < KV_TILE / 8; ++n) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            w[e] = weight_of(scores[n][e], max[e / 2]);
            sum[e / 2] = __fadd_rn(sum[e / 2], w[e]);
        }
        p[n / 2][n % 2 * 2] = pack_bf16(w[0], w[1]);
        p[n / 2][n % 2 * 2 + 1] = pack_bf16(w[2], w[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_MASK, sum[i], 1));
        sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_MASK, sum[i], 2));
    }
}

// Merging a later split into what came before: both are scaled to the greater maximum.
struct MergeWeights {
    float max, before, split;
    __device__ __forceinline__ MergeWeights(float max_before, float split_max)
        : max(fmaxf(max_before, split_max)), before(weight_of(max_before, max)), split(weight_of(split_max, max)) {}
    __device__ __forceinline__ float merge(float value_before, float split_value) const {
        return __fmaf_rn(split_value, split, __fmul_rn(value_before, before));
    }
};

// What a row of queries knows of a stretch of KV: the greatest score, the sum of 2^(score - max), and their product
// with V at COLUMNS places of the head (of two rows, in the order of an m16n8k16 result).
template <int COLUMNS>
struct SoftmaxState {
    float max[2], sum[2];
    float out[COLUMNS / 8][4];

    __device__ __forceinline__ void clear() {
        max[0] = max[1] = NO_SCORE;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[n][e] = 0.0f;
        }
    }

    // Takes in a tile: its row maxima, sums and probabilities (made with the maximum after it), and columns
    // first_chunk * 8 on of its V.
    __device__ __forceinline__ void add_tile(const float (&new_max)[2], const float (&tile_sum)[2],
                                             const Probabilities& p, const bf16* v_tile, int first_chunk) {
        const float fade[2] = {weight_of(max[0], new_max[0]), weight_of(max[1], new_max[1])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = new_max[i];
            sum[i] = __fmaf_rn(sum[i], fade[i], tile_sum[i]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) out[n][e] = __fmul_rn(out[n][e], fade[e / 2]);
        }
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < KV_TILE / 16; ++k) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                unsigned int b[4];  // columns 8n..8n+7 (b[0], b[1]) and the next eight (b[2], b[3])
                const int row = k * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = first_chunk + n + lane / 16;
                ldmatrix_x4_trans(b, v_tile + swizzled(row, chunk));
                mma_m16n8k16(out[n], p[k], b[0], b[1]);
                mma_m16n8k16(out[n + 1], p[k], b[2], b[3]);
            }
        }
    }

    // Takes in a later split.
    __device__ __forceinline__ void merge(const SoftmaxState& split) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const MergeWeights weights(max[i], split.max[i]);
            max[i] = weights.max;
            sum[i] = weights.merge(sum[i], split.sum[i]);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
                for (int e = i * 2; e < i * 2 + 2; ++e) out[n][e] = weights.merge(out[n][e], split.out[n][e]);
            }
        }
    }
};

// The output of a row, rounded by whoever stores it.
__device__ __forceinline__ float normalized(float out, float sum) { return __fdiv_rn(out, sum); }
