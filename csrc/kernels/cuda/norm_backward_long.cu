// The backward of norms over rows that do not fit into a block's registers.
#include "kernels/cuda/norm_backward.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kThreads = 512, kColumnThreads = 128;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) row_gradients_kernel(NormBackward norm, bool wide) {
  using A = Acc<T>;
  __shared__ A shared[2][kWarp];
  const Lane lane(kThreads);
  const int64_t row = blockIdx.x, first = row * norm.h;
  const T* const x = static_cast<const T*>(norm.x) + first;
  const T* const grad_y = static_cast<const T*>(norm.grad_y) + first;
  const T* const residual =
      norm.residual != nullptr ? static_cast<const T*>(norm.residual) + first : nullptr;
  const auto statistics = statistics_of<A>(norm, row);
  A sums[2] = {};
  lane.for_packs<N>(norm.h, [&](int64_t i) {
    add_to_row(sums, load_pack<N>(grad_y + i), load_pack<N>(x + i), gamma_or_ones<A, N>(norm, i),
               statistics);
  });
  lane.sum<true>(sums, shared);
  sums[0] *= mean_factor<A>(norm);
  sums[1] *= norm.norm == Norm::LayerNorm ? mean_factor<A>(norm) : A(0);
  lane.for_packs<N>(norm.h, [&](int64_t i) {
    store_gradient(norm, wide, first + i, load_pack<N>(grad_y + i), load_pack<N>(x + i),
                   gamma_or_ones<A, N>(norm, i), statistics, sums, residual + i);
  });
}

// A thread processes a pack of columns, in every norm.parts-th row.
template <class T, int N>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums_kernel(NormBackward norm, int64_t blocks_across) {
  using A = Acc<T>;
  const int64_t part = blockIdx.x / blocks_across, across = blockIdx.x % blocks_across;
  const int64_t column = (across * kColumnThreads + threadIdx.x) * N;
  if (column >= norm.h) return;
  Pack<A, N> gamma_sums = {}, beta_sums = {};
#pragma unroll 4
  for (int64_t row = part; row < norm.rows; row += norm.parts) {
    const int64_t at = row * norm.h + column;
    const auto grad_y = load_pack<N>(static_cast<const T*>(norm.grad_y) + at);
    add_to_gamma(gamma_sums, grad_y, load_pack<N>(static_cast<const T*>(norm.x) + at),
                 statistics_of<A>(norm, row));
    add_to_beta(beta_sums, grad_y);
  }
  A* out = static_cast<A*>(norm.partials) + part * wanted_gradients(norm) * norm.h + column;
  if (norm.grad_gamma.data != nullptr) {
    store_pack(out, gamma_sums);
    out += norm.h;
  }
  if (norm.grad_beta.data != nullptr) store_pack(out, beta_sums);
}

template <class T, int N>
void backward(Stream stream, const NormBackward& norm) {
  // This runs first, because grad_x may overwrite what it reads.
  if (wanted_gradients(norm) > 0) {
    const int64_t across = ceil_div(norm.h / N, kColumnThreads);
    launch(stream, {across * norm.parts, kColumnThreads}, column_sums_kernel<T, N>, norm, across);
  }
  launch(stream, {norm.rows, kThreads}, row_gradients_kernel<T, N>, norm, is_wide(norm));
}

}  // namespace

void norm_backward_of_long_rows(Stream stream, const NormBackward& norm, bool aligned) {
  dispatch(norm.dtype, [&]<class T>(Type<T>) {
    aligned ? backward<T, kVector<T>>(stream, norm) : backward<T, 1>(stream, norm);
  });
}

}  // namespace transformer_ops::cuda
