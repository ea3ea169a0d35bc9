// What:    a token for each row of (adjusted) logits, by temperature, top_k, min_p and top_p, without sorting the row.
// Formula: samir_vllm/backends/reference_sampler.py, to the bit: masses are whole numbers, so sums are exact in any order.
// Shapes:  logits FP32 [rows, VOCAB_SIZE], rows `stride` values apart; maxima u64 [rows, SEGMENTS]; slots and token_rows
//          int32 [rows]; positions int32 [T], of which token_rows are those of the rows' last tokens; settings [slots];
//          ids int32 [rows], -1 for a row with NaN.
// Threads: segment_maxima: blockIdx.x is the row, blockIdx.y one of its parts; the greatest key of each thread's values.
//          sample: a block for each row. The segments' maxima tell a value above which lie enough tokens, but few: those
//          are listed in shared memory, sorted, and cut. Where the filters keep more than the list holds, the cut is
//          searched for with a few passes over the row. Then the token is found by ever smaller parts of the row.
#include "logits.cuh"
#include "sampling.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 320, WARPS = THREADS / 32;
constexpr int SEGMENTS = 2048;  // cuda_backend.py has it too
constexpr int EACH_SEGMENTS = (SEGMENTS + THREADS - 1) / THREADS;
constexpr int LIST_SIZE = 4096;  // keys in shared memory
constexpr int FEW = 256, MANY = 1024;  // so many of the segments' maxima, at first and at most, decide what is listed
constexpr int PIVOTS = 4;
constexpr int MASS_BITS = 43;
constexpr int ID_BITS = 20;  // with those of a mass, one more than MASS_BITS, 64

extern "C" __global__ void segment_maxima(const float* __restrict__ logits, int stride, Key* __restrict__ maxima) {
    wait_for_previous_kernel();
    const Key key = part_max(row_at(logits, blockIdx.x, stride));
    maxima[static_cast<long long>(blockIdx.x) * SEGMENTS + blockIdx.y * blockDim.x + threadIdx.x] = key;
}

// 64 random bits: Philox 4x32-10, Salmon et al., 2011.
__device__ __forceinline__ u64 random_bits(u64 seed, unsigned int position, unsigned int index) {
    unsigned int c0 = position, c1 = index, c2 = 0, c3 = 0;
    unsigned int k0 = static_cast<unsigned int>(seed), k1 = static_cast<unsigned int>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned int low0 = c0 * 0xD2511F53u, high0 = __umulhi(c0, 0xD2511F53u);
        const unsigned int low2 = c2 * 0xCD9E8D57u, high2 = __umulhi(c2, 0xCD9E8D57u);
        c0 = high2 ^ c1 ^ k0, c1 = low2, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return static_cast<u64>(c1) << 32 | c0;
}

// What turns logits into masses.
struct Weights {
    float greatest, scale, min_p;

    // 2^((value - greatest) * scale), at most 1 and at least 2^-60. Nothing here may be fused: NumPy can't.
    __device__ __forceinline__ float exponential(float value) const {
        const float x = fmaxf(__fmul_rn(__fsub_rn(value, greatest), scale), -60.0f);
        const float shifter = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, in its last bits
        const float shifted = __fadd_rn(x, shifter), f = __fsub_rn(x, __fsub_rn(shifted, shifter));
        float y = 0.0013264727f;
        y = __fadd_rn(__fmul_rn(y, f), 0.009671513f);
        y = __fadd_rn(__fmul_rn(y, f), 0.055507336f);
        y = __fadd_rn(__fmul_rn(y, f), 0.24022242f);
        y = __fadd_rn(__fmul_rn(y, f), 0.693147f);
        y = __fadd_rn(__fmul_rn(y, f), 1.0f);
        return __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23));
    }

    // 0 for what min_p drops.
    __device__ __forceinline__ u64 mass(float value) const {
        const float e = exponential(value);
        const unsigned int bits = __float_as_uint(e), significand = bits & 0x7fffffu | 0x800000u;
        const int shift = static_cast<int>(bits >> 23) - 127 - 23 + MASS_BITS;
        const unsigned int factor = e >= min_p ? 1u << max(shift, 0) : 0;
        return static_cast<u64>(significand >> min(max(-shift, 0), 31)) * factor;  // cheaper than shifts of 64 bits
    }
};

__device__ __forceinline__ u64 warp_total(u64 value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_MASK, value, offset);
    return value;
}

// The sum of the values of the threads before this one; `total` is that of all. Before the next call all must meet.
__device__ __forceinline__ u64 block_scan(u64 value, u64& total) {
    __shared__ u64 warp_totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const u64 below = __shfl_up_sync(FULL_MASK, sum, offset);
        if (lane >= offset) sum += below;
    }
    if (lane == 31) warp_totals[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
#pragma unroll 4  // all at once they take too many registers
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += warp_totals[w];
        total += warp_totals[w];
    }
    return before + sum - value;
}

// A rank from which up at least `wanted` of the segments' maxima lie, and few more; 0 if there aren't so many.
__device__ __forceinline__ unsigned int threshold(const Key* __restrict__ maxima, int wanted, unsigned int high) {
    __shared__ int counts[2][WARPS];
    unsigned int ranks[EACH_SEGMENTS];
#pragma unroll
    for (int i = 0; i < EACH_SEGMENTS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        ranks[i] = at < SEGMENTS ? rank_of(maxima[at]) : 0;
    }
    unsigned int low = 0;  // so many or more lie from low up, fewer above high
    for (int turn = 0; low < high; turn ^= 1) {
        const unsigned int middle = low + (high - low + 1) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH_SEGMENTS; ++i) count += __popc(__ballot_sync(FULL_MASK, ranks[i] >= middle));
        if (threadIdx.x % 32 == 0) counts[turn][threadIdx.x / 32] = count;
        __syncthreads();  // one is enough: the next turn writes to the other half
        count = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) count += counts[turn][w];
        if (count >= wanted) {
            low = middle;
            if (count <= wanted + wanted / 4) break;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Bitonic, the greatest first (Batcher, 1968); what is behind n, up to a power of 2, is overwritten. Sorted for all.
__device__ __forceinline__ void sort_descending(Key* keys, int n) {
    int padded = 1;
    while (padded < n) padded *= 2;
#pragma unroll 1
    for (int i = n + threadIdx.x; i < padded; i += THREADS) keys[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int size = 2; size <= padded; size *= 2) {
#pragma unroll 1
        for (int step = size / 2; step > 0; step /= 2) {
#pragma unroll 1
            for (int t = threadIdx.x; t < padded / 2; t += THREADS) {
                const int i = 2 * t - (t & (step - 1)), j = i + step;
                const Key a = keys[i], b = keys[j];
                if ((a < b) == ((i & size) == 0)) keys[i] = b, keys[j] = a;
            }
            __syncthreads();
        }
    }
}

// What a token counts for: its mass, or 1; 0 where its key is below `from`.
struct Measure {
    Weights weights;
    Key from;
    bool is_count;

    __device__ __forceinline__ u64 operator()(float value, int id) const {
        const u64 own = is_count ? 1 : weights.mass(value);  // always: a branch would cost more
        return number_key(value, id) >= from ? own : 0;
    }
};

// The greatest keys of a row in any order; once settled, the greatest first, each replaced by what it counts for, times
// 2^ID_BITS, and its id.
struct List {
    Key keys[LIST_SIZE];
    int size;  // how many there are, listed or not

    __device__ __forceinline__ u64 measure(int i) const { return keys[i] >> ID_BITS; }
    __device__ __forceinline__ int id(int i) const { return static_cast<int>(keys[i]) & ((1 << ID_BITS) - 1); }
};

// Lists the keys from low to high. `also` sees all values. All have to meet before the next call.
template <class Also>
__device__ __forceinline__ void collect(const Logits& row, Key low, Key high, List& list, Also also) {
    if (threadIdx.x == 0) list.size = 0;
    __syncthreads();
    const int width = part_width(0, VOCAB_SIZE, WARPS), begin = threadIdx.x / 32 * width;
    const float least = value_at(rank_of(low));  // NaN for rank 0, where everything is wanted
    walk(row, begin, min(begin + width, VOCAB_SIZE), [&](const float (&values)[4], int id, int n) {
        also(values, n);
        if (fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3])) < least) return;  // mostly
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Key key = number_key(values[i], id + i);
            if (i >= n || key < low || key > high) continue;
            const int place = atomicAdd(&list.size, 1);
            if (place < LIST_SIZE) list.keys[place] = key;
        }
    });
    __syncthreads();
}

// Sorts a list and measures it.
__device__ __forceinline__ void settle(List& list, const Measure& measure) {
    sort_descending(list.keys, list.size);
#pragma unroll 1
    for (int i = threadIdx.x; i < list.size; i += THREADS) {
        const int id = id_of(list.keys[i]);
        list.keys[i] = measure(value_at(rank_of(list.keys[i])), id) << ID_BITS | id;
    }
    __syncthreads();
}

// The first of a settled list's first n entries at which base and the measures add up to `amount` or more, n if nowhere.
// `sum` is what they add up to there, or at the end. For all threads, which have to meet before the next call, unless this one
// gives n and the next has the same n.
__device__ __forceinline__ int first_reaching(const List& list, int n, u64 base, u64 amount, u64& sum) {
    __shared__ int place;
    __shared__ u64 reached;
    const int each = (n + THREADS - 1) / THREADS, begin = threadIdx.x * each, end = min(n, begin + each);
    u64 own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) own += list.measure(i);
    if (threadIdx.x == 0) place = n;
    u64 total;
    u64 so_far = base + block_scan(own, total);  // its barrier is that of `place`, too
    if (threadIdx.x == 0 && base + total < amount) reached = base + total;
#pragma unroll 1
    for (int i = begin; i < end && so_far < amount; ++i) {
        so_far += list.measure(i);
        if (so_far >= amount) place = i, reached = so_far;
    }
    __syncthreads();
    sum = reached;
    return place;
}

// The measures of the WARPS parts of [begin, end), in shared memory, for all; returns their sum.
__device__ __forceinline__ u64 sum_parts(const Logits& row, int begin, int end, u64* parts, const Measure& measure) {
    const int width = part_width(begin, end, WARPS), warp = threadIdx.x / 32, first = begin + warp * width;
    u64 own = 0;
    walk(row, first, min(first + width, end), [&](const float (&values)[4], int id, int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own += i < n ? measure(values[i], id + i) : 0;
    });
    own = warp_total(own);
    if (threadIdx.x % 32 == 0) parts[warp] = own;
    __syncthreads();
    u64 total = 0;
#pragma unroll 4  // all at once they take too many registers
    for (int w = 0; w < WARPS; ++w) total += parts[w];
    return total;
}

// The first id at which the measures add up to more than random / 2^64 of all, for all threads.
__device__ __forceinline__ int pick(const Logits& row, u64 random, u64* parts, const Measure& measure) {
    __shared__ int picked;
    int begin = 0, end = VOCAB_SIZE;
    u64 r = 0;
    for (bool whole = true; whole || end - begin > THREADS; whole = false) {
        const u64 total = sum_parts(row, begin, end, parts, measure);
        if (whole) r = __umul64hi(random, total);
        int part = 0;
#pragma unroll 1
        while (part < WARPS - 1 && r >= parts[part]) r -= parts[part++];
        const int width = part_width(begin, end, WARPS);
        begin += part * width;
        end = min(begin + width, end);
        __syncthreads();  // all have read the parts
    }
    const int id = begin + threadIdx.x;
    const u64 own = id < end ? measure(row.values[id], id) : 0;
    u64 total;
    const u64 before = block_scan(own, total);
    if (before <= r && r < before + own) picked = id;
    __syncthreads();
    return picked;
}

// Keys from `low` up measure `amount` or more, those above `high` less: `above`.
struct Bounds {
    Key low, high;
    u64 above;
    int num_between;
};

// Narrows the bounds until what lies between can be listed.
__device__ __forceinline__ void narrow(const Logits& row, Bounds& b, u64 amount, const Measure& measure) {
    __shared__ u64 sums[WARPS][2 * PIVOTS];
    __shared__ Key pivots[PIVOTS];  // not in registers, which are few here
    const int width = part_width(0, VOCAB_SIZE, WARPS), warp = threadIdx.x / 32, begin = warp * width;
    int num_from_low = VOCAB_SIZE, num_above = 0;
    while (b.num_between > LIST_SIZE) {
        // Between values in equal steps, where those mean something; among equal values the middle of the ids. The middle
        // of the keys ends the search in any case.
        if (rank_of(b.low) == rank_of(b.high)) b.low = max(b.low, b.high >> 32 << 32 | 0xffffffffu - VOCAB_SIZE);
        if (threadIdx.x < PIVOTS) {
            const float low = value_at(rank_of(b.low)), span = value_at(rank_of(b.high)) - low;
            const Key key = static_cast<Key>(rank_of(low + span * (0.25f * (threadIdx.x + 1)))) << 32;  // of NaN: any
            const bool usable = threadIdx.x < PIVOTS - 1 && key > b.low && key <= b.high;
            pivots[threadIdx.x] = usable ? key : b.low + (b.high - b.low + 1) / 2;
        }
        __syncthreads();
        unsigned int counts[PIVOTS] = {};
        u64 measures[PIVOTS] = {};
        walk(row, begin, min(begin + width, VOCAB_SIZE), [&](const float (&values)[4], int id, int n) {
            Key keys[4];
            bool any = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                keys[i] = number_key(values[i], id + i);
                if (i >= n || keys[i] > b.high) keys[i] = 0;
                any |= keys[i] > b.low;
            }
            if (!any) return;  // mostly, from the second turn on
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u64 own = measure(values[i], id + i);
#pragma unroll
                for (int p = 0; p < PIVOTS; ++p) {
                    counts[p] += keys[i] >= pivots[p];
                    measures[p] += keys[i] >= pivots[p] ? own : 0;
                }
            }
        });
#pragma unroll
        for (int p = 0; p < PIVOTS; ++p) {
            const u64 count = warp_total(counts[p]), measured = warp_total(measures[p]);
            if (threadIdx.x % 32 == 0) sums[warp][p] = count, sums[warp][PIVOTS + p] = measured;
        }
        __syncthreads();
        if (threadIdx.x < 2 * PIVOTS) {
#pragma unroll 1
            for (int w = 1; w < WARPS; ++w) sums[0][threadIdx.x] += sums[w][threadIdx.x];
        }
        __syncthreads();
        const u64 above = b.above;
        const int num_before = num_above;
#pragma unroll
        for (int p = 0; p < PIVOTS; ++p) {
            const u64 measured = above + sums[0][PIVOTS + p];
            const int count = num_before + static_cast<int>(sums[0][p]);
            if (measured >= amount && pivots[p] > b.low) {
                b.low = pivots[p], num_from_low = count;
            } else if (measured < amount && pivots[p] <= b.high) {
                b.high = pivots[p] - 1, b.above = measured, num_above = count;
            }
        }
        b.num_between = num_from_low - num_above;
        __syncthreads();  // all have read the sums
    }
}

// The greatest key such that the row's tokens from it up measure `amount` or more; those below `lowest` measure nothing.
__device__ __forceinline__ Key find_cut(const Logits& row, float lowest, Key best, u64 amount, List& list,
                                        const Measure& measure) {
    Bounds b = {static_cast<Key>(min(rank_of(lowest), rank_of(best))) << 32, best, 0, VOCAB_SIZE};
    narrow(row, b, amount, measure);
    collect(row, b.low, b.high, list, [](const float (&)[4], int) {});
    settle(list, measure);
    u64 sum;
    const int last = list.id(min(first_reaching(list, list.size, b.above, amount, sum), list.size - 1));
    return number_key(row.values[last], last);
}

// The least mass that top_p of `mass` needs, at least 1: rounded up.
__device__ __forceinline__ u64 nucleus(u64 mass, u64 top_p) {
    const u64 low = mass * top_p, high = __umul64hi(mass, top_p);
    const u64 target = (high << 32 | low >> 32) + ((low & 0xffffffffu) != 0);
    return target ? target : 1;
}

// The token, if everything that the filters keep lies from `low` up and can be listed; else -1. For all threads. Counted
// tokens do lie there. If they aren't counted, `mass` is that of the row, and becomes it if it is 0.
__device__ __forceinline__ int pick_listed(const Logits& row, unsigned int low, Key best, const Settings& s,
                                           const Measure& measure, u64 random, bool counted, List& list, u64& mass) {
    __shared__ int picked;
    u64 own = 0;
    const bool sums = !counted && mass == 0;
    collect(row, static_cast<Key>(low) << 32, best, list, [&](const float (&values)[4], int n) {
        if (!sums) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) own += i < n ? measure.weights.mass(values[i]) : 0;
    });
    if (sums) block_scan(own, mass);
    if (list.size > LIST_SIZE) return -1;
    settle(list, measure);
    int kept = counted ? min(list.size, static_cast<int>(s.top_k)) : list.size;
    if (counted) first_reaching(list, kept, 0, ~0ull, mass);
    u64 sum;
    const int last = first_reaching(list, kept, 0, nucleus(mass, s.top_p), sum);
    if (last == kept) return -1;
    kept = last + 1;
    // By id: what lies before a token is the sum over all lower ids, and the list isn't sorted by them.
    const u64 r = __umul64hi(random, sum);
#pragma unroll 1
    for (int i = threadIdx.x; i < kept; i += THREADS) {
        u64 before = 0;
        for (int j = 0; j < kept; ++j) {
            before += list.id(j) < list.id(i) ? list.measure(j) : 0;
        }
        if (before <= r && r < before + list.measure(i)) picked = list.id(i);
    }
    __syncthreads();
    return picked;
}

// Two blocks on each SM, so that 256 rows fit at once; with that bound the compiler spills from sm_100 on.
#if __CUDA_ARCH__ < 1000
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sample(const float* __restrict__ logits, int stride, const Key* __restrict__ maxima, const int* __restrict__ slots,
           const int* __restrict__ token_rows, const int* __restrict__ positions, const Settings* __restrict__ settings,
           int* __restrict__ ids) {
    wait_for_previous_kernel();
    __shared__ List list;
    __shared__ u64 parts[WARPS];
    __shared__ Key warp_best[WARPS];
    const Settings s = settings[slots[blockIdx.x]];
    const Logits row = row_at(logits, blockIdx.x, stride);
    maxima += static_cast<long long>(blockIdx.x) * SEGMENTS;
    Key best = 0;
    for (int i = threadIdx.x; i < SEGMENTS; i += THREADS) best = larger(best, maxima[i]);
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
    __syncthreads();
#pragma unroll 4
    for (int w = 0; w < WARPS; ++w) best = larger(best, warp_best[w]);
    const float greatest = value_at(rank_of(best));
    if (best == NAN_KEY || s.scale == 0 || fabsf(greatest) > 3.402823466e38f) {
        if (threadIdx.x == 0) ids[blockIdx.x] = best == NAN_KEY ? -1 : id_of(best);
        return;
    }
    Measure measure = {{greatest, s.scale, s.min_p}, 0, false};
    const u64 random = random_bits(s.seed, positions[token_rows[blockIdx.x]] + 1, s.index);
    const bool counted = s.top_k > 0 && s.top_k < VOCAB_SIZE, by_mass = s.top_p < 1ull << 32;
    int id = -1;
    u64 mass = 0;
    // First a few tokens are listed, then more. Counted ones are as many as they are.
    const unsigned int most = counted ? s.top_k : by_mass ? MANY : 0;
    for (unsigned int n = counted ? most : FEW; id < 0 && n <= min(most, 0u + MANY); n += MANY - FEW) {
        id = pick_listed(row, threshold(maxima, n, rank_of(best)), best, s, measure, random, counted, list, mass);
    }
    if (id < 0) {
        for (int stage = counted ? 0 : by_mass ? 1 : 2; stage < 2; stage += by_mass ? 1 : 2) {
            measure.is_count = stage == 0;
            if (stage == 1 && mass == 0) mass = sum_parts(row, 0, VOCAB_SIZE, parts, measure);
            const float lowest = stage == 0 ? -__uint_as_float(0x7f800000u) : greatest - (MASS_BITS + 1) / s.scale;
            const u64 amount = stage == 0 ? s.top_k : nucleus(mass, s.top_p);
            measure.from = find_cut(row, lowest, best, amount, list, measure);
        }
        measure.is_count = false;
        id = pick(row, random, parts, measure);
    }
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}
