// Rows of a cross entropy. A block has a row: it finds the largest logit and the sum of
// exponentials in one pass (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018), and overwrites the logits by their gradients in a second one.
#include "kernels/cross_entropy.h"

#undef NDEBUG  // the assertion stays
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>

#include "kernels/cuda/compute.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/lane.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kMostThreads = 1024;

// What a thread knows of the part of a row that it has read. All logits may be -inf.
template <class T>
struct Softmax {
  using A = Acc<T>;

  A largest = -INFINITY;  // NaN is skipped
  A powers = 0;           // sum(exp(z - largest)), with 0 for a largest of -inf

  TRANSFORMER_OPS_MATH_MEMBER static A power(A z, A largest) {
    using math::exp_of_nonpositive;
    const A top = largest == -INFINITY ? A(0) : largest;
    return to_acc(exp_of_nonpositive(Compute<T>(z - top)));
  }
  TRANSFORMER_OPS_MATH_MEMBER void raise(A next) {
    powers *= power(largest, next);
    largest = next;
  }
};

// softcap tanh(z / softcap), or z itself.
template <bool kCaps, class A>
TRANSFORMER_OPS_DEVICE A capped(A z, A softcap) {
  if constexpr (kCaps) return softcap * math::tanh(z / softcap);
  return z;
}

// Calls f(i, pack) for this thread's parts of a row of any alignment; i is the pack's first
// element.
template <class T, class F>
TRANSFORMER_OPS_DEVICE void for_packs(T* row, int64_t n, const F& f) {
  constexpr int N = kVector<T>;
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % N);
  const int64_t before = past == 0 ? 0 : N - past, head = before < n ? before : n;
  const int64_t end = head + (n - head) / N * N;
  if (threadIdx.x < head) f(int64_t{threadIdx.x}, load<false, 1>(row + threadIdx.x));
  for (int64_t i = head + int64_t{threadIdx.x} * N; i < end; i += int64_t{blockDim.x} * N) {
    f(i, load<true, N>(row + i));
  }
  if (end + threadIdx.x < n) f(end + threadIdx.x, load<false, 1>(row + end + threadIdx.x));
}

TRANSFORMER_OPS_DEVICE void check_target(const kernel::CrossEntropy& op, int64_t target) {
  if (target >= 0 && target < op.classes) return;
#if defined(TRANSFORMER_OPS_EMULATED)
  throw std::out_of_range("[LinearCrossEntropy] target must lie in [0, " +
                          std::to_string(op.classes) + ") or be ignore_index, " +
                          std::to_string(op.ignore_index) + ", got " + std::to_string(target));
#else
  if (threadIdx.x == 0) {
    printf("[LinearCrossEntropy] target must lie in [0, %lld) or be ignore_index, %lld, got %lld\n",
           static_cast<long long>(op.classes), static_cast<long long>(op.ignore_index),
           static_cast<long long>(target));
  }
  assert(false && "target must be a class or ignore_index");
#endif
}

template <class T, bool kCaps>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_kernel(kernel::CrossEntropy op, T* logits, const int64_t* targets,
                         CrossEntropyRows rows) {
  using A = Acc<T>;
  __shared__ A shared[4][kWarp];
  const Lane lane(static_cast<int>(blockDim.x));
  const int64_t r = blockIdx.x, target = targets[r];
  T* const row = logits + r * op.classes;
  const auto set = [&](void* numbers, A value) { static_cast<A*>(numbers)[r] = value; };
  const A smoothing = static_cast<A>(op.label_smoothing), cap = static_cast<A>(op.softcap);
  const bool counts = target != op.ignore_index;
  if (counts) check_target(op, target);

  A lse = 0;
  if (rows.loss == nullptr) {
    lse = static_cast<const A*>(rows.lse)[r];
  } else {
    A loss = 0, log_prob = 0;
    bool correct = false;
    if (counts) {
      const A raw = to_acc(row[target]), z = capped<kCaps>(raw, cap);
      Softmax<T> mine;
      A sum = 0, larger = 0;  // `larger` counts logits that are larger than the target's, or equal
                              // and before it
      for_packs(row, op.classes, [&]<int N>(int64_t i, const Pack<T, N>& pack) {
        A next[N], largest = mine.largest;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const A x = to_acc(pack[j]);
          larger += x > raw || (x == raw && i + j < target) ? A(1) : A(0);
          next[j] = capped<kCaps>(x, cap);
          sum += next[j];
          largest = next[j] > largest ? next[j] : largest;
        }
        if (largest > mine.largest) mine.raise(largest);
#pragma unroll
        for (int j = 0; j < N; ++j) mine.powers += Softmax<T>::power(next[j], largest);
      });
      A largest[1] = {mine.largest};
      lane.template combine<true>(largest, shared, [](A a, A b) { return b > a ? b : a; });
      mine.raise(largest[0]);
      A sums[3] = {mine.powers, sum, larger};
      lane.template sum<true>(sums, shared + 1);
      lse = largest[0] + math::log(sums[0]);
      loss = lse - (1 - smoothing) * z + static_cast<A>(op.z_loss) * lse * lse;
      if (smoothing != 0) loss -= smoothing * sums[1] / static_cast<A>(op.classes);
      log_prob = z - lse;
      correct = sums[2] == 0 && raw == raw;
    }
    if (threadIdx.x == 0) {
      set(rows.lse, lse);
      set(rows.loss, loss);
      set(rows.log_probs, log_prob);
      rows.correct[r] = correct;
    }
  }
  if (rows.factors == nullptr) return;

  using math::exp_of_nonpositive;
  const A factor = counts ? static_cast<const A*>(rows.factors)[r] : A(0);
  const A slope = factor * (1 + 2 * static_cast<A>(op.z_loss) * lse);
  const A smooth = factor * smoothing / static_cast<A>(op.classes);
  for_packs(row, op.classes, [&]<int N>(int64_t i, const Pack<T, N>& pack) {
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A z = capped<kCaps>(to_acc(pack[j]), cap);
      A grad = to_acc(exp_of_nonpositive(Compute<T>(z - lse))) * slope - smooth;
      if (i + j == target) grad -= factor * (1 - smoothing);
      if constexpr (kCaps) grad *= 1 - (z / cap) * (z / cap);
      out[j] = round_to<T>(counts ? grad : A(0));
    }
    store<(N > 1), N>(row + i, out);
  });
}

namespace entry {

void cross_entropy(Stream stream, const kernel::CrossEntropy& op, DType dtype, void* logits,
                   const int64_t* target, const CrossEntropyRows& rows, int64_t count) {
  dispatch(dtype, [&]<class T>(Type<T>) {
    const int64_t lanes = row_lanes(ceil_div(op.classes, kVector<T>), /*packs_a_lane=*/4);
    const auto threads = static_cast<int>(std::clamp<int64_t>(lanes, kWarp, kMostThreads));
    const auto kernel =
        op.softcap != 0 ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
    launch(stream, {count, threads}, kernel, op, static_cast<T*>(logits), target, rows);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(cross_entropy, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
