// LayerNorm, RMSNorm and L2 normalization of x or of x + extra. The variance is computed from
// deviations from the mean, never as a difference of squares.
#include "kernels/cuda/norm.h"

namespace transformer_ops::cuda {
namespace {

template <class T, int N>
TRANSFORMER_OPS_DEVICE Pack<T, N> rounded_sum(const Pack<T, N>& a, const Pack<T, N>& b) {
  Pack<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = round_to<T>(to_acc(a[i]) + to_acc(b[i]));
  return sum;
}

template <class T, int N>
TRANSFORMER_OPS_DEVICE Acc<T> sum_of(const Pack<T, N>& x) {
  Acc<T> sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += to_acc(x[i]);
  return sum;
}

template <class T, int N>
TRANSFORMER_OPS_DEVICE Acc<T> squares_of(const Pack<T, N>& x, Acc<T> mean) {
  Acc<T> sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Acc<T> deviation = to_acc(x[i]) - mean;
    sum += deviation * deviation;
  }
  return sum;
}

// A row is read from memory once and copied to shared memory, where each thread reads only what it
// copied itself. If there is no room (not Staged), it is read for each sum and once more.
template <class T, int N, bool Staged>
__global__ void __launch_bounds__(512, Staged ? 2 : 1)
    norm_forward_kernel(NormForward norm, int lanes) {
  using A = Acc<T>;
  using Index = std::conditional_t<Staged, int, int64_t>;
  TRANSFORMER_OPS_SHARED(T, staged);
  __shared__ A sums[2][1][kWarp];
  const Lane lane(lanes);
  const int rows = static_cast<int>(blockDim.x) / lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows + lane.row;
  const Index h = row < norm.rows ? static_cast<Index>(norm.h) : 0;
  const auto of_row = [&](const void* data) { return static_cast<const T*>(data) + row * norm.h; };
  const auto for_packs = [&](const auto& f) { lane.template for_packs<N>(h, f); };

  const T* x = of_row(norm.x);
  const T* extra = norm.extra != nullptr ? of_row(norm.extra) : nullptr;
  T* sum = norm.sum != nullptr ? static_cast<T*>(norm.sum) + row * norm.h : nullptr;
  if constexpr (Staged) {
    T* const kept = staged + lane.row * norm.h;
    T* const kept_extra = kept + rows * norm.h;
    for_packs([&](Index i) { copy_pack<N>(kept + i, x + i); });
    if (extra != nullptr) {
      for_packs([&](Index i) { copy_pack<N>(kept_extra + i, extra + i); });
    }
    commit_copies();
    wait_for_copies<0>();
    if (extra != nullptr) {
      for_packs([&](Index i) {
        const auto pack = rounded_sum(load_pack<N>(kept + i), load_pack<N>(kept_extra + i));
        keep_pack(kept + i, pack);
        if (sum != nullptr) store_pack(sum + i, pack);
      });
    }
    x = kept;
    extra = nullptr;
  } else if (sum != nullptr) {
    for_packs([&](Index i) {
      store_pack(sum + i, rounded_sum(load_pack<N>(x + i), load_pack<N>(extra + i)));
    });
    x = sum;
    extra = nullptr;
  }
  const auto read = [&](Index i) {
    const auto pack = load_pack<N>(x + i);
    return Staged || extra == nullptr ? pack : rounded_sum(pack, load_pack<N>(extra + i));
  };

  A mean[1] = {0}, squares[1] = {0};
  if (norm.norm == Norm::LayerNorm) {
    for_packs([&](Index i) { mean[0] += sum_of(read(i)); });
    lane.template sum<true>(mean, sums[0]);
    mean[0] /= static_cast<A>(norm.h);
  }
  for_packs([&](Index i) { squares[0] += squares_of(read(i), mean[0]); });
  lane.template sum<true>(squares, sums[1]);
  const A divisor = norm.norm == Norm::L2 ? A(1) : static_cast<A>(norm.h);
  const A rstd = A(1) / math::sqrt(squares[0] / divisor + static_cast<A>(norm.eps));

  T* const y = static_cast<T*>(norm.y) + row * norm.h;
  for_packs([&](Index i) {
    store_pack(y + i, normalized_output(read(i), mean[0], rstd, norm.gamma, norm.beta, i));
  });
  if (lane.number == 0 && row < norm.rows) {
    if (norm.norm == Norm::LayerNorm) static_cast<A*>(norm.mean)[row] = mean[0];
    static_cast<A*>(norm.rstd)[row] = rstd;
  }
}

template <class T, int N>
void forward(Stream stream, const NormForward& norm) {
  const RowSplit split = forward_split(norm.h / N);
  const int64_t rows_kept = norm.extra != nullptr ? 2 * split.rows : split.rows;
  const int64_t shared_bytes = rows_kept * norm.h * static_cast<int64_t>(sizeof(T));
  const int64_t blocks = ceil_div(norm.rows, split.rows);
  if (shared_bytes <= most_shared_bytes()) {
    launch(stream, {blocks, split.threads(), shared_bytes}, norm_forward_kernel<T, N, true>, norm,
           split.lanes);
  } else {
    launch(stream, {blocks, split.threads()}, norm_forward_kernel<T, N, false>, norm, split.lanes);
  }
}

namespace entry {

void norm_forward(Stream stream, const NormForward& norm) {
  dispatch(norm.dtype, [&]<class T>(Type<T>) {
    const bool aligned = norm.h % kVector<T> == 0 && aligned16(norm.x, norm.extra, norm.sum, norm.y,
                                                               norm.gamma.data, norm.beta.data);
    aligned ? forward<T, kVector<T>>(stream, norm) : forward<T, 1>(stream, norm);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(norm_forward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
