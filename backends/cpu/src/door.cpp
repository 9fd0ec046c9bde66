// The C functions that Python calls. Pointers are to host memory that the caller keeps alive; nothing is kept.
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"
#include "kernels.h"

namespace {

constexpr int64_t PANEL_BYTES = 256 << 10;
constexpr int64_t SPREAD_BYTES = 4 << 20;  // the most that a copy of rows takes
constexpr int64_t CHUNK_BYTES = 64 << 10, MOST_CHUNK_BYTES = 1 << 20;
constexpr int64_t CHUNKS_A_THREAD = 8, CHUNK_OUTS = 40, SPREAD_ROWS = 16, NORM_ROWS = 32;  // a multiple of what every level does at once

struct Job {
    const Level* level;
    Product product;
    int64_t outs, chunk;
    const float* x;
    float* spread;
};

void do_rows(const void* given, int64_t number) {
    const Job& job = *static_cast<const Job*>(given);
    const Product& p = job.product;
    const int64_t first = number * SPREAD_ROWS, end = first + SPREAD_ROWS < p.rows ? first + SPREAD_ROWS : p.rows;
    for (int64_t row = first; row < end; ++row)
        job.level->spread_row(job.x + row * p.in, p.in, job.spread + row * p.padded);
}

void do_chunk(const void* given, int64_t number) {
    const Job& job = *static_cast<const Job*>(given);
    const int64_t first = number * job.chunk;
    const int64_t end = first + job.chunk < job.outs ? first + job.chunk : job.outs;
    static thread_local std::vector<float> wide;
    const size_t room = static_cast<size_t>(job.level->tile * job.product.padded);
    if (wide.size() < room) wide.resize(room);
    job.level->multiply(job.product, first, end, wide.data());
}

struct Heads {
    const Level* level;
    const Attention* attention;
};

void do_head(const void* given, int64_t number) {
    const Heads& job = *static_cast<const Heads*>(given);
    static thread_local std::vector<float> room;
    job.level->attend(*job.attention, number / job.attention->kv_heads, number % job.attention->kv_heads, room);
}

struct Norms {
    const Level* level;
    const float *x, *residual, *weight;
    float *total, *out;
    int64_t rows, inner, size, stride, weights;
    float eps;
};

void do_norms(const void* given, int64_t number) {
    const Norms& n = *static_cast<const Norms*>(given);
    const int64_t first = number * NORM_ROWS, end = first + NORM_ROWS < n.rows ? first + NORM_ROWS : n.rows;
    for (int64_t row = first; row < end; ++row) {
        const float* x = n.x + row / n.inner * n.stride + row % n.inner * n.size;
        const int64_t at = row * n.size;
        n.level->norm(x, n.residual ? n.residual + at : nullptr, n.weight + row % n.weights * n.size, n.total + at,
                      n.out + at, n.size, n.eps);
    }
}

const Level* levels[3];

int find_levels() {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        levels[count++] = &avx512_level;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels[count++] = &avx2_level;
#endif
    levels[count++] = &plain_level;
    return count;
}

const int level_count = find_levels();

// Outputs a chunk: enough bytes to be worth taking, few enough that all threads end together.
int64_t chunk_outs(int64_t outs, int64_t in, int threads) {
    int64_t bytes = outs * in * 2 / (threads * CHUNKS_A_THREAD);
    bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes > MOST_CHUNK_BYTES ? MOST_CHUNK_BYTES : bytes;
    const int64_t groups = bytes / (in * 2 * CHUNK_OUTS);
    return (groups < 1 ? 1 : groups) * CHUNK_OUTS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int drivetrain_abi() { return 3; }

// Name of the level with that number, best first; null beyond the last.
const char* drivetrain_level(int number) { return number < level_count ? levels[number]->name : nullptr; }

// out [rows, outs] = x [rows, in] times weight [outs, in] transposed; float32, weight bfloat16, all contiguous.
// Returns 0, or 1 where memory is short.
int drivetrain_linear(const float* x, const uint16_t* weight, float* out, int64_t rows, int64_t outs, int64_t in,
                      int level, int threads) {
    const Level& chosen = *levels[level];
    if (in < 1) {
        for (int64_t i = 0; i < rows * outs; ++i) out[i] = 0.0f;
        return 0;
    }
    const int64_t padded = (in + chosen.pairs - 1) / chosen.pairs * chosen.pairs;
    const int64_t most = SPREAD_BYTES / (4 * padded), piece = most < SPREAD_ROWS ? SPREAD_ROWS : most;
    std::unique_ptr<float[]> spread(new (std::nothrow) float[(rows < piece ? rows : piece) * padded]);
    if (!spread) return 1;
    const int64_t panel = PANEL_BYTES / (4 * padded);
    for (int64_t first = 0; first < rows; first += piece) {
        const int64_t some = rows - first < piece ? rows - first : piece;
        Job job{&chosen, {weight, spread.get(), out + first * outs, some, in, padded, outs, panel < 16 ? 16 : panel},
                outs, chunk_outs(outs, in, threads), x + first * in, spread.get()};
        run_chunks(do_rows, &job, (some + SPREAD_ROWS - 1) / SPREAD_ROWS, threads);
        run_chunks(do_chunk, &job, (outs + job.chunk - 1) / job.chunk, threads);
    }
    return 0;
}

// See ``Attention``.
void drivetrain_attend(const Attention* attention, int level, int threads) {
    const Heads job{levels[level], attention};
    run_chunks(do_head, &job, attention->entries * attention->kv_heads, threads);
}

// out = norm of x, or of total = x + residual where a residual is given; float32. x: rows / inner runs of ``inner``
// rows of ``size``, the runs ``stride`` elements apart; the others [rows, size]. weight [weights, size], row r takes
// r mod weights.
void drivetrain_norm(const float* x, const float* residual, const float* weight, float* total, float* out, int64_t rows,
                     int64_t inner, int64_t size, int64_t stride, int64_t weights, float eps, int level, int threads) {
    const Norms job{levels[level], x, residual, weight, total, out, rows, inner, size, stride, weights, eps};
    run_chunks(do_norms, &job, (rows + NORM_ROWS - 1) / NORM_ROWS, threads);
}
}
#pragma GCC visibility pop
