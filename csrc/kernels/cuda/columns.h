// Kernels over rows and columns. A thread has one pack of columns of several rows, so that the
// parameters of the columns are loaded once; it may also add up its columns.
//
// A Body says what is computed. Its Column is what a thread knows about its pack of columns. Its
// Loads are what it reads of a row; the loads of kRows rows are in flight together. finish(column,
// row, loads, add) computes and writes, and calls add(k, value) for the k-th of kSums sums of type
// Sum, which is that over column column.sum(k). The optional load_parameters(column) reads
// parameters of the columns while the first loads are in flight.
#pragma once

#include "kernels/bias.h"
#include "kernels/cuda/column_geometry.h"
#include "kernels/cuda/device.h"

namespace transformer_ops::cuda {
namespace {

// ---- rows without sums

template <class Body>
__global__ void __launch_bounds__(kElementThreads) rows_kernel(Body body, RowGroups groups) {
  const int64_t i =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  if (i >= groups.threads) return;
  const int64_t group = groups.by_packs.quotient(i);
  const int64_t first = group * Body::kRows;
  typename Body::Column column = body.column(i - group * groups.packs);
  typename Body::Loads loads[Body::kRows];
#pragma unroll
  for (int k = 0; k < Body::kRows; ++k) {
    if (first + k < groups.rows) loads[k] = body.load(column, first + k);
  }
  if constexpr (requires { body.load_parameters(column); }) body.load_parameters(column);
#pragma unroll
  for (int k = 0; k < Body::kRows; ++k) {
    if (first + k < groups.rows) body.finish(column, first + k, loads[k], [](int, auto) {});
  }
}

template <class Body>
void for_rows(Stream stream, const Body& body, int64_t rows, int64_t packs) {
  const RowGroups groups(rows, packs, Body::kRows);
  launch(stream, {groups.blocks(), kElementThreads}, rows_kernel<Body>, body, groups);
}

// ---- rows and the sums of their columns

// The destination of sums: part p of `partials` or, if there is a single part, the result.
template <class A>
struct SumsOut {
  Gradient out;
  A* partials;
  int64_t width;
};

template <class Body>
__global__ void __launch_bounds__(kElementThreads)
    columns_kernel(Body body, ColumnBlocks blocks, SumsOut<typename Body::Sum> out) {
  using A = typename Body::Sum;
  constexpr int kSums = Body::kSums;
  const auto thread = static_cast<int>(threadIdx.x);
  const int x = thread % blocks.across, y = thread / blocks.across;
  const int64_t part = blocks.by_blocks_across.quotient(blockIdx.x);
  const int64_t first_pack = (blockIdx.x - part * blocks.blocks_across) * blocks.across;
  A sums[kSums] = {};
  const auto add = [&sums](int k, A value) { sums[k] += value; };
  if (first_pack + x < blocks.packs) {
    const typename Body::Column column = body.column(first_pack + x);
    const int64_t end = blocks.first_row(part + 1);
    for (int64_t row = blocks.first_row(part) + y; row < end; row += Body::kRows * blocks.down) {
      typename Body::Loads loads[Body::kRows];
#pragma unroll
      for (int k = 0; k < Body::kRows; ++k) {
        const int64_t r = row + k * blocks.down;
        if (r < end) loads[k] = body.load(column, r);
      }
#pragma unroll
      for (int k = 0; k < Body::kRows; ++k) {
        const int64_t r = row + k * blocks.down;
        if (r < end) body.finish(column, r, loads[k], add);
      }
    }
  }
  // Sum k of the thread at (x, y) is at (y * kSums + k) * across + x, which has no bank conflicts.
  TRANSFORMER_OPS_SHARED(A, shared);
#pragma unroll
  for (int k = 0; k < kSums; ++k) shared[(y * kSums + k) * blocks.across + x] = sums[k];
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < kSums * blocks.across; i += kElementThreads) {
    const int64_t pack = first_pack + i % blocks.across;
    if (pack >= blocks.packs) continue;
    A total = 0;
    for (int down = 0; down < blocks.down; ++down) {
      total += shared[down * kSums * blocks.across + i];
    }
    const int64_t column = body.column(pack).sum(i / blocks.across);
    if (blocks.parts == 1) {
      set_element(out.out, column, total);
    } else {
      out.partials[part * out.width + column] = total;
    }
  }
}

constexpr int kPartThreads = 16;

// Sums a warp's width of columns; the rows of threads take the parts in turn.
template <class A>
__global__ void __launch_bounds__(kWarp* kPartThreads)
    sum_parts_kernel(SumsOut<A> out, int64_t parts) {
  __shared__ A sums[kPartThreads][kWarp];
  const int x = static_cast<int>(threadIdx.x) % kWarp, y = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + x;
  A sum = 0;
  if (column < out.width) {
#pragma unroll 4
    for (int64_t part = y; part < parts; part += kPartThreads) {
      sum += out.partials[part * out.width + column];
    }
  }
  sums[y][x] = sum;
  __syncthreads();
  if (y != 0 || column >= out.width) return;
  for (int k = 1; k < kPartThreads; ++k) sum += sums[k][x];
  set_element(out.out, column, sum);
}

// Sums are `width` long. Without rows they are zeros.
template <class Body>
void for_columns(Stream stream, const Body& body, const ColumnSum& sum, int64_t rows, int64_t packs,
                 int64_t width) {
  using A = typename Body::Sum;
  const ColumnBlocks blocks(rows, packs, sum.parts, Body::kPacksAcross);
  const SumsOut<A> out{sum.out, static_cast<A*>(sum.partials), width};
  const int64_t shared = int64_t{kElementThreads} * Body::kSums * static_cast<int64_t>(sizeof(A));
  launch(stream, {blocks.blocks(), kElementThreads, shared}, columns_kernel<Body>, body, blocks,
         out);
  if (sum.parts == 1) return;
  launch(stream, {ceil_div(width, kWarp), kWarp * kPartThreads}, sum_parts_kernel<A>, out,
         sum.parts);
}

// The number of adjacent packs of N elements of T in a block: rows of 512 bytes.
template <class T, int N>
constexpr int kPacksOf512Bytes = 512 / (N * static_cast<int>(sizeof(T))) < kElementThreads
                                     ? 512 / (N * static_cast<int>(sizeof(T)))
                                     : kElementThreads;

// ---- parameters

// N elements of a parameter from i on, converted to A. The branch is the same for all threads.
template <bool Aligned, int N, class A>
TRANSFORMER_OPS_DEVICE Pack<A, N> elements(const Vector& vector, int64_t i) {
  Pack<A, N> values = {};
  const auto read = [&](auto type) {
    using T = typename decltype(type)::type;
    const auto pack = load<Aligned, N>(static_cast<const T*>(vector.data) + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = static_cast<A>(to_acc(pack[j])) + static_cast<A>(vector.add);
    }
  };
  switch (vector.dtype) {
    case DType::Float32:
      read(Type<float>());
      break;
    case DType::Float64:
      read(Type<double>());
      break;
    case DType::Float16:
      read(Type<Half>());
      break;
    case DType::BFloat16:
      read(Type<BFloat16>());
      break;
  }
  return values;
}

// Calls f(a constant): packs of N if pointers are `aligned` and N divides all lengths, else single
// elements.
template <int N, class F, class... Lengths>
void with_packs(bool aligned, const F& f, Lengths... lengths) {
  if (aligned && ((lengths % N == 0) && ...)) {
    f(std::integral_constant<int, N>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

}  // namespace
}  // namespace transformer_ops::cuda
