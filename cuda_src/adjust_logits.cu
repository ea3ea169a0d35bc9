// What:    biases, penalties and min_tokens: changes single logits in place, and back.
// Formula: for each entry of the sequence's table, each operation in FP32: l + bias; if the token is in the prompt or the
//          output, / repetition where above 0, else * repetition; - count * frequency; - presence where it is in the
//          output; then -inf if it ends the answer and that has fewer than min_tokens tokens.
// Shapes:  logits FP32 [rows, VOCAB_SIZE], rows `stride` values apart; slots, num_outputs, token_rows int32 [rows];
//          token_ids int32 [T], of which token_rows are the rows' last tokens; settings [slots]; tables
//          [tables, table_size]: a head, then entries.
// Threads: a block for each row, a thread for each entry. The last token is counted first, unless it was: a step may
//          run twice.
#include "sampling.cuh"

__device__ __forceinline__ float adjusted(const Adjustment& entry, const Settings& s, int num_outputs) {
    const int count = entry.state / ONE_OUTPUT;
    if (entry.state & ENDS_ANSWER && num_outputs < s.min_tokens) return -__uint_as_float(0x7f800000u);
    float l = __fadd_rn(entry.raw, entry.bias);
    if (entry.state & IN_PROMPT || count > 0) l = l > 0 ? __fdiv_rn(l, s.repetition) : __fmul_rn(l, s.repetition);
    l = __fsub_rn(l, __fmul_rn(static_cast<float>(count), s.frequency));
    return count > 0 ? __fsub_rn(l, s.presence) : l;
}

extern "C" __global__ void adjust_logits(float* logits, int stride, const int* __restrict__ slots,
                                         const int* __restrict__ num_outputs, const int* __restrict__ token_rows,
                                         const int* __restrict__ token_ids, const Settings* __restrict__ settings,
                                         Adjustment* tables, int table_size) {
    wait_for_previous_kernel();
    __shared__ int found;
    const int row = blockIdx.x, outputs = num_outputs[row];
    const Settings s = settings[slots[row]];
    if (s.table == 0) return;
    Adjustment* head = tables + static_cast<long long>(s.table - 1) * table_size;
    Adjustment* entries = head + 1;
    int size = head->id;
    const bool counts = s.repetition != 1 || s.presence != 0 || s.frequency != 0;
    if (counts && head->state < outputs) {
        const int last = token_ids[token_rows[row]];
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += blockDim.x) {
            if (entries[i].id != last) continue;
            entries[i].state += ONE_OUTPUT;
            found = 1;
        }
        __syncthreads();
        const bool is_new = !found;
        if (threadIdx.x == 0) {
            if (is_new) entries[size] = {last, ONE_OUTPUT, 0, 0};
            head->id = size + is_new;
            head->state = outputs;
        }
        size += is_new;
        __syncthreads();
    }
    float* values = logits + static_cast<long long>(row) * stride;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        Adjustment entry = entries[i];
        entries[i].raw = entry.raw = values[entry.id];
        values[entry.id] = adjusted(entry, s, outputs);
    }
}

// The logits as they were.
extern "C" __global__ void restore_logits(float* logits, int stride, const int* __restrict__ slots,
                                          const Settings* __restrict__ settings, const Adjustment* __restrict__ tables,
                                          int table_size) {
    wait_for_previous_kernel();
    const unsigned int table = settings[slots[blockIdx.x]].table;
    if (table == 0) return;
    const Adjustment* head = tables + static_cast<long long>(table - 1) * table_size;
    float* values = logits + static_cast<long long>(blockIdx.x) * stride;
    for (int i = threadIdx.x; i < head->id; i += blockDim.x) values[head[i + 1].id] = head[i + 1].raw;
}
