// The backward of LayerNorm, RMSNorm and L2 normalization, with the residual's gradient.
//
// One block for each multiprocessor loops over rows, several side by side. The next rows are copied
// to shared memory meanwhile. Each thread reads only what it copied itself, so a row needs one
// barrier, for its sums. Gamma and the sums over rows stay in registers to the end.
#include "kernels/cuda/norm_backward.h"

namespace transformer_ops::cuda {

namespace {

// This leaves each thread enough registers for its elements of gamma and of the sums over rows.
template <bool Centered>
constexpr int kMostThreads = Centered ? 384 : 512;

// The number of a thread's packs of a row.
template <class T, int N>
constexpr int kPacks = (sizeof(T) == 8 ? 16 : 32) / (N == 1 ? 2 : N);

TRANSFORMER_OPS_DEVICE void wait_for_stage(int stages) {
  switch (stages) {
    case 1:
      return wait_for_copies<0>();
    case 2:
      return wait_for_copies<1>();
    case 3:
      return wait_for_copies<2>();
    default:
      return wait_for_copies<kMostStages - 1>();
  }
}

// Adds the sums of all rows of the block to out[h]. `scratch` has room for the sums of each thread.
template <int N, int K, class A>
TRANSFORMER_OPS_DEVICE void write_column_sums(Pack<A, N> (&sums)[K], const Lane& lane, int h,
                                              A* scratch, A* out) {
  const int threads = static_cast<int>(blockDim.x), rows = threads / lane.lanes;
  __syncthreads();  // scratch is no longer read
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int column = (lane.number + k * lane.lanes) * N;
    if (column < h) keep_pack(scratch + lane.row * h + column, sums[k]);
  }
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < h; column += threads) {
    A sum = 0;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) sum += scratch[row * h + column];
    out[column] = sum;
  }
}

template <class T, int N, bool Centered>
__global__ void __launch_bounds__(kMostThreads<Centered>, 1)
    norm_backward_kernel(NormBackward norm, BackwardSplit split, bool wide) {
  using A = Acc<T>;
  constexpr int K = kPacks<T, N>, kSums = Centered ? 2 : 1;
  TRANSFORMER_OPS_SHARED(T, staged);
  __shared__ A shared[2][kSums][kWarp];
  const Lane lane(split.lanes);
  const int packs = (static_cast<int>(norm.h) / N - lane.number + lane.lanes - 1) / lane.lanes;
  const int first_column = lane.number * N, columns = lane.lanes * N;  // from pack to pack
  const bool stages_residual = norm.residual != nullptr && !wide;
  const int places = static_cast<int>(blockDim.x) * N;
  const int stage_places = (stages_residual ? 3 : 2) * K * places;
  T* const mine = staged + threadIdx.x * N;
  const auto copy_row = [&](int64_t row, T* to) {
    if (row < norm.rows) {
      const auto copy = [&](int tensor, const void* data) {
        const T* const from = static_cast<const T*>(data) + row * norm.h + first_column;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (k < packs) copy_pack<N>(to + (tensor * K + k) * places, from + k * columns);
        }
      };
      copy(0, norm.grad_y);
      copy(1, norm.x);
      if (stages_residual) copy(2, norm.residual);
    }
    commit_copies();
  };

  // Rows side by side in a block are far apart, so that few rows are spread over all blocks.
  const int64_t blocks = gridDim.x, step = blocks * split.rows;
  int64_t row = lane.row * blocks + blockIdx.x;
  for (int stage = 0; stage < split.stages; ++stage) {
    copy_row(row + stage * step, mine + stage * stage_places);
  }
  auto next = statistics_of<A>(norm, row);

  Pack<A, N> gamma[K], gamma_sums[K] = {}, beta_sums[Centered ? K : 1] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (k < packs) gamma[k] = gamma_or_ones<A, N>(norm, first_column + k * columns);
  }
  const A factor = mean_factor<A>(norm);

  int stage = 0, parity = 0;
  // All rows of the block take the same number of turns, because they meet at barriers.
  for (auto turns = static_cast<int>(ceil_div(norm.rows, step)); turns > 0; --turns) {
    const auto statistics = next;
    next = statistics_of<A>(norm, row + step);
    T* const here = mine + stage * stage_places;
    const int count = row < norm.rows ? packs : 0;
    wait_for_stage(split.stages);

    A sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k >= count) continue;
      add_to_row(sums, load_pack<N>(here + k * places), load_pack<N>(here + (K + k) * places),
                 gamma[k], statistics);
    }
    lane.template sum<false>(sums, shared[parity]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= factor;
    const int64_t at = row * norm.h + first_column;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k >= count) continue;
      const auto grad_y = load_pack<N>(here + k * places);
      const auto x = load_pack<N>(here + (K + k) * places);
      add_to_gamma(gamma_sums[k], grad_y, x, statistics);
      if constexpr (Centered) add_to_beta(beta_sums[k], grad_y);
      store_gradient(norm, wide, at + k * columns, grad_y, x, gamma[k], statistics, sums,
                     here + (2 * K + k) * places);
    }
    row += step;
    copy_row(row + (split.stages - 1) * step, here);
    stage = stage + 1 == split.stages ? 0 : stage + 1;
    parity ^= 1;
  }

  A* const scratch = reinterpret_cast<A*>(staged);
  A* out = static_cast<A*>(norm.partials) + blockIdx.x * wanted_gradients(norm) * norm.h;
  if (norm.grad_gamma.data != nullptr) {
    write_column_sums(gamma_sums, lane, static_cast<int>(norm.h), scratch, out);
    out += norm.h;
  }
  if constexpr (Centered) {
    if (norm.grad_beta.data != nullptr)
      write_column_sums(beta_sums, lane, static_cast<int>(norm.h), scratch, out);
  }
}

// A block adds the parts of 32 columns: each warp adds some of the parts, then one warp adds those
// sums.
template <class A>
__global__ void __launch_bounds__(kWarp* kWarp)
    add_parts_kernel(const A* parts, int64_t count, int64_t h, Gradient first, Gradient second) {
  __shared__ A sums[kWarp][kWarp];
  const auto lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t columns = second.data != nullptr ? 2 * h : h;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  A sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = warp; part < count; part += warps) sum += parts[part * columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  for (unsigned other = 1; other < warps; ++other) sum += sums[other][lane];
  if (column < h) {
    set_element(first, column, sum);
  } else {
    set_element(second, column - h, sum);
  }
}

// Adds the parts of the wanted gradients.
template <class A>
void add_parts(Stream stream, const NormBackward& norm) {
  const int wanted = wanted_gradients(norm);
  if (wanted == 0) return;
  const bool only_beta = norm.grad_gamma.data == nullptr;
  const auto warps = static_cast<int>(std::clamp<int64_t>(norm.parts, 1, kWarp));
  launch(stream, {ceil_div(wanted * norm.h, kWarp), warps * kWarp}, add_parts_kernel<A>,
         static_cast<const A*>(norm.partials), norm.parts, norm.h,
         only_beta ? norm.grad_beta : norm.grad_gamma, only_beta ? Gradient{} : norm.grad_beta);
}

template <class T, int N, bool Centered>
void backward(Stream stream, const NormBackward& norm) {
  const bool wide = is_wide(norm);
  const auto split =
      backward_split(norm.h / N, N * sizeof(T), kPacks<T, N>, norm.residual && !wide ? 3 : 2,
                     kMostThreads<Centered>, most_shared_bytes());
  if (!split.fits()) return norm_backward_of_long_rows(stream, norm, N > 1);
  const int64_t blocks =
      wanted_gradients(norm) > 0 ? norm.parts : norm_backward_parts(norm.rows, norm.h);
  launch(stream, {blocks, split.threads(), split.shared_bytes()},
         norm_backward_kernel<T, N, Centered>, norm, split, wide);
}

template <class T, int N>
void backward(Stream stream, const NormBackward& norm) {
  norm.norm == Norm::LayerNorm ? backward<T, N, true>(stream, norm)
                               : backward<T, N, false>(stream, norm);
}

namespace entry {

int64_t norm_backward_parts(int64_t rows, int64_t) {
  return std::min<int64_t>(rows, multiprocessors());
}

void norm_backward(Stream stream, const NormBackward& norm) {
  dispatch(norm.dtype, [&]<class T>(Type<T>) {
    if (norm.rows > 0) {
      const bool aligned =
          norm.h % kVector<T> == 0 && aligned16(norm.grad_y, norm.x, norm.residual, norm.grad_x,
                                                norm.gamma.data, norm.partials);
      aligned ? backward<T, kVector<T>>(stream, norm) : backward<T, 1>(stream, norm);
    }
    add_parts<Acc<T>>(stream, norm);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(norm_backward_parts, "cuda");
TRANSFORMER_OPS_KERNEL(norm_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
