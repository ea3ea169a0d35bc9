// What:    gathers rows of a table: the embeddings of the step's tokens, or the rows whose logits are wanted.
// Formula: out[i] = table[ids[i]]
// Shapes:  table BF16 [n, HIDDEN_SIZE], ids int32 [rows], out BF16 [rows, HIDDEN_SIZE]
// Threads: one block a row; a thread copies 16 bytes at a time.
#include "common.cuh"

extern "C" __global__ void embedding(const bf16* __restrict__ table, const int* __restrict__ ids,
                                     bf16* __restrict__ out) {
    wait_for_previous_kernel();
    const bf16* from = table + static_cast<long long>(ids[blockIdx.x]) * HIDDEN_SIZE;
    bf16* to = out + static_cast<long long>(blockIdx.x) * HIDDEN_SIZE;
    for (int i = threadIdx.x * 8; i < HIDDEN_SIZE; i += blockDim.x * 8) store8(to + i, load8(from + i));
}
