// What:    takes the tokens that may not come out of some rows of logits, in place.
// Formula: l = -inf where the token's bit is 0, unless l is NaN.
// Shapes:  logits FP32 [>= M, VOCAB_SIZE], rows `stride` values apart; rows int32 [M]; masks u32 [M, MASK_WORDS], bit i % 32
//          of word i / 32 for token i; bits behind the vocabulary mean nothing.
// Threads: blockIdx.x is a mask and blockIdx.y a part of its row, EACH tokens for each thread; a warp's neighbouring tokens
//          share a word, and all of a thread's loads are under way before it stores.
#include "common.cuh"

constexpr int EACH = 4;
constexpr int MASK_WORDS = (VOCAB_SIZE + 31) / 32;

extern "C" __global__ void mask_logits(float* logits, int stride, const int* __restrict__ rows,
                                       const unsigned int* __restrict__ masks) {
    wait_for_previous_kernel();
    float* values = logits + static_cast<long long>(rows[blockIdx.x]) * stride;
    const unsigned int* mask = masks + static_cast<long long>(blockIdx.x) * MASK_WORDS;
    const unsigned int first = blockIdx.y * EACH * blockDim.x + threadIdx.x;
    unsigned int words[EACH];
    float old[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned int id = min(first + i * blockDim.x, VOCAB_SIZE - 1u);
        words[i] = mask[id / 32];
        old[i] = values[id];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned int id = first + i * blockDim.x;
        const bool goes = id < VOCAB_SIZE && !(words[i] >> id % 32 & 1) && old[i] == old[i];  // NaN stays
        if (goes) values[id] = -__uint_as_float(0x7f800000u);
    }
}
