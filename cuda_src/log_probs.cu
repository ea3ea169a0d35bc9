// What:    log-probabilities of one token of each row and of the likeliest ones.
// Formula: log_prob(i) = (l(i) - greatest) - log(sum over j of exp(l(j) - greatest)), FP32, never above 0.
// Shapes:  logits FP32 [rows, VOCAB_SIZE], rows `stride` values apart; token_ids int32 [rows]; chosen FP32 [rows], NaN where
//          the id is negative; top_ids int32 and top FP32 [rows, count]: the greatest first, lower ids first on a tie; count <= VOCAB_SIZE.
// Threads: a block for each row; each warp takes a part of it, and each lane knows the greatest of its keys that isn't given
//          out yet. Where it is given out, the warp looks through that lane's values for the next.
#include "logits.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr float LOG2_E = 1.44269504f;

extern "C" __global__ void __launch_bounds__(THREADS)
    log_probs(const float* __restrict__ logits, int stride, const int* __restrict__ token_ids, int count,
              float* __restrict__ chosen, int* __restrict__ top_ids, float* __restrict__ top) {
    wait_for_previous_kernel();
    __shared__ Key warp_best[WARPS];
    const Logits row = row_at(logits, blockIdx.x, stride);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = part_width(0, VOCAB_SIZE, WARPS);
    const int begin = warp * width, end = min(begin + width, VOCAB_SIZE);

    Key own_best = 0;
    walk(row, begin, end, [&](const float (&values)[4], int id, int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Key key = key_of(values[i], id + i);
            if (i < n && key != NAN_KEY) own_best = larger(own_best, key);
        }
    });
    auto tell_best = [&]() {
        const Key best = warp_max(own_best);
        if (lane == 0) warp_best[warp] = best;
    };
    auto winner = [&]() {
        Key best = warp_best[0];
        for (int w = 1; w < WARPS; ++w) best = larger(best, warp_best[w]);
        return best;
    };

    tell_best();
    __syncthreads();
    const float greatest = value_at(rank_of(winner()));
    // Without the case of equality an infinite greatest would give NaN.
    auto below = [&](float value) { return value == greatest ? 0.0f : value - greatest; };
    float own = 0;
    walk(row, begin, end, [&](const float (&values)[4], int id, int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own += i < n ? exp2_approx(below(values[i]) * LOG2_E) : 0.0f;
    });
    const float log_sum = logf(block_sum<THREADS>(own));
    const int token = token_ids[blockIdx.x];
    if (threadIdx.x == 0) chosen[blockIdx.x] = token < 0 ? __uint_as_float(0x7fc00000u) : below(row.values[token]) - log_sum;
    for (int i = 0; i < count; ++i) {
        const Key key = winner();
        if (threadIdx.x == 0) {
            const long long at = static_cast<long long>(blockIdx.x) * count + i;
            top_ids[at] = id_of(key);
            top[at] = below(value_at(rank_of(key))) - log_sum;
        }
        __syncthreads();  // all have seen the winner
        if (id_of(key) >= begin && id_of(key) < end) {
            const int owner = owner_of(id_of(key), begin);
            Key next = 0;
            for (int at = begin + (lane * 32 + owner) * 4; at < end; at += 32 * 128) {
                for (int id = at; id < min(at + 4, end); ++id) {
                    const Key other = key_of(row.values[id], id);
                    if (other < key) next = larger(next, other);
                }
            }
            next = warp_max(next);
            if (lane == owner) own_best = next;
            tell_best();
        }
        __syncthreads();
    }
}
