// What:    greedy choice over FP32 logits.
// Formula: ids[i] = the lowest id among the greatest of logits[i]; -1 where the row holds a NaN.
// Shapes:  logits FP32 [rows, VOCAB_SIZE], rows `stride` values apart; ids int32 [rows]; best u64 [rows] and arrived
//          u32 [rows], zero at the start and left zero.
// Threads: blockIdx.x is the row, blockIdx.y one of gridDim.y parts of it. A value and its id make one 64-bit key whose
//          order is theirs, so that maxima may meet in any order; the row's last block writes the id.
#include "logits.cuh"

extern "C" __global__ void argmax(const float* __restrict__ logits, int stride, Key* best, unsigned int* arrived,
                                  int* __restrict__ ids) {
    wait_for_previous_kernel();
    __shared__ Key warp_keys[32];
    const int row = blockIdx.x;
    Key key = warp_max(part_max(row_at(logits, row, stride)));
    if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < blockDim.x / 32; ++w) key = larger(key, warp_keys[w]);
    atomicMax(&best[row], key);
    __threadfence();  // the maximum is there before the arrival is counted
    if (atomicAdd(&arrived[row], 1u) != gridDim.y - 1) return;
    __threadfence();
    const Key winner = atomicExch(&best[row], 0ull);
    ids[row] = winner == NAN_KEY ? -1 : id_of(winner);
    arrived[row] = 0;
}
