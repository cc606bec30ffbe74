// Rows of a cross entropy. A row is read two or three times, while it is in the second-level cache.
#include "kernels/cross_entropy.h"

#include <math.h>

#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

template <class T>
TRANSFORMER_OPS_INLINE double to_double(T x) {
  if constexpr (kIsAcc<T>) {
    return x;
  } else {
    return to_float(x);
  }
}

// softcap tanh(z / softcap), or z itself.
template <bool kCaps, class V, class A>
TRANSFORMER_OPS_INLINE V capped(V z, A softcap) {
  if constexpr (kCaps) return V(softcap) * tanh(z * V(1 / softcap));
  return z;
}
template <bool kCaps>
TRANSFORMER_OPS_INLINE double capped(double z, double softcap) {
  return kCaps ? softcap * ::tanh(z / softcap) : z;
}

// The largest of n numbers; NaN is skipped.
template <class T>
TRANSFORMER_OPS_INLINE double largest(const T* row, int64_t n) {
  double found = -__builtin_inf();
  int64_t i = 0;
  if (n >= Wide<T>::kLanes) {
    Wide<T> lanes = load(row, AnyOrder());
    for (i = Wide<T>::kLanes; i + Wide<T>::kLanes <= n; i += Wide<T>::kLanes) {
      const Wide<T> next = load(row + i, AnyOrder());
      lanes = select(lanes > next, lanes, next);
    }
    Acc<T> all[Wide<T>::kLanes];
    store_acc(all, lanes, WideLanes());
    for (int64_t k = 0; k < Wide<T>::kLanes; ++k) {
      if (all[k] > found) found = all[k];
    }
  }
  for (; i < n; ++i) {
    if (to_double(row[i]) > found) found = to_double(row[i]);
  }
  return found;
}

template <class T>
bool is_first_largest(const T* row, int64_t target, double largest) {
  if (to_double(row[target]) != largest) return false;
  for (int64_t i = 0; i < target; ++i) {
    if (to_double(row[i]) == largest) return false;
  }
  return true;
}

// The sums of exp(z - largest) and of z.
template <bool kCaps, class T>
TwoSums sums_of_row(const CrossEntropy& op, const T* row, double largest) {
  using V = Vec<T>;
  const V top(static_cast<Acc<T>>(largest));
  const auto cap = static_cast<Acc<T>>(op.softcap);
  if (op.label_smoothing == 0) {
    const double sum = row_sum<T>(
        op.classes, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto order = any_order(lanes);
          return inside(exp_of_nonpositive(capped<kCaps>(load(row + i, order), cap) - top), lanes);
        });
    return {sum, 0};
  }
  return row_two_sums<T>(
      op.classes, [=](int64_t i, auto lanes, auto& power, auto& logit)
                      __attribute__((always_inline)) {
                        logit = capped<kCaps>(load(row + i, any_order(lanes)), cap);
                        power = inside(exp_of_nonpositive(logit - top), lanes);
                      });
}

template <bool kCaps, class T>
void forward_rows(const CrossEntropy& op, const T* logits, const int64_t* target, Acc<T>* lse,
                  Acc<T>* loss, Acc<T>* log_probs, uint8_t* correct, int64_t rows) {
  using A = Acc<T>;
  const double smoothing = op.label_smoothing;
  for (int64_t r = 0; r < rows; ++r) {
    lse[r] = loss[r] = log_probs[r] = 0;
    correct[r] = 0;
    if (target[r] == op.ignore_index) continue;
    const T* row = logits + r * op.classes;
    const double raw = largest(row, op.classes);
    const double top = static_cast<A>(capped<kCaps>(raw, op.softcap));
    const auto [powers, sum] = sums_of_row<kCaps>(op, row, top);
    const double total = top + ::log(powers);
    const double logit = capped<kCaps>(to_double(row[target[r]]), op.softcap);
    double value = total - (1 - smoothing) * logit + op.z_loss * total * total;
    if (smoothing != 0) value -= smoothing * sum / static_cast<double>(op.classes);
    lse[r] = static_cast<A>(total);
    loss[r] = static_cast<A>(value);
    log_probs[r] = static_cast<A>(logit - total);
    correct[r] = is_first_largest(row, target[r], raw);
  }
}

// With p = exp(z - lse), the gradient for class i is
//   (1 + 2 z_loss lse) p[i] - label_smoothing / classes - (1 - label_smoothing) [i = target]
template <bool kCaps, class T>
void backward_rows(const CrossEntropy& op, T* logits, const int64_t* target, const Acc<T>* lse,
                   const Acc<T>* factors, int64_t rows) {
  using A = Acc<T>;
  using V = Vec<T>;
  for (int64_t r = 0; r < rows; ++r) {
    T* row = logits + r * op.classes;
    if (target[r] == op.ignore_index) {
      memset(row, 0, static_cast<size_t>(op.classes) * sizeof(T));
      continue;
    }
    const double factor = factors[r], total = lse[r];
    const double slope = factor * (1 + 2 * op.z_loss * total);
    const double smooth = factor * op.label_smoothing / static_cast<double>(op.classes);
    const double raw = to_double(row[target[r]]), logit = capped<kCaps>(raw, op.softcap);
    const V every_slope(static_cast<A>(slope)), every_smooth(static_cast<A>(smooth));
    const V every_lse(lse[r]), one(1);
    const auto cap = static_cast<A>(op.softcap);
    const V every_part(kCaps ? 1 / cap : 0);
    for_wide_vectors<T>(
        op.classes, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto order = any_order(lanes);
          const auto z = capped<kCaps>(load(row + i, order), cap);
          auto grad = exp_of_nonpositive(z - every_lse) * every_slope - every_smooth;
          if constexpr (kCaps) {
            const auto t = z * every_part;
            grad = grad * (one - t * t);
          }
          store(row + i, grad, order, false);
        });
    double at_target = slope * ::exp(logit - total) - smooth - factor * (1 - op.label_smoothing);
    if constexpr (kCaps) at_target *= 1 - (logit / op.softcap) * (logit / op.softcap);
    if constexpr (kIsAcc<T>) {
      row[target[r]] = static_cast<A>(at_target);
    } else {
      from_float(static_cast<float>(at_target), row[target[r]]);
    }
  }
}

namespace entry {

void cross_entropy_forward(const CrossEntropy& op, DType dtype, const void* logits,
                           const int64_t* target, void* lse, void* loss, void* log_probs,
                           uint8_t* correct, int64_t rows) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    const auto run = op.softcap != 0 ? forward_rows<true, T> : forward_rows<false, T>;
    run(op, as<T>(logits), target, as<A>(lse), as<A>(loss), as<A>(log_probs), correct, rows);
  });
}

void cross_entropy_backward(const CrossEntropy& op, DType dtype, void* logits,
                            const int64_t* target, const void* lse, const void* factors,
                            int64_t rows) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    using A = Acc<T>;
    const auto run = op.softcap != 0 ? backward_rows<true, T> : backward_rows<false, T>;
    run(op, as<T>(logits), target, as<A>(lse), as<A>(factors), rows);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(cross_entropy_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(cross_entropy_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
