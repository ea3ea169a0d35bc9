// What:    rotates q and k by their positions (Su et al., 2021; split halves, as in Hugging Face's weights) and stores
//          k and v in their pages.
// Formula: with c, s = cos, sin[position]: (a, b) -> (a c - b s, b c + a s) for a in the first, b in the second
//          half of a head; every product and sum in FP32, rounded to BF16 once at the end.
// Shapes:  qkv BF16 [T, (NUM_HEADS + 2 NUM_KV_HEADS) * HEAD_DIM]; cos, sin FP32 [max_positions, HEAD_DIM / 2];
//          positions, kv_index (place in the sequence's KV), token_slots (row of the block tables) int32 [T];
//          block_tables int32 [slots, NUM_LAYERS, max_pages] (-1: don't store);
//          q BF16 [T, NUM_HEADS * HEAD_DIM]; kv_cache BF16 [pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM]
// Threads: one block a token; a thread turns 8 pairs of q or k, or copies 8 values of v, at a time.
#include "common.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIR_CHUNKS = HALF / 8;       // of a head that turns
constexpr int COPY_CHUNKS = HEAD_DIM / 8;   // of a head of v
constexpr int TURNED = (NUM_HEADS + NUM_KV_HEADS) * PAIR_CHUNKS;
constexpr int COPIED = NUM_KV_HEADS * COPY_CHUNKS;

__device__ __forceinline__ void rotate8(const bf16* from, bf16* to, const float* __restrict__ cos,
                                        const float* __restrict__ sin) {
    float a[8], b[8], c[8], s[8], first[8], second[8];
    unpack8(load8(from), a);
    unpack8(load8(from + HALF), b);
    load8(cos, c);
    load8(sin, s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // Not contracted to fused multiply-adds: the same bits as NumPy's.
        first[i] = __fsub_rn(__fmul_rn(a[i], c[i]), __fmul_rn(b[i], s[i]));
        second[i] = __fadd_rn(__fmul_rn(b[i], c[i]), __fmul_rn(a[i], s[i]));
    }
    store8(to, pack8(first));
    store8(to + HALF, pack8(second));
}

extern "C" __global__ void rope_kv_write(const bf16* __restrict__ qkv, const float* __restrict__ cos,
                                         const float* __restrict__ sin, const int* __restrict__ positions,
                                         const int* __restrict__ kv_index, const int* __restrict__ token_slots,
                                         const int* __restrict__ block_tables, int max_pages, int layer_idx,
                                         bf16* __restrict__ q, bf16* __restrict__ kv_cache) {
    launch_next_kernel();  // attention has block tables to look at before it needs this
    wait_for_previous_kernel();
    const long long token = blockIdx.x;
    const bf16* row = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM;
    const long long angle = static_cast<long long>(positions[token]) * HALF;
    const long long table = static_cast<long long>(token_slots[token]) * NUM_LAYERS + layer_idx;
    const int page = block_tables[table * max_pages + kv_index[token] / PAGE_SIZE];
    const int offset = kv_index[token] % PAGE_SIZE;
    // K (0) or V (1) of this token and one head.
    auto place = [&](int kv, int head) {
        const long long block = (static_cast<long long>(page) * 2 + kv) * NUM_KV_HEADS + head;
        return kv_cache + (block * PAGE_SIZE + offset) * HEAD_DIM;
    };
    for (int i = threadIdx.x; i < TURNED + COPIED; i += blockDim.x) {
        if (i < TURNED) {
            const int head = i / PAIR_CHUNKS, start = i % PAIR_CHUNKS * 8;
            const bool is_q = head < NUM_HEADS;
            if (!is_q && page < 0) continue;
            bf16* to = is_q ? q + (token * NUM_HEADS + head) * HEAD_DIM : place(0, head - NUM_HEADS);
            rotate8(row + head * HEAD_DIM + start, to + start, cos + angle + start, sin + angle + start);
        } else if (page >= 0) {
            const int head = (i - TURNED) / COPY_CHUNKS, start = (i - TURNED) % COPY_CHUNKS * 8;
            const bf16* v = row + (NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM;
            store8(place(1, head) + start, load8(v + start));
        }
    }
}
