// CUDA C++ on a CPU: what a kernel's text needs, so that g++ builds it as an ordinary program.
//
// Can show: a missing or misplaced barrier or wait (every thread is a fibre, resumed in three orders, whose results
// must agree), reads and writes outside any buffer or array (AddressSanitizer), misaligned access (UBSan), use of
// unwritten shared memory (NaN, in one order 3e38), lanes that miss a collective, deadlock, wrong launch arguments, too many threads or
// too much shared memory.
// Can't show, so needs a GPU:
// - order between blocks: they run one after another, so one that waits for another never ends, and one that counts
//   its arrival before all its threads have written isn't seen;
// - what comes between two waits of a thread, for a fibre gives way only where it waits: a plain read-modify-write
//   where an atomic belongs passes;
// - order of memory, which is the program's here: a missing __threadfence or async_fence passes;
// - lanes that meet in one line, but not in one call: two calls in that line, or its function called from two places;
// - timing, bank conflicts, how tensor cores round, dependent launches, what the compiler makes of it.
//
// The kernel's text comes behind this header, in an anonymous namespace (see emulated.py); emulator.cpp is the other
// half.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

// What the compiler knows by itself on a GPU

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)  // emulated.py reads it
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time, so its shared memory may be static; the section makes it easy to find.
#define __shared__ static __attribute__((section("emulated_shared")))
// For inner loops that touch nothing but their own arrays.
#define EMULATED_UNCHECKED inline __attribute__((no_sanitize("address", "undefined"), optimize("O3")))
// The place in the kernel's text that calls a function which has this as its last parameters.
#define EMULATED_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct uint3 { unsigned int x, y, z; };
typedef uint3 dim3;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// The other half

namespace emulator {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Waits until every lane of `mask` is here; true for the last, which then finds the operands of all in `lanes`.
bool meet(unsigned int mask, void* mine, const char* what, const char* file, int line, void* (&lanes)[32]);
void part(unsigned int mask);  // they go on

int block_barrier(int predicate, const char* what, const char* file, int line);  // how many predicates held
void named_barrier(int id, int threads, const char* file, int line);

void* dynamic_shared();
void check_shared(const void* p, unsigned long bytes, unsigned long alignment);

void copy_16(void* to, const void* from, bool valid);
void commit_copies();
void wait_copies(int pending);
void bulk_copy(void* to, const void* from, unsigned int bytes, unsigned long long* barrier);
void mbarrier_init(unsigned long long* barrier, unsigned int count);
void mbarrier_arrive(unsigned long long* barrier, unsigned int bytes);
void mbarrier_wait(unsigned long long* barrier, unsigned int parity);

// `p`, if `bytes` of the block's shared memory begin there, aligned.
template <class T>
T* shared(T* p, unsigned long alignment, unsigned long bytes = 0) {
    check_shared(p, bytes ? bytes : alignment, alignment);
    return p;
}

// combine(operands of the 32 lanes, null outside the mask) is done once, when all lanes of the mask are here.
template <class T, class Combine>
void collective(unsigned int mask, T& mine, const char* what, const char* file, int line, Combine combine) {
    void* lanes[32];
    if (!meet(mask, &mine, what, file, line, lanes)) return;
    T* typed[32];
    for (int lane = 0; lane < 32; ++lane) typed[lane] = static_cast<T*>(lanes[lane]);
    combine(typed);
    part(mask);
}

// An instruction of all 32 lanes.
template <class T, class Combine>
void whole_warp(const char* what, T& mine, const char* file, int line, Combine combine) {
    collective(~0u, mine, what, file, line, combine);
}

// One argument of a launch; a pointer, null or into one of the launch's buffers, or the bits of a number.
struct Argument {
    bool is_pointer;
    unsigned long size;
    void* pointer;
    long long bits;
};

template <class T>
T value_of(const Argument& argument) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(argument.pointer);
    } else {
        T value;
        std::memcpy(&value, &argument.bits, sizeof value);
        return value;
    }
}

template <class... P, unsigned long... I>
void call(void (*kernel)(P...), const Argument* arguments, std::index_sequence<I...>) {
    kernel(value_of<P>(arguments[I])...);
}

template <class... P>
void check(void (*)(P...), const Argument* arguments, int count) {
    const bool pointers[] = {std::is_pointer_v<P>..., false};
    const unsigned long sizes[] = {sizeof(P)..., 0};
    if (count != sizeof...(P)) fail("a launch with %d arguments of a kernel with %d", count, int(sizeof...(P)));
    for (int i = 0; i < count; ++i) {
        if (arguments[i].is_pointer == pointers[i] && arguments[i].size == sizes[i]) continue;
        fail("argument %d is a %s of %lu bytes, the kernel's parameter a %s of %lu", i,
             arguments[i].is_pointer ? "pointer" : "number", arguments[i].size, pointers[i] ? "pointer" : "number",
             sizes[i]);
    }
}

template <class... P>
std::index_sequence_for<P...> indices(void (*)(P...)) {
    return {};
}

struct Kernel {
    const char* name;
    void (*check)(const Argument*, int);
    void (*run)(const Argument*);
    int most_threads;  // of a block
};

template <class... More>
constexpr int first(int n, More...) {
    return n;
}

}  // namespace emulator

// The kernels of a program, behind their text, each with what stands in its __launch_bounds__; the last is {}.
extern const emulator::Kernel emulated_kernels[];
#define EMULATED_KERNEL(name, ...)                                                                     \
    {#name, [](const emulator::Argument* a, int count) { emulator::check(name, a, count); },           \
     [](const emulator::Argument* a) { emulator::call(name, a, emulator::indices(name)); },            \
     emulator::first(__VA_ARGS__)}

// Numbers. Subnormals are flushed by the processor, as NVRTC's -ftz=true asks of the GPU.

inline float __uint_as_float(unsigned int bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline float __int_as_float(int bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline unsigned int __float_as_uint(float f) { unsigned int bits; std::memcpy(&bits, &f, 4); return bits; }
inline int __float_as_int(float f) { int bits; std::memcpy(&bits, &f, 4); return bits; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }

#define EMULATED_MIN_MAX(T)                              \
    inline T min(T a, T b) { return a < b ? a : b; }     \
    inline T max(T a, T b) { return a > b ? a : b; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned int)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcg(T* p, T value) { *p = value; }
template <class T> void __stcs(T* p, T value) { *p = value; }

// Threads

inline void __syncthreads(EMULATED_PLACE) { emulator::block_barrier(0, "__syncthreads", file, line); }
inline int __syncthreads_or(int p, EMULATED_PLACE) {
    return emulator::block_barrier(p != 0, "__syncthreads_or", file, line) > 0;
}
inline int __syncthreads_and(int p, EMULATED_PLACE) {
    return emulator::block_barrier(p == 0, "__syncthreads_and", file, line) == 0;
}
inline int __syncthreads_count(int p, EMULATED_PLACE) {
    return emulator::block_barrier(p != 0, "__syncthreads_count", file, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __syncwarp(unsigned int mask = ~0u, EMULATED_PLACE) {
    int nothing = 0;
    emulator::collective(mask, nothing, "__syncwarp", file, line, [](int* const (&)[32]) {});
}

namespace emulator {

template <class T>
struct Shuffled {
    T value;
    int source;  // the lane to read
};

template <class T>
T shuffle(unsigned int mask, T value, int source, const char* what, const char* file, int line) {
    Shuffled<T> mine = {value, source};
    collective(mask, mine, what, file, line, [](Shuffled<T>* const (&lanes)[32]) {
        T values[32];
        for (int i = 0; i < 32; ++i) {
            if (!lanes[i]) continue;
            const Shuffled<T>* from = lanes[lanes[i]->source];
            if (!from) fail("a shuffle reads lane %d, which isn't in its mask", lanes[i]->source);
            values[i] = from->value;
        }
        for (int i = 0; i < 32; ++i) {
            if (lanes[i]) lanes[i]->value = values[i];
        }
    });
    return mine.value;
}

inline int this_lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

// The lane itself where the other lies outside its part of the warp.
inline int within(int other, int width, bool inside) {
    const int lane = this_lane();
    return inside && other / width == lane / width ? other : lane;
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned int mask, T value, int source, int width = 32, EMULATED_PLACE) {
    const int lane = emulator::this_lane();
    return emulator::shuffle(mask, value, lane / width * width + (source & (width - 1)), "__shfl_sync", file, line);
}
template <class T>
T __shfl_xor_sync(unsigned int mask, T value, int bits, int width = 32, EMULATED_PLACE) {
    const int other = emulator::this_lane() ^ bits;
    // Parts of the warp behind this one keep their own values; those before it may be read.
    const int source = other < 32 && other / width <= emulator::this_lane() / width ? other : emulator::this_lane();
    return emulator::shuffle(mask, value, source, "__shfl_xor_sync", file, line);
}
template <class T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32, EMULATED_PLACE) {
    const int other = emulator::this_lane() - int(delta);
    return emulator::shuffle(mask, value, emulator::within(other, width, other >= 0), "__shfl_up_sync", file, line);
}
template <class T>
T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = 32, EMULATED_PLACE) {
    const int other = emulator::this_lane() + int(delta);
    return emulator::shuffle(mask, value, emulator::within(other, width, other < 32), "__shfl_down_sync", file, line);
}

inline unsigned int __ballot_sync(unsigned int mask, int predicate, EMULATED_PLACE) {
    unsigned int mine = predicate != 0;
    emulator::collective(mask, mine, "__ballot_sync", file, line, [](unsigned int* const (&lanes)[32]) {
        unsigned int votes = 0;
        for (int i = 0; i < 32; ++i) votes |= lanes[i] ? *lanes[i] << i : 0u;
        for (unsigned int* lane : lanes) {
            if (lane) *lane = votes;
        }
    });
    return mine;
}
inline int __any_sync(unsigned int mask, int predicate, EMULATED_PLACE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned int mask, int predicate, EMULATED_PLACE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}

// Atomics: nothing comes between, a fibre gives way only where it waits.

template <class T> struct emulated_same { typedef T type; };  // not deduced: the pointer alone says what T is
template <class T> using Same = typename emulated_same<T>::type;
template <class T> T emulated_replace(T* at, T value) { T old = *at; *at = value; return old; }
template <class T> T atomicAdd(T* at, Same<T> v) {
    if constexpr (std::is_floating_point_v<T>) return emulated_replace(at, T(*at + v));
    else return emulated_replace(at, T(std::make_unsigned_t<T>(*at) + std::make_unsigned_t<T>(v)));
}
template <class T> T atomicMax(T* at, Same<T> v) { return emulated_replace(at, *at > v ? *at : v); }
template <class T> T atomicMin(T* at, Same<T> v) { return emulated_replace(at, *at < v ? *at : v); }
template <class T> T atomicExch(T* at, Same<T> v) { return emulated_replace(at, v); }
template <class T> T atomicOr(T* at, Same<T> v) { return emulated_replace(at, T(*at | v)); }
template <class T> T atomicAnd(T* at, Same<T> v) { return emulated_replace(at, T(*at & v)); }
template <class T> T atomicCAS(T* at, Same<T> expected, Same<T> v) {
    return emulated_replace(at, *at == expected ? v : *at);
}
