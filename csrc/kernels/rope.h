// Rotary position embedding.
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

// Which numbers of a row are rotated: in each of the first `heads` heads of `head_dim` numbers,
// pairs among the first `rotary_dim`. All others are copied.
struct Rope {
  // Acc tables; row r of the tensor uses row r % table_rows. A table has a number for each pair, or
  // for each number.
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t table_rows = 1;
  bool by_pair = false;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  // Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).
  bool interleaved = false;
  // Every third head is copied: heads are the query, the key and the value of one, and so on.
  bool by_head = false;
  // Multiplies by the transposed matrix, as backward does.
  bool transposed = false;
};

// A pair (a, b) becomes (a cos_a - b sin_a, b cos_b + a sin_b). x and y point at row `first` of
// rows of h numbers.
inline const Kernel<void(DType, const void* x, const Rope&, void* y, int64_t first, int64_t rows,
                         int64_t h)>
    rope{"rope"};

}  // namespace transformer_ops::cpu
