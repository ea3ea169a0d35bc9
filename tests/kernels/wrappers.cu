// What:    the wrappers of ptx.cuh, one kernel each, for test_wrappers.py: on the CPU and on a GPU.
// Formula: each kernel hands its inputs to one wrapper and stores what comes out.
// Shapes:  given with each kernel; all arrays are contiguous.
// Threads: one block of a warp, unless a kernel says otherwise.
#include "common.cuh"

// pairs u32 [n] = pack_bf16(low[i], high[i])
extern "C" __global__ void pack(const float* low, const float* high, unsigned int* pairs, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) pairs[i] = pack_bf16(low[i], high[i]);
}

// y FP32 [n] = exp2_approx(x[i])
extern "C" __global__ void power_of_two(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = exp2_approx(x[i]);
}

// c FP32 [16, 8] += a BF16 [16, 16] times b BF16 [8, 16] transposed
extern "C" __global__ void multiply(const bf16* a, const bf16* b, float* c) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto pair = [](const bf16* at) { return *reinterpret_cast<const unsigned int*>(at); };
    const unsigned int rows[4] = {pair(a + g * 16 + t * 2), pair(a + (g + 8) * 16 + t * 2),
                                  pair(a + g * 16 + t * 2 + 8), pair(a + (g + 8) * 16 + t * 2 + 8)};
    float* const place[4] = {c + g * 8 + t * 2, c + g * 8 + t * 2 + 1, c + (g + 8) * 8 + t * 2,
                             c + (g + 8) * 8 + t * 2 + 1};
    float sums[4] = {*place[0], *place[1], *place[2], *place[3]};
    mma_m16n8k16(sums, rows, pair(b + g * 16 + t * 2), pair(b + g * 16 + t * 2 + 8));
    for (int i = 0; i < 4; ++i) *place[i] = sums[i];
}

// registers u32 [2, 32, 4]: of each lane, plain and transposed, from four matrices of u16 [4, 8, 8]
extern "C" __global__ void load_matrices_both_ways(const bf16* matrices, unsigned int* registers) {
    __shared__ __align__(16) bf16 tile[4 * 64];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = matrices[i];
    __syncthreads();
    unsigned int r[4];
    ldmatrix_x4(r, tile + threadIdx.x * 8);
    for (int i = 0; i < 4; ++i) registers[threadIdx.x * 4 + i] = r[i];
    ldmatrix_x4_trans(r, tile + threadIdx.x * 8);
    for (int i = 0; i < 4; ++i) registers[128 + threadIdx.x * 4 + i] = r[i];
}

// to u32 [32, 4] = from u32 [32, 4], row by row where valid[row], else zeros; through dynamic shared memory.
extern "C" __global__ void copy_rows(const uint4* from, const int* valid, uint4* to) {
    uint4* const rows = dynamic_shared<uint4>();
    cp_async_16(rows + threadIdx.x, from + threadIdx.x, valid[threadIdx.x] != 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    to[threadIdx.x] = rows[31 - threadIdx.x];
}

// order int32 [64]: two named barriers hand a word from warp 0 to warp 1 and back (64 threads).
extern "C" __global__ void take_turns(int* order) {
    __shared__ int word;
    if (threadIdx.x == 0) word = 5;
    named_barrier(1, 64);
    if (threadIdx.x >= 32) order[threadIdx.x] = word;
    named_barrier(2, 64);
    if (threadIdx.x == 32) word = 6;
    named_barrier(1, 64);
    if (threadIdx.x < 32) order[threadIdx.x] = word;
}

#if defined(EMULATED) || __CUDA_ARCH__ >= 900
// sums FP32 [64] over the rows of x FP32 [rows, 64], which a ring of three stages brings: thread 64 of 96 fills it, two
// warps take from it.
extern "C" __global__ void ring(const float* x, float* sums, int rows) {
    constexpr int STAGES = 3;
    __shared__ __align__(128) float stages[STAGES][64];
    __shared__ Mbarrier full[STAGES], empty[STAGES];
    wait_for_previous_kernel();
    launch_next_kernel();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(&full[i], 1);
            mbarrier_init(&empty[i], 64);
        }
        async_fence();
    }
    __syncthreads();
    if (threadIdx.x == 64) {
        for (int row = 0; row < rows; ++row) {
            const int stage = row % STAGES, round = row / STAGES;
            if (round > 0) mbarrier_wait(&empty[stage], (round - 1) % 2);
            mbarrier_arrive_expect_tx(&full[stage], sizeof stages[stage]);
            bulk_copy(stages[stage], x + row * 64, sizeof stages[stage], &full[stage]);
        }
    } else if (threadIdx.x < 64) {
        float sum = 0.0f;
        for (int row = 0; row < rows; ++row) {
            const int stage = row % STAGES;
            mbarrier_wait(&full[stage], row / STAGES % 2);
            sum += stages[stage][63 - threadIdx.x];
            mbarrier_arrive(&empty[stage]);
        }
        sums[63 - threadIdx.x] = sum;
    }
}
#endif
