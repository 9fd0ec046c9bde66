// x86-64 with AVX2 and FMA.
#include <cmath>

#include "kernels.h"

namespace avx2 {
constexpr int LANES = 8;
constexpr int TILE_OUTS = 4, TILE_ROWS = 3;  // sums that fit in the registers
#include "kernels.inc"
}  // namespace avx2

const Level avx2_level = {"avx2", avx2::PAIRS, avx2::TILE_OUTS, avx2::spread_row, avx2::multiply, avx2::attend, avx2::norm};
