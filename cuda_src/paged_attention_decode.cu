// What:    attention of one query token a sequence over that sequence's own pages, split over the KV length.
// Formula: out[i, h] = softmax(q[i, h] K^T * ATTENTION_SCALE) V, in the order of attention.cuh.
// Shapes:  q, out BF16 [T, NUM_HEADS * HEAD_DIM], the first `sequences` rows; kv_cache BF16 [pages, 2, NUM_KV_HEADS,
//          PAGE_SIZE, HEAD_DIM]; block_tables int32 [slots, NUM_LAYERS, max_pages]; seq_lens, slots and first_split
//          int32 [sequences]; first_split[i] is where sequence i's splits begin in the scratch:
//          partial_out FP32 [splits, NUM_KV_HEADS * ROW_TILES, 16, HEAD_DIM], partial_max, partial_sum FP32 [.., 16];
//          arrived u32 [sequences * NUM_KV_HEADS * ROW_TILES], zero at the start and left zero.
// Threads: a block of four warps takes one KV head with 16 of its query heads (y) of one sequence (x), and one split (z)
//          or, where gridDim.z is 1, all of them one after another. Warp w makes the scores of tile w; then all warps share
//          the probabilities, and each makes a quarter of the head's columns. Splits are merged in order: by the block that
//          has them all, or by the last one of a row to end.
// Shared:  K and V of a split. K of the next one comes when the scores are made, V when it has been multiplied. With
//          V_WAITS_FOR_K (where both don't fit) V comes into K's place, and the next K into V's.
#include "attention.cuh"

constexpr int TILES = KV_SPLIT / KV_TILE;              // one for each warp
constexpr int ROW_TILES = (GROUP + 15) / 16;           // blocks of 16 query heads of a KV head
constexpr int COLUMNS = HEAD_DIM / TILES;              // of the output, for each warp
constexpr int THREADS = 32 * TILES;
constexpr int SPLIT_ELEMENTS = KV_SPLIT * HEAD_DIM;
constexpr int SPLIT_PAGES = KV_SPLIT / PAGE_SIZE;
constexpr int ROWS_AT_ONCE = THREADS / ROW_CHUNKS;     // KV tokens whose K or V the block loads at once
static_assert(PAGE_SIZE % ROWS_AT_ONCE == 0, "they lie in one page");

// The pages of a split and how many KV tokens it has; in registers, so that no load waits for another page's id.
struct Split {
    int count, pages[SPLIT_PAGES];

    // `table` is a sequence's block table; no tokens behind the last split.
    __device__ __forceinline__ void find(const int* __restrict__ table, int split, int seq_len) {
        count = min(KV_SPLIT, seq_len - split * KV_SPLIT);
#pragma unroll
        for (int i = 0; i < SPLIT_PAGES; ++i) pages[i] = i * PAGE_SIZE < count ? load_here(table + split * SPLIT_PAGES + i) : 0;
    }
    __device__ __forceinline__ int num_tiles() const { return (count + KV_TILE - 1) / KV_TILE; }

    // Starts the copy of K (kv = 0) or V (kv = 1) of one head; in the last tile tokens that don't exist become zeros.
    __device__ __forceinline__ void load(bf16* tiles, const bf16* __restrict__ kv_cache, int kv, int head) const {
        const int chunk = threadIdx.x % ROW_CHUNKS, end = num_tiles() * KV_TILE;
#pragma unroll
        for (int i = 0; i < KV_SPLIT / ROWS_AT_ONCE; ++i) {
            if (i * ROWS_AT_ONCE >= end) break;
            const int row = i * ROWS_AT_ONCE + threadIdx.x / ROW_CHUNKS;
            const long long page = pages[i * ROWS_AT_ONCE / PAGE_SIZE];
            const long long block = (page * 2 + kv) * NUM_KV_HEADS + head;
            cp_async_16(tiles + swizzled(row, chunk),
                        kv_cache + (block * PAGE_SIZE + row % PAGE_SIZE) * HEAD_DIM + chunk * 8, row < count);
        }
        cp_async_commit();
    }
};

// The query heads of this block: first_head + [0, rows).
struct Rows {
    int sequence, first_head, rows;

    __device__ __forceinline__ Rows() {
        const int tile = blockIdx.y % ROW_TILES;
        sequence = blockIdx.x;
        first_head = blockIdx.y / ROW_TILES * GROUP + tile * 16;
        rows = GROUP - tile * 16 < 16 ? GROUP - tile * 16 : 16;
    }
    __device__ __forceinline__ long long offset(int row) const {
        return (static_cast<long long>(sequence) * NUM_HEADS + first_head + row) * HEAD_DIM;
    }
};

// Merges the splits of this block's rows in order and writes the output.
__device__ void merge_splits(const Rows& rows, long long first, int num_splits, const float* partial_out,
                             const float* partial_max, const float* partial_sum, bf16* out) {
    const long long step = gridDim.y * 16;  // rows of the scratch from one split to the next
    for (int i = threadIdx.x; i < rows.rows * (HEAD_DIM / 2); i += blockDim.x) {
        const int row = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2) * 2;
        float max = NO_SCORE, sum = 0.0f, x = 0.0f, y = 0.0f;
        for (int s = 0; s < num_splits; ++s) {
            const long long at = (first + s) * step + blockIdx.y * 16 + row;
            // From L2: other blocks wrote these.
            const MergeWeights weights(max, __ldcg(partial_max + at));
            const float2 part = __ldcg(reinterpret_cast<const float2*>(partial_out + at * HEAD_DIM + column));
            max = weights.max;
            sum = weights.merge(sum, __ldcg(partial_sum + at));
            x = weights.merge(x, part.x);
            y = weights.merge(y, part.y);
        }
        *reinterpret_cast<unsigned int*>(out + rows.offset(row) + column) =
            pack_bf16(normalized(x, sum), normalized(y, sum));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    paged_attention_decode(const bf16* __restrict__ q, const bf16* __restrict__ kv_cache,
                           const int* __restrict__ block_tables, int max_pages, int layer_idx,
                           const int* __restrict__ seq_lens, const int* __restrict__ slots,
                           const int* __restrict__ first_split, float* partial_out, float* partial_max,
                           float* partial_sum, unsigned int* arrived, bf16* __restrict__ out) {
    bf16* const k_tiles = dynamic_shared<bf16>();
    bf16* const v_tiles = V_WAITS_FOR_K ? k_tiles : k_tiles + SPLIT_ELEMENTS;
    __shared__ float tile_max[TILES][16], tile_sum[TILES][16];
    __shared__ __align__(16) unsigned int shared_p[TILES][KV_TILE / 16][32][4];
    __shared__ bool is_last;
    const Rows rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int seq_len = load_here(seq_lens + rows.sequence), num_splits = (seq_len + KV_SPLIT - 1) / KV_SPLIT;
    const bool takes_all = gridDim.z == 1, is_whole = takes_all || num_splits == 1;
    const int end = takes_all ? num_splits : blockIdx.z + 1;
    int split = blockIdx.z;
    const int* const table =
        block_tables + (static_cast<long long>(load_here(slots + rows.sequence)) * NUM_LAYERS + layer_idx) * max_pages;
    const int head = blockIdx.y / ROW_TILES;

    Split here;
    here.find(table, split, seq_len);
    wait_for_previous_kernel();  // what stands above was there before the kernel before this one began
    if (split >= num_splits) return;
    QueryRows query;  // before K and V, behind which it would wait for them
    load_query(query, g < rows.rows ? q + rows.offset(g) : nullptr,
               g + 8 < rows.rows ? q + rows.offset(g + 8) : nullptr);
    here.load(k_tiles, kv_cache, 0, head);
    if (!V_WAITS_FOR_K) here.load(v_tiles, kv_cache, 1, head);
    SoftmaxState<COLUMNS> total;
    total.clear();
    while (true) {
        const int count = here.count, num_tiles = here.num_tiles();
        const bool is_more = split + 1 < end;
        Split next = here;
        if (is_more) next.find(table, split + 1, seq_len);
        cp_async_wait<V_WAITS_FOR_K ? 0 : 1>();
        __syncthreads();  // K is there

        Scores scores;
        if (warp < num_tiles) {
            const int visible[2] = {count - warp * KV_TILE, count - warp * KV_TILE};
            float max[2];
            tile_scores(scores, query, k_tiles + warp * KV_TILE * HEAD_DIM, visible);
            row_max(scores, max);
            if (lane % 4 == 0) tile_max[warp][g] = max[0], tile_max[warp][g + 8] = max[1];
        }
        __syncthreads();  // the maxima are there, and K is done with
        if (V_WAITS_FOR_K) {
            here.load(v_tiles, kv_cache, 1, head);
        } else if (is_more) {
            next.load(k_tiles, kv_cache, 0, head);
        }
        float max_after[TILES][2];  // after each tile, as if one warp went through them in order
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float max = NO_SCORE;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                if (tile < num_tiles) max = fmaxf(max, tile_max[tile][g + i * 8]);
                max_after[tile][i] = max;
            }
        }
        if (warp < num_tiles) {
            Probabilities p;
            float max[2] = {}, sum[2];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                if (tile == warp) max[0] = max_after[tile][0], max[1] = max_after[tile][1];
            }
            tile_probabilities(p, sum, scores, max);
            if (lane % 4 == 0) tile_sum[warp][g] = sum[0], tile_sum[warp][g + 8] = sum[1];
#pragma unroll
            for (int k = 0; k < KV_TILE / 16; ++k)
                *reinterpret_cast<uint4*>(shared_p[warp][k][lane]) = make_uint4(p[k][0], p[k][1], p[k][2], p[k][3]);
        }
        if (!V_WAITS_FOR_K && is_more) {
            cp_async_wait<1>();  // all but the next K
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();  // V and the probabilities are there

        SoftmaxState<COLUMNS> state;
        state.clear();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile >= num_tiles) break;
            Probabilities p;
#pragma unroll
            for (int k = 0; k < KV_TILE / 16; ++k) {
                const uint4 words = *reinterpret_cast<const uint4*>(shared_p[tile][k][lane]);
                p[k][0] = words.x, p[k][1] = words.y, p[k][2] = words.z, p[k][3] = words.w;
            }
            const float sum[2] = {tile_sum[tile][g], tile_sum[tile][g + 8]};
            state.add_tile(max_after[tile], sum, p, v_tiles + tile * KV_TILE * HEAD_DIM, warp * (COLUMNS / 8));
        }
        if (is_whole) {
            total.merge(state);
        } else {
            total = state;
        }
        if (!is_more) break;
        __syncthreads();  // V and the probabilities are done with
        next.load(V_WAITS_FOR_K ? k_tiles : v_tiles, kv_cache, !V_WAITS_FOR_K, head);
        here = next;
        ++split;
    }

    const long long part = (static_cast<long long>(first_split[rows.sequence]) + split) * gridDim.y + blockIdx.y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = g + i * 8;
        if (row >= rows.rows) continue;
        const long long at = part * 16 + row;
        if (!is_whole && warp == 0 && lane % 4 == 0) {
            partial_max[at] = total.max[i];
            partial_sum[at] = total.sum[i];
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            const int column = warp * COLUMNS + n * 8 + lane % 4 * 2;
            const float x = total.out[n][i * 2], y = total.out[n][i * 2 + 1];
            if (!is_whole)
                *reinterpret_cast<float2*>(partial_out + at * HEAD_DIM + column) = make_float2(x, y);
            else
                *reinterpret_cast<unsigned int*>(out + rows.offset(row) + column) =
                    pack_bf16(normalized(x, total.sum[i]), normalized(y, total.sum[i]));
        }
    }
    if (is_whole) return;

    __threadfence();  // this block's part is there before its arrival is counted
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int* counter = arrived + rows.sequence * gridDim.y + blockIdx.y;
        is_last = atomicAdd(counter, 1u) == num_splits - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) {
        __threadfence();
        merge_splits(rows, first_split[rows.sequence], num_splits, partial_out, partial_max, partial_sum, out);
    }
}
