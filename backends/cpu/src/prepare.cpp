#include "prepare.h"

namespace {

// False where a row or a token names a place that is not there; nothing of it has been written then.
bool inside(const Preparation& p) {
    for (int64_t b = 0; b < p.num_rows; ++b)
        if (p.rows[b] < 0 || p.rows[b] >= p.table_rows) return false;
    for (int64_t t = 0; t < p.num_tokens; ++t)
        if (p.token_row[t] < 0 || p.token_row[t] >= p.num_rows || p.token_offset[t] < 0) return false;
    return true;
}

template <class Slot>
void fill_group(const Preparation& p, const Group& group) {
    const Slot *table = static_cast<const Slot*>(group.table), *positions = static_cast<const Slot*>(p.positions);
    Slot *blocks = static_cast<Slot*>(group.blocks), *slots = static_cast<Slot*>(group.slots);
    for (int64_t b = 0; b < p.num_rows; ++b)
        for (int64_t w = 0; w < group.width; ++w) blocks[b * group.width + w] = table[p.rows[b] * group.stride + w];
    for (int64_t t = 0; t < p.num_tokens; ++t) {
        const int64_t b = p.token_row[t], position = positions[t];
        int64_t column = position / group.block_tokens;
        if (column >= group.width) column = group.width - 1;
        const bool real = p.token_offset[t] < p.num_new[b];
        slots[t] = real ? blocks[b * group.width + column] * group.block_tokens + position % group.block_tokens : 0;
    }
}

template <class Slot>
void fill(const Preparation& p) {
    Slot *ids = static_cast<Slot*>(p.ids), *positions = static_cast<Slot*>(p.positions);
    Slot *base = static_cast<Slot*>(p.base), *lengths = static_cast<Slot*>(p.lengths);
    for (int64_t b = 0; b < p.num_rows; ++b) {
        base[b] = p.start[b] >= 0 ? p.start[b] : p.computed[p.rows[b]];
        lengths[b] = p.num_new[b] > 0 ? base[b] + p.num_new[b] : 0;
    }
    for (int64_t t = 0; t < p.num_tokens; ++t) {
        const int64_t b = p.token_row[t], offset = p.token_offset[t];
        const bool real = offset < p.num_new[b];
        const int64_t place = offset < p.places ? offset : p.places - 1;
        const int32_t id = p.start[b] >= 0 ? p.host_ids[t] : p.last_tokens[p.rows[b] * p.places + place];
        ids[t] = real ? id : 0;
        positions[t] = real ? base[b] + offset : 0;
    }
    for (int64_t g = 0; g < p.num_groups; ++g) fill_group<Slot>(p, p.groups[g]);
    for (int64_t b = 0; b < p.num_rows; ++b) p.computed[p.rows[b]] = static_cast<int32_t>(lengths[b]);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Returns 0, or 1 where a row or a token is out of range; nothing is written then.
int drivetrain_prepare(const Preparation* preparation) {
    if (!inside(*preparation)) return 1;
    if (preparation->wide)
        fill<int64_t>(*preparation);
    else
        fill<int32_t>(*preparation);
    return 0;
}

// sample.keep/1: last_tokens [table_rows, places] takes the tokens of rows, packed [2 count] tokens and witnesses.
// Returns 0, or 1 where a row is out of range; nothing is written then.
int drivetrain_keep(const int32_t* tokens, const int32_t* witness, const int32_t* rows, int32_t* last_tokens,
                    int32_t* packed, int64_t count, int64_t table_rows, int64_t places) {
    for (int64_t n = 0; n < count; ++n)
        if (rows[n] < 0 || rows[n] >= table_rows) return 1;
    for (int64_t n = 0; n < count; ++n) {
        last_tokens[rows[n] * places] = packed[n] = tokens[n];
        packed[count + n] = witness[n];
    }
    return 0;
}
}
#pragma GCC visibility pop
