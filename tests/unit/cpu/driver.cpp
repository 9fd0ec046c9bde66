// Drives the compiled kernels and their pool without Python, for sanitizers: driver MODE... Prints what failed and
// ends with 1, or is silent.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "pool.h"

extern "C" {
const char* drivetrain_level(int number);
int drivetrain_linear(const float* x, const uint16_t* weight, float* out, int64_t rows, int64_t outs, int64_t in,
                      int level, int threads);
void drivetrain_attend(const Attention* attention, int level, int threads);
void drivetrain_norm(const float* x, const float* residual, const float* weight, float* total, float* out, int64_t rows,
                     int64_t inner, int64_t size, int64_t stride, int64_t weights, float eps, int level, int threads);
}

namespace {

using Random = std::minstd_rand;

int64_t pick(Random& random, int64_t first, int64_t last) {
    return std::uniform_int_distribution<int64_t>(first, last)(random);
}

void expect(bool true_thing, const std::string& what) {
    if (true_thing) return;
    std::printf("%s\n", what.c_str());
    std::exit(1);
}

// Exactly as many values as asked for, so that one beyond is seen.
struct Values {
    std::unique_ptr<float[]> at;
    int64_t count;

    explicit Values(int64_t count) : at(new float[count]), count(count) {}
    Values(Random& random, int64_t count) : Values(count) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; ++i) at[i] = normal(random);
    }
};

struct Halves {
    std::unique_ptr<uint16_t[]> at;

    Halves(Random& random, int64_t count) : at(new uint16_t[count]) {
        const Values values(random, count);
        for (int64_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, &values.at[i], sizeof(bits));
            at[i] = static_cast<uint16_t>(bits >> 16);
        }
    }
    double operator[](int64_t i) const {
        const uint32_t bits = static_cast<uint32_t>(at[i]) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof(bits));
        return value;
    }
};

void expect_near(float got, double want, const std::string& what) {
    expect(std::fabs(got - want) <= 1e-3 * (1 + std::fabs(want)), what + ": " + std::to_string(got) + " is not " + std::to_string(want));
}

void check_linear(Random& random, int level, int threads, int64_t rows, int64_t outs, int64_t in) {
    const Values x(random, rows * in), out(rows * outs);
    const Halves weight(random, outs * in);
    expect(drivetrain_linear(x.at.get(), weight.at.get(), out.at.get(), rows, outs, in, level, threads) == 0, "no room");
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t o = 0; o < outs; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < in; ++i) sum += x.at[r * in + i] * weight[o * in + i];
            expect_near(out.at[r * outs + o], sum, "linear");
        }
}

void check_norm(Random& random, int level, int threads, int64_t rows, int64_t size) {
    const Values x(random, rows * size), residual(random, rows * size), weight(random, size);
    const Values total(rows * size), out(rows * size);
    drivetrain_norm(x.at.get(), residual.at.get(), weight.at.get(), total.at.get(), out.at.get(), rows, 1, size, size, 1,
                    1e-6f, level, threads);
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < size; ++i) squares += std::pow(double(x.at[r * size + i]) + residual.at[r * size + i], 2);
        for (int64_t i = 0; i < size; ++i) {
            const double wide = double(x.at[r * size + i]) + residual.at[r * size + i];
            expect_near(out.at[r * size + i], wide / std::sqrt(squares / size + 1e-6) * weight.at[i], "norm");
        }
    }
}

// One entry after another over permuted blocks of three slots, of which the first and the last are read.
void check_attend(Random& random, int level, int threads, int64_t kv_heads, int64_t groups, int64_t dim, int64_t v_dim) {
    const int64_t slots = 3, heads = kv_heads * groups;
    const Values q(random, 2 * heads * dim), sinks(random, heads), out(2 * heads * v_dim);
    const Halves k(random, 4 * slots * kv_heads * dim), v(random, 4 * slots * kv_heads * v_dim);
    const std::unique_ptr<int64_t[]> table(new int64_t[4]{3, 1, 2, 0}), tokens(new int64_t[2]{1, 0});
    const std::unique_ptr<int64_t[]> rows(new int64_t[2]{0, 1}), lows(new int64_t[2]{1, 0}), ends(new int64_t[2]{6, 6});
    const Attention job{q.at.get(), k.at.get(), v.at.get(), out.at.get(), sinks.at.get(), table.get(), tokens.get(),
                        rows.get(), lows.get(), ends.get(), 2, heads, kv_heads, dim, v_dim, 2, slots, heads * dim,
                        slots * kv_heads * dim, kv_heads * dim, dim, slots * kv_heads * v_dim, kv_heads * v_dim, v_dim,
                        0.5f, 3.0f, 1};
    drivetrain_attend(&job, level, threads);
    for (int64_t e = 0; e < 2; ++e)
        for (int64_t h = 0; h < heads; ++h) {
            double total = std::exp(double(sinks.at[h]));
            std::vector<double> sums(v_dim);
            for (int64_t s = lows[e]; s < ends[e]; ++s) {
                const int64_t slot = (table[rows[e] * 2 + s / slots] * slots + s % slots) * kv_heads + h / groups;
                double score = 0;
                for (int64_t i = 0; i < dim; ++i) score += q.at[(tokens[e] * heads + h) * dim + i] * k[slot * dim + i];
                const double weight = std::exp(3.0 * std::tanh(score * 0.5 / 3.0));
                total += weight;
                for (int64_t i = 0; i < v_dim; ++i) sums[i] += weight * v[slot * v_dim + i];
            }
            for (int64_t i = 0; i < v_dim; ++i)
                expect_near(out.at[(tokens[e] * heads + h) * v_dim + i], sums[i] / total, "attention");
        }
}

// Every kernel of every level, in shapes around the vectors' lengths.
void kernels() {
    Random random(1);
    for (int level = 0; drivetrain_level(level) != nullptr; ++level)
        for (int64_t size : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100}) {
            for (int64_t rows : {1, 2, 3, 6, 7, 11})
                for (int64_t outs : {1, 4, 5, 42}) check_linear(random, level, 2, rows, outs, size);
            check_norm(random, level, 2, 35, size);
            check_attend(random, level, 2, 1, 1, size, 5);
            check_attend(random, level, 2, 2, 5, 3, size);
        }
}

// A job of random length on a random number of threads: every chunk once, all done at the return.
void check_job(Random& random, int64_t chunks) {
    struct Seen {
        std::unique_ptr<std::atomic<int>[]> times;
        std::unique_ptr<int[]> plain;  // written without a lock: whoever reads it must come after
    } seen{std::make_unique<std::atomic<int>[]>(chunks), std::make_unique<int[]>(chunks)};
    const int threads = static_cast<int>(pick(random, 1, 5));
    run_chunks(
        [](const void* job, int64_t chunk) {
            const auto* s = static_cast<const Seen*>(job);
            s->times[chunk].fetch_add(1, std::memory_order_relaxed);
            s->plain[chunk] += 7;
        },
        &seen, chunks, threads);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
        expect(seen.times[chunk].load(std::memory_order_relaxed) == 1 && seen.plain[chunk] == 7,
               "chunk " + std::to_string(chunk) + " of " + std::to_string(chunks) + " on " + std::to_string(threads) + " threads");
}

void jobs(int64_t count) {
    Random random(2);
    for (int64_t job = 0; job < count; ++job) {
        check_job(random, pick(random, 0, job % 7 ? 9 : 300));
        if (job % 50 == 0) usleep(pick(random, 0, 300));  // so that helpers are asleep now and then
    }
    check_job(random, (1 << 20) + 3);  // more than one turn of the pool takes
}

// Four threads that each want the pool.
void callers(int64_t count) {
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number)
        threads.emplace_back([number, count] {
            Random random(10 + number);
            for (int64_t i = 0; i < count; ++i) {
                check_job(random, pick(random, 0, 50));
                if (i % 20 == 0) check_linear(random, 0, 3, pick(random, 1, 9), pick(random, 1, 200), pick(random, 1, 99));
            }
        });
    for (auto& thread : threads) thread.join();
}

// Helpers that have long been asleep take part, and no more of them than may.
void helped() {
    usleep(50000);
    std::atomic<int> takers{0};
    run_chunks(
        [](const void* job, int64_t) {
            static thread_local const void* seen = nullptr;
            if (seen != job) static_cast<std::atomic<int>*>(const_cast<void*>(job))->fetch_add(1);
            seen = job;
            usleep(1000);
        },
        &takers, 200, 4);
    expect(takers > 1, "nobody helped the caller");
    expect(takers <= 4, std::to_string(takers) + " threads did the work of 4");
}

// A child, and its child, have a pool of their own; the parent's goes on.
void forks(int depth) {
    jobs(20);
    helped();
    if (depth == 0) return;
    const pid_t child = fork();
    if (child == 0) {
        forks(depth - 1);
        std::exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(status == 0, "a forked child failed");
    jobs(20);
}

}  // namespace

int main(int count, char** words) {
    for (int i = 1; i < count; ++i) {
        const std::string mode = words[i];
        if (mode == "kernels") kernels();
        else if (mode == "jobs") jobs(5000);
        else if (mode == "callers") callers(1000);
        else if (mode == "helped") helped();
        else if (mode == "forks") forks(3);
        else expect(false, "no mode " + mode);
    }
    return 0;
}
