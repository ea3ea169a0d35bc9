// What:    the rulers of `bench roofline`: memory that is read once, and a kernel that does nothing.
// Formula: read_all: sums[w] = the 32-bit words that warp w of the grid has read, added modulo 2^32.
// Shapes:  words u32 [4 * chunks], 16-byte aligned; sums u32 [gridDim.x * blockDim.x / 32].
// Threads: whole warps; each thread has LOADS loads of 16 bytes in flight. `nothing` takes any grid.
constexpr int LOADS = 4;

__device__ __forceinline__ unsigned int sum_of(const uint4& words) { return words.x + words.y + words.z + words.w; }

extern "C" __global__ void __launch_bounds__(1024)
    read_all(const uint4* __restrict__ words, long long chunks, unsigned int* __restrict__ sums) {
    const long long tile = static_cast<long long>(blockDim.x) * LOADS;  // chunks that a block reads at a time
    unsigned int sum = 0;
    for (long long first = blockIdx.x * tile; first < chunks; first += gridDim.x * tile) {
        uint4 read[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const long long at = first + i * static_cast<long long>(blockDim.x) + threadIdx.x;
            read[i] = at < chunks ? words[at] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) sum += sum_of(read[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) sums[(blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / 32] = sum;
}

extern "C" __global__ void nothing(const unsigned int*, unsigned int*, int, int, int, int) {
    // As many parameters as our kernels have on the average: they are part of what a launch costs.
}
