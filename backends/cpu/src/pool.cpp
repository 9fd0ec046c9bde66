#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int SPINS = 20000;          // looks at the state before a helper sleeps: some 0.3 ms, the time between two products
constexpr int PATIENCE = 4000;       // looks before a caller that waits for helpers lets others run
constexpr uint64_t FIELD = 1u << 20;  // chunks of a job, and the next one, have 20 bits each
constexpr int64_t MOST_CHUNKS = FIELD - 1;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One word says which job is current (24 bits that wrap), how many chunks it has, and which is next. A helper takes
// a chunk by exchanging the whole word, so it can't take one of a job that has ended.
struct Pool {
    std::atomic<uint64_t> state{0};
    std::atomic<uint32_t> signal{0};  // changes with every job; helpers sleep on it
    std::atomic<int64_t> done{0};
    std::atomic<int> sleepers{0};
    std::atomic<int> allowed{0};  // helpers that may take part in the current job
    Work work = nullptr;
    const void* job = nullptr;
    std::mutex one_caller;
    int helpers = 0;

    static uint64_t chunks_of(uint64_t s) { return s / FIELD % FIELD; }
    static uint64_t next_of(uint64_t s) { return s % FIELD; }

    // Takes and does chunks until none is left; says whether it did any.
    bool help() {
        bool any = false;
        uint64_t s = state.load(std::memory_order_acquire);
        while (next_of(s) < chunks_of(s)) {
            if (!state.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel)) continue;
            work(job, static_cast<int64_t>(next_of(s)));
            done.fetch_add(1, std::memory_order_acq_rel);
            any = true;
            s = state.load(std::memory_order_acquire);
        }
        return any;
    }

    void serve(int number) {
        for (;;) {
            const uint32_t seen = signal.load(std::memory_order_acquire);
            bool worked = false;
            for (int spin = 0; spin < SPINS && !worked; ++spin) {
                if (number < allowed.load(std::memory_order_relaxed)) worked = help();
                relax();
            }
            if (worked) continue;
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            signal.wait(seen, std::memory_order_seq_cst);
            sleepers.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    // One more helper, unless the system refuses: the caller does the work then.
    bool start() {
        try {
            std::thread([this, number = helpers] { serve(number); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    void run(Work what, const void* with, int64_t chunks, int threads) {
        std::lock_guard<std::mutex> lock(one_caller);
        while (helpers < threads - 1 && start()) ++helpers;
        work = what;
        job = with;
        done.store(0, std::memory_order_relaxed);
        allowed.store(threads - 1, std::memory_order_relaxed);
        const uint64_t name = (state.load(std::memory_order_relaxed) / (FIELD * FIELD) + 1) * FIELD * FIELD;
        state.store(name + static_cast<uint64_t>(chunks) * FIELD, std::memory_order_release);
        signal.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) > 0) signal.notify_all();
        help();
        for (int look = 0; done.load(std::memory_order_acquire) < chunks;) {
            if (look < PATIENCE) {
                ++look;
                relax();
            } else {
                sched_yield();
            }
        }
    }
};

std::atomic<Pool*> current{nullptr};

// A forked child has none of its parent's threads: it starts a pool of its own. Pools are never freed, as helpers
// may outlive the end of main.
Pool& pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    (void)registered;
    Pool* known = current.load();
    if (known == nullptr) {
        Pool* made = new Pool();
        if (current.compare_exchange_strong(known, made)) return *made;
        delete made;
    }
    return *known;
}

}  // namespace

void run_chunks(Work work, const void* job, int64_t chunks, int threads) {
    if (threads < 2 || chunks < 2) {
        for (int64_t chunk = 0; chunk < chunks; ++chunk) work(job, chunk);
        return;
    }
    for (int64_t first = 0; first < chunks; first += MOST_CHUNKS) {
        struct Shifted {
            Work work;
            const void* job;
            int64_t first;
        } shifted{work, job, first};
        const int64_t some = chunks - first < MOST_CHUNKS ? chunks - first : MOST_CHUNKS;
        pool().run(
            [](const void* given, int64_t chunk) {
                const auto* s = static_cast<const Shifted*>(given);
                s->work(s->job, s->first + chunk);
            },
            &shifted, some, threads);
    }
}
