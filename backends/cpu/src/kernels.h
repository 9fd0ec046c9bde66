// What the kernels are given, and the levels that have them.
#pragma once

#include <cstdint>
#include <vector>

// out [rows, stride] = x [rows, in] times weight [outs, in] transposed; x is given as ``spread`` [rows, padded], in the
// layout that ``spread_row`` of the same level makes. ``panel``: rows whose spread stays in the cache.
struct Product {
    const uint16_t* weight;
    const float* spread;
    float* out;
    int64_t rows, in, padded, stride, panel;
};

// Attention of single queries (entries) over paged keys and values. Entry e is token tokens[e] of the step and sees the
// keys lows[e] .. ends[e] - 1 of row rows[e] of table [.., width]. Without tokens and rows entry e is token and row e;
// without lows it sees the last ``window`` keys, 0: all. q [T, heads, dim], rows ``q_stride`` apart, and out
// [T, heads, v_dim] are float32; k and v are float32, or bfloat16 (``half``), strides in elements. ``sinks`` [heads] or
// null. ``soft_cap`` 0: none. The layout is ``native.AttentionJob``'s.
struct Attention {
    const float* q;
    const void *k, *v;
    float* out;
    const float* sinks;
    const int64_t *table, *tokens, *rows, *lows, *ends;
    int64_t entries, heads, kv_heads, dim, v_dim, width, block_tokens;
    int64_t q_stride, k_block, k_slot, k_head, v_block, v_slot, v_head;
    float scale, soft_cap;
    int64_t half, window;
};

struct Level {
    const char* name;
    int64_t pairs;  // spread rows are padded to a multiple of it
    int64_t tile;   // spread rows of the weight that ``multiply`` needs room for
    void (*spread_row)(const float* x, int64_t in, float* spread);
    void (*multiply)(const Product& product, int64_t first, int64_t end, float* wide);
    void (*attend)(const Attention& attention, int64_t entry, int64_t head, std::vector<float>& room);
    void (*norm)(const float* x, const float* residual, const float* weight, float* total, float* out, int64_t size,
                 float eps);
};

#if defined(__x86_64__)
extern const Level avx2_level, avx512_level;
#endif
extern const Level plain_level;
