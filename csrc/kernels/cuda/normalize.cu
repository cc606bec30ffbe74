// The output of a norm from its statistics.
#include "kernels/cuda/norm.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kCopies = 8;  // in flight for a thread

template <class T, int N>
__global__ void __launch_bounds__(512, 2) normalize_kernel(Normalize norm, int lanes) {
  using A = Acc<T>;
  TRANSFORMER_OPS_SHARED(T, staged);
  const Lane lane(lanes);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / lanes) + lane.row;
  if (row >= norm.rows) return;
  const T* const x = static_cast<const T*>(norm.x) + row * norm.h;
  T* const y = static_cast<T*>(norm.y) + row * norm.h;
  const A mean = norm.mean != nullptr ? static_cast<const A*>(norm.mean)[row] : A(0);
  const A rstd = static_cast<const A*>(norm.rstd)[row];
  const auto slot = [&](int k) { return staged + (k * blockDim.x + threadIdx.x) * N; };
  const int64_t step = lanes * N;
  for (int64_t first = lane.number * N; first < norm.h; first += kCopies * step) {
    const int64_t count = ceil_div(norm.h - first, step);
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      if (k < count) copy_pack<N>(slot(k), x + first + k * step);
    }
    commit_copies();
    wait_for_copies<0>();
#pragma unroll 2
    for (int k = 0; k < kCopies && k < count; ++k) {
      const int64_t column = first + k * step;
      store_pack(y + column, normalized_output(load_pack<N>(slot(k)), mean, rstd, norm.gamma,
                                               norm.beta, column));
    }
  }
}

template <class T, int N>
void launch_normalize(Stream stream, const Normalize& norm) {
  const RowSplit split = forward_split(norm.h / N);
  const int64_t shared_bytes = kCopies * split.threads() * N * static_cast<int64_t>(sizeof(T));
  launch(stream, {ceil_div(norm.rows, split.rows), split.threads(), shared_bytes},
         normalize_kernel<T, N>, norm, split.lanes);
}

namespace entry {

void normalize(Stream stream, const Normalize& norm) {
  dispatch(norm.dtype, [&]<class T>(Type<T>) {
    const bool aligned =
        norm.h % kVector<T> == 0 && aligned16(norm.x, norm.y, norm.gamma.data, norm.beta.data);
    aligned ? launch_normalize<T, kVector<T>>(stream, norm) : launch_normalize<T, 1>(stream, norm);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(normalize, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
