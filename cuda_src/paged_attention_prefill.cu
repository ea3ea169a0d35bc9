// What:    causal attention of packed chunks of prompts, each over its own pages (cached prefix and chunk).
// Formula: out[i, h] = softmax(q[i, h] K^T * ATTENTION_SCALE) V over the KV tokens up to i's own, in the order of
//          attention.cuh.
// Shapes:  q, out BF16 [T - skipped_rows, NUM_HEADS * HEAD_DIM], without the step's first rows (decodes);
//          kv_cache BF16 [pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM]; block_tables int32 [slots, NUM_LAYERS,
//          max_pages]; query_tiles int32 [tiles, 2]: sequence, and the tile's first token in that sequence's chunk;
//          cu_seqlens_q int32 [S + 1], seq_lens and slots int32 [S].
// Threads: a block of four warps takes one query tile (blockIdx.x) and one KV head (y): 64 query rows, which are
//          QUERY_TOKENS tokens x GROUP heads, 16 for each warp, so that K and V are read once for all heads of a group.
// Shared:  two stages of a tile of K and one of V, of which one arrives while the other is worked on; and, to spare
//          registers, what each thread has of the merged splits.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int QUERY_TOKENS = WARPS * 16 / GROUP;
constexpr int TILE_ELEMENTS = KV_TILE * HEAD_DIM;

static_assert(QUERY_TOKENS > 0, "a token's heads of one KV head must fit in the 64 rows of a block");

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    paged_attention_prefill(const bf16* __restrict__ q, const bf16* __restrict__ kv_cache,
                            const int* __restrict__ block_tables, int max_pages, int layer_idx, int skipped_rows,
                            const int* __restrict__ query_tiles, const int* __restrict__ cu_seqlens_q,
                            const int* __restrict__ seq_lens, const int* __restrict__ slots, bf16* __restrict__ out) {
    wait_for_previous_kernel();
    bf16* const stages = dynamic_shared<bf16>();  // [2 stages][K, V][KV_TILE, HEAD_DIM]
    // [HEAD_DIM / 8][4][threads]; a thread touches its own column only.
    float* const total_out = reinterpret_cast<float*>(stages + 4 * TILE_ELEMENTS) + threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const int sequence = query_tiles[blockIdx.x * 2], first_token = query_tiles[blockIdx.x * 2 + 1];
    const int chunk_start = cu_seqlens_q[sequence], chunk = cu_seqlens_q[sequence + 1] - chunk_start;
    const int prefix = seq_lens[sequence] - chunk;  // KV tokens before the chunk
    const int visible_tokens = prefix + min(first_token + QUERY_TOKENS, chunk);
    const int num_tiles = (visible_tokens + KV_TILE - 1) / KV_TILE;
    const int* pages = block_tables + (static_cast<long long>(slots[sequence]) * NUM_LAYERS + layer_idx) * max_pages;

    int last[2];            // KV tokens that each of the lane's rows sees; 0: no such row
    long long offset[2];    // of the row in q and out
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = warp * 16 + lane / 4 + i * 8, token = first_token + row / GROUP;
        last[i] = row < QUERY_TOKENS * GROUP && token < chunk ? prefix + token + 1 : 0;
        const long long q_row = chunk_start - skipped_rows + token;
        offset[i] = (q_row * NUM_HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
    }
    // The last token of the warp's rows that exist; tiles behind it change nothing.
    const int warp_visible = prefix + min(first_token + (warp * 16 + 15) / GROUP + 1, chunk);

    auto load_tile = [&](int tile) {
        const int first = tile * KV_TILE;
        bf16* const stage = stages + tile % 2 * 2 * TILE_ELEMENTS;
        const int* const tile_pages = pages + first / PAGE_SIZE;
        load_kv(stage, kv_cache, tile_pages, 0, head, KV_TILE, visible_tokens - first);
        load_kv(stage + TILE_ELEMENTS, kv_cache, tile_pages, 1, head, KV_TILE, visible_tokens - first);
    };
    load_tile(0);
    cp_async_commit();
    QueryRows query;
    load_query(query, last[0] ? q + offset[0] : nullptr, last[1] ? q + offset[1] : nullptr);

    SoftmaxState<HEAD_DIM> split;
    split.clear();
    float total_max[2] = {NO_SCORE, NO_SCORE}, total_sum[2] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) total_out[i * THREADS] = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) {
        if (tile + 1 < num_tiles) load_tile(tile + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();  // this tile is there
        const int first = tile * KV_TILE;
        if (first < warp_visible) {
            const bf16* const stage = stages + tile % 2 * 2 * TILE_ELEMENTS;
            const int visible[2] = {last[0] - first, last[1] - first};
            Scores scores;
            Probabilities p;
            float max[2], sum[2];
            tile_scores(scores, query, stage, visible);
            row_max(scores, max);
#pragma unroll
            for (int i = 0; i < 2; ++i) max[i] = fmaxf(max[i], split.max[i]);
            tile_probabilities(p, sum, scores, max);
            split.add_tile(max, sum, p, stage + TILE_ELEMENTS, 0);
        }
        if ((first + KV_TILE) % KV_SPLIT == 0 || tile + 1 == num_tiles) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const MergeWeights weights(total_max[i], split.max[i]);
                total_max[i] = weights.max;
                total_sum[i] = weights.merge(total_sum[i], split.sum[i]);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
                    for (int e = i * 2; e < i * 2 + 2; ++e) {
                        float& out = total_out[(n * 4 + e) * THREADS];
                        out = weights.merge(out, split.out[n][e]);
                    }
                }
            }
            split.clear();
        }
        __syncthreads();  // before the next but one takes its place
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (last[i] == 0) continue;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            const float x = normalized(total_out[(n * 4 + i * 2) * THREADS], total_sum[i]);
            const float y = normalized(total_out[(n * 4 + i * 2 + 1) * THREADS], total_sum[i]);
            *reinterpret_cast<unsigned int*>(out + offset[i] + n * 8 + lane % 4 * 2) = pack_bf16(x, y);
        }
    }
}
