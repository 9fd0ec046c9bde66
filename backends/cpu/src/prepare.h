// The preparation of a step's input, as ``input.prepare/1`` means it.
#pragma once

#include <cstdint>

// One cache group: a row's blocks, [table_rows, stride] of the slot type, of which ``width`` are copied to ``blocks``
// [B, width]; ``slots`` [T] takes each token's slot.
struct Group {
    const void* table;
    void *blocks, *slots;
    int64_t stride, width, block_tokens;
};

// B rows, T tokens. ``computed`` [table_rows] becomes each row's length. ids .. lengths are of the slot type, int64
// where ``wide``, else int32. The layout is ``native.PrepareJob``'s.
struct Preparation {
    const int32_t *rows, *start, *num_new, *token_row, *token_offset, *host_ids, *last_tokens;
    int32_t* computed;
    void *ids, *positions, *base, *lengths;
    const Group* groups;
    int64_t num_rows, num_tokens, num_groups, table_rows, places, wide;
};
