// Softmax over rows of attention scores, and its backward.
#include "kernels/attention.h"

#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

template <class A>
struct Row {
  A* products;
  const A* mask;  // null if there is none
  int64_t attended;

  Row(A* all, const Scores& scores, int64_t r)
      : products(all + r * scores.columns),
        mask(scores.mask == nullptr ? nullptr : as<A>(scores.mask) + r * scores.mask_stride),
        attended(scores.causal ? smaller(scores.attended + r, scores.columns) : scores.columns) {}
};

// Calls f(i, scores, lanes) for the vectors of scores that a row attends to.
template <class A, class F>
TRANSFORMER_OPS_INLINE void for_scores(const Row<A>& row, double scale, F f) {
  const A* const products = row.products;
  const A* const mask = row.mask;
  const Vec<A> factor(static_cast<A>(scale));
  if (mask == nullptr) {
    for_vectors<A>(
        row.attended, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          f(i, load(products + i, lanes) * factor, lanes);
        });
  } else {
    for_vectors<A>(
        row.attended, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          f(i, load(products + i, lanes) * factor + load(mask + i, lanes), lanes);
        });
  }
}

// products becomes the scores. Returns the greatest one that is not NaN; -inf if there is none.
template <class A>
A scores_of(const Row<A>& row, double scale) {
  const Vec<A> lowest(-static_cast<A>(__builtin_inf()));
  Vec<A> found = lowest;
  A* const products = row.products;
  for_scores(
      row, scale, [&](int64_t i, Vec<A> score, auto lanes) __attribute__((always_inline)) {
        store(products + i, score, lanes);
        if constexpr (__is_same(decltype(lanes), FirstLanes)) {
          A values[Vec<A>::kLanes];
          store_acc<A>(values, score);
          for (int64_t k = lanes.count; k < Vec<A>::kLanes; ++k) values[k] = lowest.native[0];
          score = load_acc<A>(values);
        }
        found = select(found < score, score, found);
      });
  A greatest = found.native[0];
  for (int64_t k = 1; k < Vec<A>::kLanes; ++k) {
    if (greatest < found.native[k]) greatest = found.native[k];
  }
  return greatest;
}

template <class A>
bool reads_nothing(const Row<A>& row) {
  if (row.mask == nullptr) return false;
  for (int64_t i = 0; i < row.attended; ++i) {
    if (row.mask[i] != -static_cast<A>(__builtin_inf())) return false;
  }
  return true;
}

// products becomes exp(score - shift). Returns the sum.
template <class A>
double exponentials(const Row<A>& row, double scale, A shift) {
  LaneSums<A> sums;
  A* const products = row.products;
  const Vec<A> by(shift);
  for_scores(
      row, scale, [&](int64_t i, Vec<A> score, auto lanes) __attribute__((always_inline)) {
        const Vec<A> e = exp_of_nonpositive(score - by);
        store(products + i, e, lanes);
        sums.add(inside(e, lanes));
      });
  return sums.total();
}

template <class A>
void clear_rest(const Row<A>& row, int64_t columns) {
  const int64_t rest = columns - row.attended;
  if (rest > 0) memset(row.products + row.attended, 0, static_cast<size_t>(rest) * sizeof(A));
}

template <class A>
void clear(const Row<A>& row) {
  memset(row.products, 0, static_cast<size_t>(row.attended) * sizeof(A));
}

template <class A>
void softmax_row(Row<A> row, const Scores& scores, A& log_sum_exp) {
  // A score that is rounded in one place and not in the other may exceed the greatest one by far.
  const A greatest = scores_of(row, scores.scale);
  clear_rest(row, scores.columns);
  // Scores that overflow to -inf, or that are NaN, make the row NaN below.
  if (greatest == -static_cast<A>(__builtin_inf()) && !scores.nan_rows && reads_nothing(row)) {
    clear(row);
    log_sum_exp = 0;
    return;
  }
  row.mask = nullptr;
  const double sum = exponentials(row, 1, greatest);
  log_sum_exp = static_cast<A>(static_cast<double>(greatest) + __builtin_log(sum));
  const Vec<A> factor(static_cast<A>(1 / sum));
  A* const products = row.products;
  for_vectors<A>(
      row.attended, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
        store(products + i, load(products + i, lanes) * factor, lanes);
      });
}

template <class A>
void softmax_backward_row(const A* p, A* grad, double scale, int64_t columns) {
  const double along = row_sum<A>(
      columns, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
        return load(p + i, lanes) * load(grad + i, lanes);
      });
  const Vec<A> shift(static_cast<A>(along)), factor(static_cast<A>(scale));
  for_vectors<A>(
      columns, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
        const auto change = load(p + i, lanes) * (load(grad + i, lanes) - shift);
        store(grad + i, change * factor, lanes);
      });
}

// Calls f(Tag<A>) for the compute type.
template <class F>
void with_acc(DType acc, F f) {
  if (acc == DType::Float64) return f(Tag<double>());
  f(Tag<float>());
}

namespace entry {

void attention_softmax(DType acc, void* products, const Scores& scores, void* log_sum_exp,
                       int64_t rows) {
  with_acc(acc, [&]<class A>(Tag<A>) {
    for (int64_t r = 0; r < rows; ++r) {
      softmax_row(Row<A>(as<A>(products), scores, r), scores,
                  as<A>(log_sum_exp)[r * scores.stride]);
    }
  });
}

void attention_probabilities(DType acc, void* products, const Scores& scores,
                             const void* log_sum_exp, int64_t rows) {
  with_acc(acc, [&]<class A>(Tag<A>) {
    for (int64_t r = 0; r < rows; ++r) {
      const Row<A> row(as<A>(products), scores, r);
      const A statistic = as<A>(log_sum_exp)[r * scores.stride];
      clear_rest(row, scores.columns);
      if (statistic == 0 && reads_nothing(row)) {
        clear(row);
      } else {
        exponentials(row, scores.scale, statistic);
      }
    }
  });
}

void attention_softmax_backward(DType acc, const void* probabilities, const Scores& scores,
                                void* grad, int64_t rows) {
  with_acc(acc, [&]<class A>(Tag<A>) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * scores.columns;
      softmax_backward_row(as<A>(probabilities) + at, as<A>(grad) + at, scores.scale,
                           scores.columns);
    }
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(attention_softmax, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(attention_probabilities, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(attention_softmax_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
