// any processor: the compiler's own 128-bit vectors (NEON on arm64).
#include <cmath>

#include "kernels.h"

namespace plain {
constexpr int LANES = 4;
constexpr int TILE_OUTS = 2, TILE_ROWS = 2;  // sums that fit in the registers
#include "kernels.inc"
}  // namespace plain

const Level plain_level = {"plain", plain::PAIRS, plain::TILE_OUTS, plain::spread_row, plain::multiply, plain::attend, plain::norm};
