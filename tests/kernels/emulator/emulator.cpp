// The half of the emulator that kernels don't see: fibres and their order, barriers, copies under way, and the launch
// that the program's one argument describes (emulated.py writes it). Built once, without the sanitizers' checks.
#include "emulator.h"

#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

enum Order { FORWARD, REVERSE, SHUFFLED, ORDERS };
const char* const ORDER_NAMES[] = {"forward", "reverse", "shuffled"};
constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10;

// Of one order of one launch: what takes longer has no end.
int cpu_seconds() {
    const char* text = getenv("EMULATED_CPU_SECONDS");
    return text ? atoi(text) : 100;
}

// Not strcmp, which AddressSanitizer watches: this happens at every collective.
bool same(const char* a, const char* b) {
    if (a == b) return true;
    if (!a || !b) return false;
    while (*a && *a == *b) ++a, ++b;
    return *a == *b;
}

struct Place {
    const char* what = nullptr;
    const char* file = "";
    int line = 0;
    bool operator==(const Place& o) const { return line == o.line && same(what, o.what) && same(file, o.file); }
};

struct Copy {  // asynchronous
    void* to;
    const void* from;  // null: zeros
    unsigned int bytes;
    int group;                    // of the thread's copies
    unsigned long long* barrier;  // to report to, of a bulk copy
    bool operator==(const Copy& o) const { return to == o.to && from == o.from && barrier == o.barrier; }
};

struct Fibre {
    uint3 index = {};
    void* stack = nullptr;
    ucontext_t context = {};
    void* stack_pointer = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's
    bool exited = false;
    Place waits_at;  // what == nullptr: it doesn't wait
    unsigned long long* mbarrier = nullptr;
    unsigned int parity = 0;
    int group = 0;
    std::vector<Copy> copies;
};

// Lanes of a warp that wait for each other.
struct Meeting {
    unsigned int mask = 0, here = 0;
    Place place;
    void* operands[32];
};

struct Warp {
    unsigned int exited = 0;
    std::vector<Meeting> meetings;
};

struct NamedBarrier {
    std::vector<int> waiting;
    int threads = 0;
};

const char* kernel_name;
Order order;
std::minstd_rand random_numbers;
Fibre host;  // the program itself, between blocks
std::vector<Fibre> fibres;
Fibre* current = &host;
std::vector<Warp> warps;
unsigned long long runnable[MAX_THREADS / 64];
int num_threads, num_live, num_at_barrier, num_true, barrier_result;
Place barrier_place;
NamedBarrier named_barriers[16];
std::vector<Copy> bulk_copies;
char* dynamic_memory;
size_t dynamic_bytes, most_shared_bytes;
void (*run_kernel)(const Argument*);
std::vector<Argument> arguments;

std::string position(const Fibre& f) {
    const uint3 b = blockIdx, t = f.index;
    char text[120];
    snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u)", b.x, b.y, b.z, t.x, t.y, t.z);
    return text;
}

std::string text_of(const Place& place) {
    std::string text = place.what;
    if (place.file[0]) text += std::string(" at ") + place.file + ":" + std::to_string(place.line);
    return text;
}

int number_of(const Fibre* f) { return f - fibres.data(); }

// Switching

#if defined(__x86_64__)
// Keeps what a called function must keep, and changes stacks.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.globl emulator_switch
emulator_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
#endif

void fibre_main();

void prepare(Fibre& f) {
    const size_t page = sysconf(_SC_PAGESIZE);
    char* memory = static_cast<char*>(mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) fail("no memory for stacks");
    f.stack = memory + page;
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(memory + page + STACK_BYTES) - 2;
    *top = reinterpret_cast<void*>(fibre_main);  // where the first switch returns to
    f.stack_pointer = top - 6;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f.context, fibre_main, 0);
#endif
}

void switch_to(Fibre& next) {
    Fibre& self = *current;
    if (&self == &next) return;
    current = &next;
    threadIdx = next.index;
    __sanitizer_start_switch_fiber(&self.fake_stack, next.stack, STACK_BYTES);
#if defined(__x86_64__)
    emulator_switch(&self.stack_pointer, next.stack_pointer);
#else
    swapcontext(&self.context, &next.context);
#endif
    __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
}

// The order

void set_runnable(int i, bool value) {
    const unsigned long long bit = 1ull << i % 64;
    runnable[i / 64] = value ? runnable[i / 64] | bit : runnable[i / 64] & ~bit;
}

int pick() {
    const int words = (num_threads + 63) / 64;
    if (order == FORWARD) {
        for (int w = 0; w < words; ++w) {
            if (runnable[w]) return w * 64 + __builtin_ctzll(runnable[w]);
        }
    } else if (order == REVERSE) {
        for (int w = words; w-- > 0;) {
            if (runnable[w]) return w * 64 + 63 - __builtin_clzll(runnable[w]);
        }
    } else {
        const int start = random_numbers() % num_threads;
        for (int w = 0; w <= words; ++w) {  // from there on, and round to it again
            unsigned long long bits = runnable[(start / 64 + w) % words];
            if (w == 0) bits &= ~0ull << start % 64;
            if (bits) return (start / 64 + w) % words * 64 + __builtin_ctzll(bits);
        }
    }
    return -1;
}

bool coin() { return random_numbers() >> 8 & 1; }

bool lands_at_once() { return order == REVERSE || (order == SHUFFLED && coin()); }

[[noreturn]] void report_deadlock() {
    std::string waiting;
    int shown = 0;
    for (const Fibre& f : fibres) {
        if (!f.waits_at.what || f.exited || (&f != &fibres[0] && f.waits_at == (&f)[-1].waits_at)) continue;
        if (shown++ == 6) break;
        waiting += "\n  from " + position(f) + " on: " + text_of(f.waits_at);
    }
    fail("deadlock: %d threads wait, none can go on%s", num_live, waiting.c_str());
}

void wake(int i) {
    fibres[i].waits_at = {};
    set_runnable(i, true);
}

void land(const Copy& copy);

// When no fibre can go on, the bulk copies that one waits for can't be put off any longer.
void land_awaited_copies() {
    std::vector<Copy> awaited;
    for (const Copy& copy : bulk_copies) {
        for (const Fibre& f : fibres) {
            if (f.mbarrier != copy.barrier) continue;
            awaited.push_back(copy);
            break;
        }
    }
    for (const Copy& copy : awaited) {
        bulk_copies.erase(std::find(bulk_copies.begin(), bulk_copies.end(), copy));
        land(copy);
    }
}

void run_another() {
    int next = pick();
    if (next < 0) {
        land_awaited_copies();
        next = pick();
    }
    if (next < 0) report_deadlock();
    switch_to(fibres[next]);
}

// Lets others run until this fibre may go on.
void wait_at(const Place& place) {
    current->waits_at = place;
    set_runnable(number_of(current), false);
    run_another();
}

// Barriers

void release_block_barrier() {
    barrier_result = num_true;
    num_at_barrier = num_true = 0;
    for (int i = 0; i < num_threads; ++i) {
        if (!fibres[i].exited && fibres[i].waits_at == barrier_place) wake(i);
    }
    barrier_place = {};
}

void leave() {
    Fibre& self = *current;
    const int i = number_of(&self);
    Warp& warp = warps[i / 32];
    self.exited = true;
    set_runnable(i, false);
    warp.exited |= 1u << i % 32;
    for (const Meeting& m : warp.meetings) {
        if (!(m.mask >> i % 32 & 1)) continue;
        fail("a thread ends while lanes of its warp wait for it in %s", text_of(m.place).c_str());
    }
    if (--num_live == 0) return switch_to(host);
    if (num_at_barrier == num_live) release_block_barrier();
    run_another();
}

void fibre_main() {
    const void* from;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &from, &size);
    if (!host.stack) host.stack = const_cast<void*>(from);
    for (;;) {  // once a block
        run_kernel(arguments.data());
        leave();
    }
}

// Shared memory and copies

extern "C" char __start_emulated_shared[] __attribute__((weak));
extern "C" char __stop_emulated_shared[] __attribute__((weak));

// What the program's kernels have together, without the redzones between.
size_t static_shared_bytes() {
    size_t bytes = 0;
    for (const char* p = __start_emulated_shared; p != __stop_emulated_shared; ++p) {
        if (!__asan_address_is_poisoned(p)) ++bytes;
    }
    return bytes;
}

void check_shared_bytes() {
    const size_t fixed = static_shared_bytes();
    if (fixed + dynamic_bytes <= most_shared_bytes) return;
    fail("%zu bytes of shared memory and %zu dynamic ones, where a block may have %zu", fixed, dynamic_bytes,
         most_shared_bytes);
}

void spoil_shared_memory() {
    // NaN; but a maximum passes over it, so in one order a number (3e38 as a float or as BF16), to be told apart.
    const char spoilt = order == REVERSE ? 0x7f : char(0xff);
    // Not by memset, which AddressSanitizer watches: there are redzones between the variables.
    for (volatile char* p = __start_emulated_shared; p != __stop_emulated_shared; ++p) *p = spoilt;
    if (dynamic_memory) memset(dynamic_memory, spoilt, dynamic_bytes);
}

// An mbarrier's word: count, arrivals still missing, bytes still missing (may be negative for a while), phase, a mark.
struct Barrier {
    unsigned long long count : 20, missing : 20;
    long long bytes : 21;
    unsigned long long phase : 1, mark : 2;
};
static_assert(sizeof(Barrier) == 8);
constexpr int MARK = 2;

Barrier& barrier_at(unsigned long long* word) {
    Barrier& b = *reinterpret_cast<Barrier*>(word);
    if (b.mark != MARK) fail("an mbarrier that isn't initialised");
    return b;
}

void advance(unsigned long long* word) {
    Barrier& b = barrier_at(word);
    if (b.missing || b.bytes) return;
    b.missing = b.count;
    b.phase ^= 1;
    for (int i = 0; i < num_threads; ++i) {
        Fibre& f = fibres[i];
        if (f.mbarrier == word && f.parity != b.phase) {
            f.mbarrier = nullptr;
            wake(i);
        }
    }
}

void land(const Copy& copy) {
    if (copy.from) {
        memcpy(copy.to, copy.from, copy.bytes);
    } else {
        memset(copy.to, 0, copy.bytes);
    }
    if (!copy.barrier) return;
    Barrier& b = barrier_at(copy.barrier);
    b.bytes -= copy.bytes;
    advance(copy.barrier);
}

void check_source(const void* p, size_t bytes) {
    if (reinterpret_cast<size_t>(p) % 16) fail("a copy from an address that is no multiple of 16");
    static char sink[16];
    // The interceptor of memcpy reports a bad source here, where the copy starts, with its stack.
    for (size_t i = 0; i < bytes; i += 16) memcpy(sink, static_cast<const char*>(p) + i, 16);
}

}  // namespace

void fail(const char* format, ...) {
    char text[2000];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "emulator: %s: %s", kernel_name, text);
    if (current != &host) fprintf(stderr, "\nby %s", position(*current).c_str());
    fprintf(stderr, "\n");
    __sanitizer_print_stack_trace();
    fflush(stderr);
    _exit(3);
}

bool meet(unsigned int mask, void* mine, const char* what, const char* file, int line, void* (&lanes)[32]) {
    const int i = number_of(current), lane = i % 32;
    Warp& warp = warps[i / 32];
    const Place place = {what, file, line};
    if (!(mask >> lane & 1)) fail("%s: lane %d isn't in its own mask %#x", text_of(place).c_str(), lane, mask);
    if (mask & warp.exited) fail("%s: lanes %#x of the mask have ended", text_of(place).c_str(), mask & warp.exited);
    Meeting* meeting = nullptr;
    for (Meeting& m : warp.meetings) {
        if (m.mask == mask && m.place == place) {
            meeting = &m;
        } else if ((m.here & mask) && m.mask >> lane & 1) {
            fail("lanes %#x wait in %s, but lane %d is at %s", m.here, text_of(m.place).c_str(), lane,
                 text_of(place).c_str());
        }
    }
    if (!meeting) {
        warp.meetings.emplace_back();
        meeting = &warp.meetings.back();
        meeting->mask = mask;
        meeting->place = place;
        std::fill_n(meeting->operands, 32, nullptr);
    }
    meeting->here |= 1u << lane;
    meeting->operands[lane] = mine;
    if (meeting->here != mask) {
        wait_at(place);
        return false;
    }
    std::copy_n(meeting->operands, 32, lanes);
    return true;
}

void part(unsigned int mask) {
    const int i = number_of(current);
    std::vector<Meeting>& meetings = warps[i / 32].meetings;
    for (int lane = 0; lane < 32; ++lane) {
        if (mask >> lane & 1 && lane != i % 32) wake(i / 32 * 32 + lane);
    }
    meetings.erase(std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& m) { return m.here == mask; }));
}

int block_barrier(int predicate, const char* what, const char* file, int line) {
    const Place place = {what, file, line};
    if (num_at_barrier && !(barrier_place == place)) {
        fail("threads of the block wait in %s, but this one is at %s", text_of(barrier_place).c_str(),
             text_of(place).c_str());
    }
    barrier_place = place;
    num_true += predicate;
    if (++num_at_barrier == num_live) {
        release_block_barrier();
    } else {
        wait_at(place);
    }
    return barrier_result;
}

namespace {

// Warps come to a named barrier as one. All that have come are in `here`.
void check_whole_warps(const std::vector<int>& here) {
    for (int warp = 0; warp < int(warps.size()); ++warp) {
        unsigned int lanes = 0;
        for (int i : here) lanes |= i / 32 == warp ? 1u << i % 32 : 0u;
        if (lanes && ~lanes) fail("named_barrier: of warp %d only lanes %#x have come", warp, lanes);
    }
}

}  // namespace

void named_barrier(int id, int threads, const char* file, int line) {
    if (id < 1 || id > 15 || threads % 32 || threads > num_threads) fail("named_barrier(%d, %d)", id, threads);
    const int self = number_of(current);
    const Place place = {"named_barrier", file, line};
    NamedBarrier& b = named_barriers[id];
    for (int i : b.waiting) {
        if (i / 32 != self / 32 || fibres[i].waits_at == place) continue;
        fail("lane %d waits in %s, but lane %d is at %s", i % 32, text_of(fibres[i].waits_at).c_str(), self % 32,
             text_of(place).c_str());
    }
    if (!b.waiting.empty() && b.threads != threads) {
        fail("named barrier %d of %d and of %d threads", id, b.threads, threads);
    }
    b.threads = threads;
    b.waiting.push_back(self);
    if (int(b.waiting.size()) < threads) return wait_at(place);
    check_whole_warps(b.waiting);
    for (int i : b.waiting) wake(i);
    b.waiting.clear();
}

void* dynamic_shared() {
    if (!dynamic_memory) fail("the launch gave no dynamic shared memory");
    return dynamic_memory;
}

void check_shared(const void* p, size_t bytes, size_t alignment) {
    const char* at = static_cast<const char*>(p);
    const bool dynamic = dynamic_memory && at >= dynamic_memory && at + bytes <= dynamic_memory + dynamic_bytes;
    const bool inside = dynamic || (at >= __start_emulated_shared && at + bytes <= __stop_emulated_shared &&
                                    !__asan_region_is_poisoned(const_cast<char*>(at), bytes));
    if (!inside) fail("an address outside the block's shared memory (%zu bytes from it)", bytes);
    if (reinterpret_cast<size_t>(p) % alignment) fail("a shared address that is no multiple of %zu", alignment);
}

void copy_16(void* to, const void* from, bool valid) {
    if (valid) check_source(from, 16);
    if (reinterpret_cast<size_t>(from) % 16) fail("a copy from an address that is no multiple of 16");
    const Copy copy = {to, valid ? from : nullptr, 16, current->group, nullptr};
    if (lands_at_once()) {
        land(copy);
    } else {
        current->copies.push_back(copy);
    }
}

void commit_copies() { ++current->group; }

void wait_copies(int pending) {
    std::vector<Copy>& copies = current->copies;
    size_t done = 0;
    while (done < copies.size() && copies[done].group < current->group - pending) land(copies[done++]);
    copies.erase(copies.begin(), copies.begin() + done);
}

void bulk_copy(void* to, const void* from, unsigned int bytes, unsigned long long* barrier) {
    if (bytes == 0 || bytes % 16) fail("a bulk copy of %u bytes, no multiple of 16", bytes);
    check_source(from, bytes);
    barrier_at(barrier);
    const Copy copy = {to, from, bytes, 0, barrier};
    if (lands_at_once()) {
        land(copy);
    } else {
        bulk_copies.push_back(copy);
    }
}

void mbarrier_init(unsigned long long* barrier, unsigned int count) {
    Barrier b = {};
    b.count = b.missing = count;
    b.mark = MARK;
    memcpy(barrier, &b, sizeof b);
}

void mbarrier_arrive(unsigned long long* barrier, unsigned int bytes) {
    Barrier& b = barrier_at(barrier);
    if (b.missing == 0) fail("more arrivals at an mbarrier than its %d", int(b.count));
    b.bytes += bytes;
    b.missing -= 1;
    advance(barrier);
}

void mbarrier_wait(unsigned long long* barrier, unsigned int parity) {
    if (barrier_at(barrier).phase != parity) return;
    current->mbarrier = barrier;
    current->parity = parity;
    wait_at({"mbarrier_wait"});
}

namespace {

// A launch

void run_block() {
    spoil_shared_memory();
    num_live = num_threads;
    num_at_barrier = num_true = 0;
    bulk_copies.clear();
    for (NamedBarrier& b : named_barriers) b = {};
    warps.assign((num_threads + 31) / 32, {});
    if (num_threads % 32) warps.back().exited = ~0u << num_threads % 32;  // lanes that don't exist
    for (int i = 0; i < num_threads; ++i) {
        Fibre& f = fibres[i];
        f.exited = false;
        f.group = 0;
        f.copies.clear();
        wake(i);
    }
    switch_to(fibres[pick()]);
    if (bulk_copies.empty()) return;
    fail("block (%u, %u, %u) ends, and nobody has waited for a bulk copy of %u bytes", blockIdx.x, blockIdx.y,
         blockIdx.z, bulk_copies[0].bytes);
}

void out_of_time(int) { fail("no end after %d s of processor time", cpu_seconds()); }

void run_blocks(const dim3& grid) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);  // flush subnormal results and operands to zero
#endif
    signal(SIGPROF, out_of_time);
    const itimerval limit = {{0, 0}, {cpu_seconds(), 0}};
    setitimer(ITIMER_PROF, &limit, nullptr);
    random_numbers.seed(20240229);
    num_threads = blockDim.x * blockDim.y * blockDim.z;
    fibres = std::vector<Fibre>(num_threads);
    for (int i = 0; i < num_threads; ++i) {
        fibres[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        prepare(fibres[i]);
    }
    std::vector<size_t> blocks(size_t(grid.x) * grid.y * grid.z);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    if (order == REVERSE) std::reverse(blocks.begin(), blocks.end());
    if (order == SHUFFLED) std::shuffle(blocks.begin(), blocks.end(), random_numbers);
    for (const unsigned long i : blocks) {
        blockIdx = {unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)};
        run_block();
    }
}

// The launch file: numbers of 64 bits, then the buffers' bytes, which the results overwrite.
struct Buffer {
    long long bytes, misalignment, at;  // address modulo 256; place in the file
    char* memory;
    char* block;

    // An exact-size block of its own for every buffer, aligned as the caller's is.
    void allocate(const char* file) {
        if (posix_memalign(reinterpret_cast<void**>(&block), 256, misalignment + bytes)) fail("no memory");
        memory = block + misalignment;
        memcpy(memory, file + at, bytes);
        __asan_poison_memory_region(block, misalignment);
    }
};

struct Launch {
    dim3 grid, block;
    std::vector<Buffer> buffers;
    std::vector<long long> argument_buffers, itemsizes;  // -1: no buffer; bytes of an element
    size_t bytes_from, bytes;                            // of all buffers in the file

    explicit Launch(const long long* p) {
        grid = {unsigned(p[0]), unsigned(p[1]), unsigned(p[2])};
        block = {unsigned(p[3]), unsigned(p[4]), unsigned(p[5])};
        dynamic_bytes = p[6], most_shared_bytes = p[7];
        const long long num_arguments = p[8], num_buffers = p[9];
        bytes_from = p[10], bytes = p[11];
        p += 12;
        for (int i = 0; i < num_arguments; ++i, p += 5) {  // buffer or -1, place in it, itemsize, size, bits
            argument_buffers.push_back(p[0]);
            itemsizes.push_back(p[2]);
            arguments.push_back({p[3] == 0, p[3] ? size_t(p[3]) : sizeof(void*), nullptr, p[3] ? p[4] : p[1]});
        }
        for (int i = 0; i < num_buffers; ++i, p += 3) buffers.push_back({p[0], p[1], p[2], nullptr, nullptr});
    }

    // One order, in a process of its own; the buffers' last state goes to `results`, laid out as in the file.
    void run(const char* file, char* results) {
        for (Buffer& b : buffers) b.allocate(file);
        for (size_t i = 0; i < arguments.size(); ++i) {
            if (argument_buffers[i] < 0) continue;
            arguments[i].pointer = buffers[argument_buffers[i]].memory + arguments[i].bits;
        }
        void** const shared = reinterpret_cast<void**>(&dynamic_memory);
        if (dynamic_bytes && posix_memalign(shared, 128, dynamic_bytes)) fail("no memory");
        blockDim = block;
        gridDim = grid;
        run_blocks(grid);
        for (const Buffer& b : buffers) memcpy(results + b.at - bytes_from, b.memory, b.bytes);
    }

    // Says where two orders' results differ, if they do.
    void compare(const char* a, const char* b, Order order_b) const {
        if (memcmp(a, b, bytes) == 0) return;
        for (size_t i = 0; i < argument_buffers.size(); ++i) {
            if (argument_buffers[i] < 0) continue;
            const Buffer& buffer = buffers[argument_buffers[i]];
            const size_t from = buffer.at - bytes_from, start = from + arguments[i].bits;
            const size_t size = itemsizes[i];
            for (size_t at = start; at + size <= from + buffer.bytes; at += size) {
                if (memcmp(a + at, b + at, size) == 0) continue;
                fail("a race: element %zu of argument %zu isn't the same in %s and %s order", (at - start) / size, i,
                     ORDER_NAMES[FORWARD], ORDER_NAMES[order_b]);
            }
        }
        fail("a race: results aren't the same in %s and %s order", ORDER_NAMES[FORWARD], ORDER_NAMES[order_b]);
    }
};

void* map(size_t bytes, int flags, int fd) {
    void* p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (p == MAP_FAILED) fail("no memory");
    return p;
}

void relay(FILE* log, Order of) {
    fprintf(stderr, "in %s order:\n", ORDER_NAMES[of]);
    rewind(log);
    for (int c; (c = getc(log)) != EOF;) putc(c, stderr);
}

int main(int count, char** words) {
    if (count != 3) fail("usage: program kernel launch-file");
    kernel_name = words[1];
    const Kernel* kernel = emulated_kernels;
    while (kernel->name && strcmp(kernel->name, words[1])) ++kernel;
    if (!kernel->name) fail("no such kernel");
    const int fd = open(words[2], O_RDWR);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) fail("can't open %s", words[2]);
    char* file = static_cast<char*>(map(info.st_size, MAP_SHARED, fd));
    Launch launch(reinterpret_cast<long long*>(file));
    const int most_threads = std::min(kernel->most_threads, MAX_THREADS);
    const int threads = launch.block.x * launch.block.y * launch.block.z;
    if (threads > most_threads) fail("blocks of %d threads, where the kernel allows %d", threads, most_threads);
    check_shared_bytes();
    kernel->check(arguments.data(), arguments.size());
    run_kernel = kernel->run;

    char* results[ORDERS];
    FILE* logs[ORDERS];
    pid_t children[ORDERS];
    for (int i = 0; i < ORDERS; ++i) {
        results[i] = static_cast<char*>(map(launch.bytes, MAP_SHARED | MAP_ANONYMOUS, -1));
        logs[i] = tmpfile();
        children[i] = fork();
        if (children[i] == 0) {
            dup2(fileno(logs[i]), 2);
            order = static_cast<Order>(i);
            launch.run(file, results[i]);
            _exit(0);
        }
    }
    int failed = -1;
    for (int i = 0; i < ORDERS; ++i) {
        int status;
        if (waitpid(children[i], &status, 0) < 0 || status) failed = failed < 0 ? i : failed;
    }
    if (failed >= 0) {
        relay(logs[failed], static_cast<Order>(failed));
        return 3;
    }
    for (int i = 1; i < ORDERS; ++i) launch.compare(results[0], results[i], static_cast<Order>(i));
    memcpy(file + launch.bytes_from, results[0], launch.bytes);
    return 0;
}

}  // namespace
}  // namespace emulator

int main(int count, char** words) { return emulator::main(count, words); }
