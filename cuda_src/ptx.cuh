// Every PTX instruction the kernels use, one function each, with its meaning in plain words; no other file
// holds inline assembly. All need sm_80.
#pragma once

// Two floats as BF16 (nearest even) in one word, `low` in the lower half.
__device__ __forceinline__ unsigned int pack_bf16(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x to about 2 units in the last place; 2^-inf = 0; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// c[16, 8] += a[16, 16] * b[16, 8] over a warp: BF16 operands, FP32 sums. With g = lane / 4, t = lane % 4:
//   a: (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), two neighbouring k in each word
//   b: (k 2t, column g), (2t + 8, g), two neighbouring k in each word
//   c: (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned int (&a)[4], unsigned int b0,
                                             unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The shared-memory address of a pointer into it, as the instructions below want it.
__device__ __forceinline__ unsigned int shared_address(const void* p) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit values from shared memory. Lane 8i + r gives the address of row r (16 bytes) of
// matrix i; r[i] is matrix i's row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// As ldmatrix_x4, each matrix transposed: r[i] is matrix i's rows 2 (lane % 4) and the next, column lane / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts the copy of 16 bytes from global to shared memory; writes zeros, and reads nothing, where not `valid`.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// Ends this thread's current group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's latest groups are under way. Other threads see the data after a
// barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
