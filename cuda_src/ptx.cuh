// Every PTX instruction the kernels use, one function each, with its meaning in plain words; no other file
// holds inline assembly. All need sm_80, those in the last part sm_90.
//
// Beside the instruction stands what it means in plain C++, for the tests that run the kernels on a CPU: there
// EMULATED is defined, and tests/kernels/emulator holds what is named emulator:: here.
#pragma once

#ifdef EMULATED
#define PTX_OR_PLAIN(ptx, plain) plain
// Of a function that a warp must call as one: the place of the call, so that the tests see if it doesn't.
#define AND_PLACE , EMULATED_PLACE
#else
#define PTX_OR_PLAIN(ptx, plain) ptx
#define AND_PLACE
#endif

// Arithmetic

#ifdef EMULATED
// The upper half of a float, rounded to nearest even; every NaN becomes 0x7fff.
__device__ __forceinline__ unsigned int bf16_bits(float value) {
    const unsigned int bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
#endif

// Two floats as BF16 (nearest even) in one word, `low` in the lower half.
__device__ __forceinline__ unsigned int pack_bf16(float low, float high) {
    unsigned int pair;
    PTX_OR_PLAIN(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)),
                 pair = bf16_bits(high) << 16 | bf16_bits(low));
    return pair;
}

// 2^x to about 2 units in the last place; 2^-inf = 0; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    PTX_OR_PLAIN(asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)), y = x < -126.0f ? 0.0f : exp2f(x));
    return y;
}

// Memory

// A word, loaded here: an ordinary load the compiler would move to where it is used, behind a wait.
__device__ __forceinline__ int load_here(const int* p) {
    int value;
    PTX_OR_PLAIN(asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p)), value = *p);
    return value;
}

// Whole warps

#ifdef EMULATED
struct MmaOperands {
    float* c;
    const unsigned int* a;
    unsigned int b[2];
};

// Of all lanes at once. Products of BF16 are exact, and so, nearly always, is their sum in a double: it is rounded
// when it has met c. The hardware truncates it instead.
EMULATED_UNCHECKED double bf16_as_double(unsigned int bits) {
    const unsigned int word = bits << 16;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
}

EMULATED_UNCHECKED void multiply_matrices(MmaOperands* const (&lanes)[32]) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            const unsigned int word = lanes[lane]->a[i];
            a[g + i % 2 * 8][i / 2 * 8 + t * 2] = bf16_as_double(word);
            a[g + i % 2 * 8][i / 2 * 8 + t * 2 + 1] = bf16_as_double(word >> 16);
        }
        for (int i = 0; i < 2; ++i) {
            b[i * 8 + t * 2][g] = bf16_as_double(lanes[lane]->b[i]);
            b[i * 8 + t * 2 + 1][g] = bf16_as_double(lanes[lane]->b[i] >> 16);
        }
    }
    for (int row = 0; row < 16; ++row) {
        double sum[8] = {};
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
        }
        for (int column = 0; column < 8; ++column) {
            float& c = lanes[row % 8 * 4 + column / 2]->c[row / 8 * 2 + column % 2];
            c = static_cast<float>(c + sum[column]);
        }
    }
}
#endif

// c[16, 8] += a[16, 16] * b[16, 8] over a warp: BF16 operands, FP32 sums. With g = lane / 4, t = lane % 4:
//   a: (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), two neighbouring k in each word
//   b: (k 2t, column g), (2t + 8, g), two neighbouring k in each word
//   c: (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned int (&a)[4], unsigned int b0,
                                             unsigned int b1 AND_PLACE) {
#ifdef EMULATED
    MmaOperands mine = {c, a, {b0, b1}};
    emulator::whole_warp("mma_m16n8k16", mine, file, line, multiply_matrices);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#ifndef EMULATED
// The shared-memory address of a pointer into it, as the instructions below want it.
__device__ __forceinline__ unsigned int shared_address(const void* p) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(p));
}
#else
struct LdmatrixOperands {
    unsigned int* r;
    const void* row;
};

inline unsigned int half_of_row(LdmatrixOperands* const (&lanes)[32], int matrix, int row, int column) {
    return static_cast<const unsigned short*>(lanes[matrix * 8 + row]->row)[column];
}

inline void load_matrices(LdmatrixOperands* const (&lanes)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            lanes[lane]->r[i] = half_of_row(lanes, i, lane / 4, lane % 4 * 2) |
                                half_of_row(lanes, i, lane / 4, lane % 4 * 2 + 1) << 16;
        }
    }
}

inline void load_matrices_trans(LdmatrixOperands* const (&lanes)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            lanes[lane]->r[i] = half_of_row(lanes, i, lane % 4 * 2, lane / 4) |
                                half_of_row(lanes, i, lane % 4 * 2 + 1, lane / 4) << 16;
        }
    }
}
#endif

// Four 8x8 matrices of 16-bit values from shared memory. Lane 8i + r gives the address of row r (16 bytes) of
// matrix i; r[i] is matrix i's row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&r)[4], const void* row AND_PLACE) {
#ifdef EMULATED
    LdmatrixOperands mine = {r, emulator::shared(row, 16)};
    emulator::whole_warp("ldmatrix_x4", mine, file, line, load_matrices);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

// As ldmatrix_x4, each matrix transposed: r[i] is matrix i's rows 2 (lane % 4) and the next, column lane / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row AND_PLACE) {
#ifdef EMULATED
    LdmatrixOperands mine = {r, emulator::shared(row, 16)};
    emulator::whole_warp("ldmatrix_x4_trans", mine, file, line, load_matrices_trans);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
#endif
}

// Shared memory and copies to it

// The block's dynamic shared memory, 128-byte aligned; its size comes with the launch.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef EMULATED
    return static_cast<T*>(emulator::dynamic_shared());
#else
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
#endif
}

// Starts the copy of 16 bytes from global to shared memory; writes zeros, and reads nothing, where not `valid`.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    PTX_OR_PLAIN(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                              "l"(global), "r"(valid ? 16 : 0)
                              : "memory"),
                 emulator::copy_16(emulator::shared(shared, 16), global, valid));
}

// Ends this thread's current group of copies.
__device__ __forceinline__ void cp_async_commit() {
    PTX_OR_PLAIN(asm volatile("cp.async.commit_group;" ::: "memory"), emulator::commit_copies());
}

// Waits until at most `PENDING` of this thread's latest groups are under way. Other threads see the data after a
// barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    PTX_OR_PLAIN(asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"), emulator::wait_copies(PENDING));
}

// A barrier of its own for `threads` threads of the block, whole warps; `id` from 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads AND_PLACE) {
    PTX_OR_PLAIN(asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"),
                 emulator::named_barrier(id, threads, file, line));
}

// What needs sm_90: bulk copies, the barriers they report to, and kernels that overlap their predecessors.

#if defined(EMULATED) || __CUDA_ARCH__ >= 900

// A barrier in shared memory that counts arrivals and bytes. Its phases are numbered from 0; one is over when
// `count` threads have arrived and all the bytes announced by then are there.
typedef unsigned long long Mbarrier;

// Makes it; one thread does, then `async_fence`, then a barrier before others use it.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, unsigned int count) {
    PTX_OR_PLAIN(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                              : "memory"),
                 emulator::mbarrier_init(emulator::shared(barrier, 8), count));
}

// This thread has arrived; what it did before is seen by those who wait.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
    PTX_OR_PLAIN(asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(
                                  shared_address(barrier))
                              : "memory"),
                 emulator::mbarrier_arrive(emulator::shared(barrier, 8), 0));
}

// As mbarrier_arrive, and the phase has `bytes` more to wait for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned int bytes) {
    PTX_OR_PLAIN(asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                                  shared_address(barrier)),
                              "r"(bytes)
                              : "memory"),
                 emulator::mbarrier_arrive(emulator::shared(barrier, 8), bytes));
}

// Waits for the end of the phase whose number has this parity: the current one or the one before.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, unsigned int parity) {
#ifdef EMULATED
    emulator::mbarrier_wait(emulator::shared(barrier, 8), parity);
#else
    unsigned int done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
#endif
}

// Starts the copy of `bytes` from global to shared memory, which then reports them to the barrier. One thread's
// work; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned int bytes, Mbarrier* barrier) {
#ifdef EMULATED
    emulator::bulk_copy(emulator::shared(shared, 16, bytes), global, bytes, emulator::shared(barrier, 8));
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Orders what this thread did to shared memory (mbarrier_init, stores) before the bulk copies that come later.
__device__ __forceinline__ void async_fence() {
    PTX_OR_PLAIN(asm volatile("fence.proxy.async.shared::cta;" ::: "memory"), (void)0);
}

#endif

// In a launch that may overlap the kernel before it: waits until that is over and its writes are seen. Nothing in
// any other launch, or below sm_90. Every thread of every kernel calls it, and reads before it only what was written three
// kernels ago or earlier: the kernel before may still be waiting for its own predecessor.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start before this one is over, once all blocks have said so or ended. Never in two kernels in a row:
// the second one's successor could then run beside the first.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
