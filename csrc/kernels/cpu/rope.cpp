// Rotates pairs of numbers by angles that depend on the row.
#include "kernels/rope.h"

#include "rows.h"

namespace transformer_ops::cpu {
namespace {

// The matrix of a pair is ((cos_a, -sin_a), (sin_b, cos_b)).
template <class A>
struct Tables {
  const A *cos_a, *cos_b, *sin_a, *sin_b;
};

template <class A>
Tables<A> tables_of(const Rope& rope, int64_t row, int64_t to_second) {
  const int64_t width = rope.by_pair ? rope.rotary_dim / 2 : rope.rotary_dim;
  const int64_t second = rope.by_pair ? 0 : to_second;
  const A* const cos = as<A>(rope.cos) + row % rope.table_rows * width;
  const A* const sin = as<A>(rope.sin) + row % rope.table_rows * width;
  return {cos, cos + second, sin, sin + second};
}

template <bool kTransposed, class T>
void rotate_halves(const T* x, T* y, const Tables<Acc<T>>& tables, int64_t half) {
  for_vectors<T>(
      half, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
        const auto a = load(x + i, lanes), b = load(x + half + i, lanes);
        const auto cos_a = load_acc<T>(tables.cos_a + i, lanes);
        const auto cos_b = load_acc<T>(tables.cos_b + i, lanes);
        const auto sin_a = load_acc<T>(tables.sin_a + i, lanes);
        const auto sin_b = load_acc<T>(tables.sin_b + i, lanes);
        if constexpr (kTransposed) {
          store(y + i, a * cos_a + b * sin_b, lanes);
          store(y + half + i, b * cos_b - a * sin_a, lanes);
        } else {
          store(y + i, a * cos_a - b * sin_a, lanes);
          store(y + half + i, b * cos_b + a * sin_b, lanes);
        }
      });
}

// `step` is the distance of the tables' numbers of two pairs.
template <class A>
void rotate_neighbors(const A* x, A* y, const Tables<A>& tables, int64_t step, bool transposed,
                      int64_t pairs) {
  const A sign = transposed ? A(-1) : A(1);
  const A* const to_a = transposed ? tables.sin_b : tables.sin_a;
  const A* const to_b = transposed ? tables.sin_a : tables.sin_b;
  for (int64_t i = 0; i < pairs; ++i) {
    const A a = x[2 * i], b = x[2 * i + 1];
    y[2 * i] = a * tables.cos_a[step * i] - sign * b * to_a[step * i];
    y[2 * i + 1] = b * tables.cos_b[step * i] + sign * a * to_b[step * i];
  }
}

template <class T>
void rotate_interleaved(const T* x, T* y, Tables<Acc<T>> tables, const Rope& rope) {
  using A = Acc<T>;
  const int64_t step = rope.by_pair ? 1 : 2;
  A in[kBlock], out[kBlock];
  for (int64_t start = 0; start < rope.rotary_dim; start += kBlock) {
    const int64_t n = smaller(kBlock, rope.rotary_dim - start), skipped = start / 2 * step;
    const Tables<A> here{tables.cos_a + skipped, tables.cos_b + skipped, tables.sin_a + skipped,
                         tables.sin_b + skipped};
    const A* const given = load(x + start, in, n);
    if constexpr (kIsAcc<T>) {
      rotate_neighbors(given, y + start, here, step, rope.transposed, n / 2);
    } else {
      rotate_neighbors(given, out, here, step, rope.transposed, n / 2);
      from_acc(out, y + start, n);
    }
  }
}

template <class T>
void rotate_row(const T* x, const Rope& rope, T* y, int64_t row, int64_t h) {
  const int64_t half = rope.rotary_dim / 2;
  const Tables<Acc<T>> tables = tables_of<Acc<T>>(rope, row, rope.interleaved ? 1 : half);
  const auto copy = [=](int64_t from, int64_t to) {
    if (x != y && from < to) memcpy(y + from, x + from, static_cast<size_t>(to - from) * sizeof(T));
  };
  for (int64_t head = 0; head < rope.heads; ++head) {
    const int64_t at = head * rope.head_dim;
    if (rope.by_head && head % 3 == 2) {
      copy(at, at + rope.head_dim);
      continue;
    }
    if (rope.interleaved) {
      rotate_interleaved(x + at, y + at, tables, rope);
    } else if (rope.transposed) {
      rotate_halves<true>(x + at, y + at, tables, half);
    } else {
      rotate_halves<false>(x + at, y + at, tables, half);
    }
    copy(at + rope.rotary_dim, at + rope.head_dim);
  }
  copy(rope.heads * rope.head_dim, h);
}

namespace entry {

void rope(DType dtype, const void* x, const Rope& rope, void* y, int64_t first, int64_t rows,
          int64_t h) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    for (int64_t r = 0; r < rows; ++r) {
      rotate_row(as<T>(x) + r * h, rope, as<T>(y) + r * h, first + r, h);
    }
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(rope, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
