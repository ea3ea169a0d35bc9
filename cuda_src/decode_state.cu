// What:    what the device knows of sequences that decode, so that no step needs the host: which token each has chosen
//          last, and which of its tokens end it. A row of a sequence that has ended is padding: it belongs to the slot
//          `nobody`, whose block table is empty, sees no KV, and what is chosen for it is dropped.
// Formula: kept[slot] has a token for even and one for odd places of the sequence, -1 after its end. A step at place p
//          reads that of p and writes that of p + 1, so that it may run twice.
// Shapes:  kept int32 [slots, 2]; stop_ids int32 [slots, STOP_IDS], unused ones -1.
//          begin_decode: rows int32 [3, capacity]: slots (`nobody` from the last sequence on), places of the next inputs,
//          prompt lengths; inputs int32 [6, capacity]: token ids, places, slots, KV lengths, first splits (of the scratch
//          of paged_attention_decode), numbers of output tokens, of which num_rows are written.
//          fill_tokens: token_ids, kv_index, token_slots int32 [>= decodes], slots, seq_lens, logit_slots int32 [decodes].
//          keep_tokens: chosen, logit_slots, logit_rows int32 [rows], kv_index int32 [T].
// Threads: begin_decode: one block, which goes through the rows. The others: a thread for each row.
#include "common.cuh"

constexpr int STOP_IDS = 8;  // cuda_backend.py has it too
constexpr int THREADS = 256;

// The sum of the values of the threads before this one; `total` is that of all. Before the next call all must meet.
__device__ __forceinline__ int block_scan(int value, int& total) {
    __shared__ int warp_totals[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(FULL_MASK, sum, offset);
        if (lane >= offset) sum += below;
    }
    if (lane == 31) warp_totals[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += warp_totals[w];
        total += warp_totals[w];
    }
    return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    begin_decode(int* rows, int capacity, int num_rows, int nobody, int* kept, int* inputs) {
    wait_for_previous_kernel();
    int num_splits = 0;  // of the rows before
    for (int start = 0; start < num_rows; start += THREADS) {
        const int row = start + threadIdx.x;
        const bool exists = row < num_rows;
        int slot = exists ? rows[row] : nobody;
        int place = 0, token = -1, outputs = 0;
        if (slot != nobody) {
            place = rows[capacity + row];
            outputs = place + 1 - rows[2 * capacity + row];
            token = kept[slot * 2 + place % 2];
            rows[capacity + row] = place + 1;
            if (token < 0) kept[slot * 2 + (place + 1) % 2] = -1;  // it stays ended
        }
        if (token < 0) slot = nobody;
        const int seq_len = token < 0 ? 0 : place + 1;
        int total;
        const int first_split = num_splits + block_scan((seq_len + KV_SPLIT - 1) / KV_SPLIT, total);
        num_splits += total;
        if (exists) {
            const int values[6] = {max(token, 0), place, slot, seq_len, first_split, outputs};
#pragma unroll
            for (int i = 0; i < 6; ++i) inputs[i * capacity + row] = values[i];
        }
        __syncthreads();  // all have read the totals
    }
}

// Rows of decode whose token id is negative, in a step that the host has staged.
extern "C" __global__ void fill_tokens(int* token_ids, const int* __restrict__ kv_index, int* token_slots, int* slots,
                                       int* seq_lens, int* logit_slots, int decodes, int nobody, int* kept) {
    wait_for_previous_kernel();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= decodes || token_ids[row] >= 0) return;
    const int token = kept[slots[row] * 2 + kv_index[row] % 2];
    token_ids[row] = max(token, 0);
    if (token >= 0) return;
    kept[slots[row] * 2 + (kv_index[row] + 1) % 2] = -1;
    token_slots[row] = slots[row] = logit_slots[row] = nobody;
    seq_lens[row] = 0;
}

extern "C" __global__ void keep_tokens(const int* __restrict__ chosen, const int* __restrict__ logit_slots,
                                       const int* __restrict__ logit_rows, const int* __restrict__ kv_index, int rows,
                                       int nobody, const int* __restrict__ stop_ids, int* kept) {
    wait_for_previous_kernel();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const int slot = logit_slots[row], token = chosen[row];
    if (slot == nobody) return;
    bool ends = false;
#pragma unroll
    for (int i = 0; i < STOP_IDS; ++i) ends |= stop_ids[slot * STOP_IDS + i] == token;
    kept[slot * 2 + (kv_index[logit_rows[row]] + 1) % 2] = ends ? -1 : token;
}
