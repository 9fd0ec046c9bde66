// x86-64 with AVX-512.
#include <cmath>

#include "kernels.h"

namespace avx512 {
constexpr int LANES = 16;
constexpr int TILE_OUTS = 5, TILE_ROWS = 5;  // sums that fit in the registers
#include "kernels.inc"
}  // namespace avx512

const Level avx512_level = {"avx512", avx512::PAIRS, avx512::TILE_OUTS, avx512::spread_row, avx512::multiply, avx512::attend, avx512::norm};
