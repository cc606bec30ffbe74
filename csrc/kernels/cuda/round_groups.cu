// Rounds rows of groups to the numbers of a format, each group as a tensor of its own, without
// producing codes. The group of a row is looked up in device memory. A thread has packs of 8
// adjacent numbers; their dtypes are looked up at run time, too, so that there are fewer kernels.
#include "kernels/cuda/four_over_six.h"
#include "kernels/quantize.h"

namespace transformer_ops::cuda {
namespace {

using kernel::Format;
using kernel::ScaleRule;

using Numbers = Pack<float, kPack>;

template <class F>
TRANSFORMER_OPS_DEVICE void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::Float32:
      return f(Type<float>());
    case DType::Float64:
      return f(Type<double>());
    case DType::Float16:
      return f(Type<Half>());
    case DType::BFloat16:
      return f(Type<BFloat16>());
  }
}

// A matrix of one of several dtypes.
template <class Pointer>
struct Matrix {
  Pointer data;
  DType dtype;
  int64_t rows, h;
  bool aligned;  // packs are aligned

  Matrix(Pointer data, DType dtype, int64_t rows, int64_t h)
      : data(data), dtype(dtype), rows(rows), h(h), aligned(aligned16(data) && h % kPack == 0) {}

  __device__ __forceinline__ Numbers load(int64_t row, int64_t column, int count) const {
    Numbers found;
    with_type(dtype, [&]<class T>(Type<T>) {
      const T* const from = static_cast<const T*>(data) + row * h + column;
      const Pack<T, kPack> own =
          aligned ? load_group<true>(from, count) : load_group<false>(from, count);
#pragma unroll
      for (int j = 0; j < kPack; ++j) found[j] = to_number(own[j]);
    });
    return found;
  }
  // Stores value_of(j) times scale_of(j).
  template <class Value, class Scale>
  __device__ __forceinline__ void store(int64_t row, int64_t column, int count,
                                        const Value& value_of, const Scale& scale_of) const {
    with_type(dtype, [&]<class T>(Type<T>) {
      Pack<T, kPack> own;
#pragma unroll
      for (int j = 0; j < kPack; ++j) own[j] = scaled<T>(value_of(j), scale_of(j));
      T* const to = static_cast<T*>(data) + row * h + column;
      aligned ? store_group<true>(to, own, count) : store_group<false>(to, own, count);
    });
  }
};

// ---- the group of a row

// The index of the first of `ends` after i; `count` if there is none.
TRANSFORMER_OPS_DEVICE int64_t find_end(const int64_t* ends, int64_t count, int64_t i) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ends[middle] > i) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
TRANSFORMER_OPS_DEVICE int64_t begin_of(const int64_t* ends, int64_t group) {
  return group == 0 ? 0 : ends[group - 1];
}

// Some rows of one group.
struct Band {
  int64_t group, first, end;
};

// Without ends, all rows are in group 0; `count` means no group.
TRANSFORMER_OPS_DEVICE int64_t group_of_row(const GroupEnds& groups, int64_t row) {
  return groups.rows == nullptr && groups.count == 1 ? 0 : find_end(groups.rows, groups.count, row);
}

// After the bands of groups come those of rows in no group, and some bands without rows.
TRANSFORMER_OPS_DEVICE Band band_of(const GroupEnds& groups, int64_t band, int64_t height,
                                    int64_t rows) {
  Band found{0, band * height, rows};
  if (groups.rows != nullptr && groups.count > 0) {
    found.group = find_end(groups.bands, groups.count, band);
    const int64_t before = begin_of(groups.bands, found.group);
    found.first = begin_of(groups.rows, found.group) + (band - before) * height;
    if (found.group < groups.count) found.end = groups.rows[found.group];
  } else {
    found.group = groups.count == 0 ? groups.count : 0;
  }
  const int64_t whole = found.first + height;
  if (whole < found.end) found.end = whole;
  return found;
}

// ---- the largest magnitude of each group

constexpr int64_t kPacksAThread = 16;

// Updates the largest magnitude, as bits of a float. The bits of the initial -1 are negative as an
// integer.
TRANSFORMER_OPS_DEVICE void take_larger(float* amax, uint32_t found) {
  atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(found));
}

__global__ void __launch_bounds__(kElementThreads)
    largest_of_groups_kernel(Matrix<const void*> x, GroupEnds groups, float* amax, int64_t packs,
                             Divisor by_packs) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kPacksAThread * kElementThreads) +
                        static_cast<int64_t>(threadIdx.x);
  int64_t group = groups.count;
  uint32_t best = 0;
  for (int64_t k = 0; k < kPacksAThread; ++k) {
    const int64_t pack = first + k * kElementThreads, row = by_packs.quotient(pack);
    if (row >= x.rows) break;
    const int64_t own = group_of_row(groups, row);
    if (own != group) {
      if (group < groups.count) take_larger(amax + group, best);
      group = own;
      best = 0;
    }
    if (own == groups.count) continue;
    const int64_t column = (pack - row * packs) * kPack;
    best = larger(best, largest_of(x.load(row, column, count_of(column, x.h))));
  }
  // If all rows of the warp are in one group, one update is enough.
  const auto id = static_cast<uint32_t>(group);
  const bool is_one = largest_of_lanes(id, kWarp) == ~largest_of_lanes(~id, kWarp);
  const uint32_t of_warp = largest_of_lanes(best, kWarp);
  if (group == groups.count || (is_one && threadIdx.x % kWarp != 0)) return;
  take_larger(amax + group, is_one ? of_warp : best);
}

// ---- rounding

struct Scale {
  float encode, decode;
};

struct Rounding {
  Matrix<const void*> x;
  Matrix<void*> out;
  GroupEnds groups;
  const float* amax;   // of each group, if the format needs it
  const float* given;  // the scale of each group, if they are given
  bool per_tensor;
  float most_of_tensor;
  kernel::FourOverSix four_over_six;
  ScaleRule rule;
  int64_t block_rows, block_columns;
  int64_t across;  // blocks of a row; packs if blocks are one column wide
  Divisor by_across;

  __device__ __forceinline__ float tensor_scale(int64_t group) const {
    if (group == groups.count) return 1.0f;
    if (given != nullptr) return given[group];
    return amax == nullptr ? 1.0f : encoding::encoding_scale(rule, amax[group], most_of_tensor);
  }
  template <class E>
  __device__ __forceinline__ bool chooses_scale() const {
    return kMayChoose<E> && four_over_six != kernel::FourOverSix::Off;
  }
  // Rows after the last group have an amax of zero.
  __device__ __forceinline__ encoding::ErrorRule error_rule(int64_t group) const {
    return {group == groups.count ? 0.0f : amax[group], most_of_tensor,
            four_over_six == kernel::FourOverSix::Squared};
  }
};

TRANSFORMER_OPS_DEVICE Scale within_tensor(const encoding::BlockScale& scale, float tensor_scale) {
  return {scale.encode, encoding::product(scale.number, 1.0f / tensor_scale)};
}

template <class E>
TRANSFORMER_OPS_DEVICE Scale scale_of(const Rounding& body, uint32_t amax, float tensor_scale) {
  if (body.per_tensor) return {tensor_scale, 1.0f / tensor_scale};
  const auto scale = encoding::block_scale<E>(body.rule, encoding::from_bits(amax), tensor_scale);
  if (body.rule == ScaleRule::E8M0) return {scale.encode, encoding::decode_e8m0(scale.byte)};
  if (body.rule == ScaleRule::E4M3) return within_tensor(scale, tensor_scale);
  return {scale.encode, scale.number};
}

// Rounds with scale_at(j) for number j.
template <class E, class ScaleAt>
TRANSFORMER_OPS_DEVICE void store_rounded(const Rounding& body, int64_t row, int64_t column,
                                          int count, const Numbers& x, const ScaleAt& scale_at) {
  float values[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    values[j] = encoding::decode<E>(encoding::encode<E>(x[j], scale_at(j).encode) & 0xff);
  }
  body.out.store(
      row, column, count, [&](int j) { return values[j]; },
      [&](int j) { return scale_at(j).decode; });
}

TRANSFORMER_OPS_DEVICE void store_zeros(const Rounding& body, int64_t row, int64_t column,
                                        int count) {
  const auto zero = [](int) { return 0.0f; };
  body.out.store(row, column, count, zero, zero);
}

// For blocks of one row: some adjacent lanes of a warp have one each. If a tensor is one block, a
// lane has a pack of it.
template <class E>
__global__ void __launch_bounds__(kElementThreads) round_rows_kernel(Rounding body) {
  const int lanes = static_cast<int>(body.block_columns / kPack);
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t block = thread / lanes, row = body.by_across.quotient(block);
  const int64_t column = (block - row * body.across) * body.block_columns + thread % lanes * kPack;
  const int count = row < body.x.rows ? count_of(column, body.x.h) : 0;
  const int64_t group = count > 0 ? group_of_row(body.groups, row) : body.groups.count;
  const bool is_member = group < body.groups.count;
  Numbers x = {};
  if (is_member) x = body.x.load(row, column, count);
  const uint32_t amax = largest_of_lanes(largest_of(x), lanes);
  const float tensor_scale = body.tensor_scale(group);
  Scale scale = scale_of<E>(body, amax, tensor_scale);
  if (body.chooses_scale<E>()) {
    scale =
        within_tensor(choose_for_row(body.error_rule(group), amax, tensor_scale, x), tensor_scale);
  }
  if (count == 0) return;
  if (!is_member) return store_zeros(body, row, column, count);
  store_rounded<E>(body, row, column, count, x, [&](int) { return scale; });
}

// For blocks of one column: a thread has a pack of them.
template <class E>
__global__ void __launch_bounds__(kElementThreads) round_columns_kernel(Rounding body) {
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t down = body.by_across.quotient(thread);
  const int64_t column = (thread - down * body.across) * kPack;
  const int count = count_of(column, body.x.h);
  const Band band = band_of(body.groups, down, body.block_rows, body.x.rows);
  if (band.group == body.groups.count) {
    for (int64_t row = band.first; row < band.end; ++row) store_zeros(body, row, column, count);
    return;
  }
  const auto load_row = [&](int64_t row) { return body.x.load(row, column, count); };
  uint32_t amax[kPack] = {};
  for (int64_t row = band.first; row < band.end; ++row) {
    const Numbers x = load_row(row);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      amax[j] = larger(amax[j], encoding::bits_of(x[j]) & encoding::kMagnitude);
    }
  }
  const float tensor_scale = body.tensor_scale(band.group);
  Scale scales[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) scales[j] = scale_of<E>(body, amax[j], tensor_scale);
  if (body.chooses_scale<E>()) {
    encoding::BlockScale choices[kPack];
    choose_columns(body.error_rule(band.group), amax, tensor_scale, band.first, band.end, load_row,
                   choices);
#pragma unroll
    for (int j = 0; j < kPack; ++j) scales[j] = within_tensor(choices[j], tensor_scale);
  }
  for (int64_t row = band.first; row < band.end; ++row) {
    store_rounded<E>(body, row, column, count, load_row(row), [&](int j) { return scales[j]; });
  }
}

// For blocks of several rows and columns: a block of threads has one each.
template <class E>
__global__ void __launch_bounds__(kElementThreads) round_blocks_kernel(Rounding body) {
  TRANSFORMER_OPS_SHARED(uint32_t, shared);
  const int64_t block = blockIdx.x, down = body.by_across.quotient(block);
  const int64_t left = (block - down * body.across) * body.block_columns;
  const Band band = band_of(body.groups, down, body.block_rows, body.x.rows);
  const int packs = static_cast<int>(body.block_columns / kPack);
  const auto for_packs = [&](const auto& f) {
    for (int64_t i = threadIdx.x;; i += blockDim.x) {
      const int64_t row = band.first + i / packs, column = left + i % packs * kPack;
      if (row >= band.end) return;
      const int count = count_of(column, body.x.h);
      if (count > 0) f(row, column, count);
    }
  };
  if (band.group == body.groups.count) {
    for_packs(
        [&](int64_t row, int64_t column, int count) { store_zeros(body, row, column, count); });
    return;
  }
  uint32_t amax = 0;
  for_packs([&](int64_t row, int64_t column, int count) {
    amax = larger(amax, largest_of(body.x.load(row, column, count)));
  });
  amax = largest_of_block(amax, shared);
  const float tensor_scale = body.tensor_scale(band.group);
  Scale scale = scale_of<E>(body, amax, tensor_scale);
  if (body.chooses_scale<E>()) {  // a warp has the block
    const int64_t row = band.first + threadIdx.x / packs;
    const int64_t column = left + threadIdx.x % packs * kPack;
    const int count = row < band.end ? count_of(column, body.x.h) : 0;
    Numbers x = {};
    if (count > 0) x = body.x.load(row, column, count);
    scale = within_tensor(choose_for_square(body.error_rule(band.group), amax, tensor_scale, x),
                          tensor_scale);
  }
  for_packs([&](int64_t row, int64_t column, int count) {
    store_rounded<E>(body, row, column, count, body.x.load(row, column, count),
                     [&](int) { return scale; });
  });
}

template <class E>
void round_to(Stream stream, const Format& format, const Rounding& body) {
  if (body.block_rows == 1) {
    const int64_t threads = body.x.rows * body.across * (body.block_columns / kPack);
    launch(stream, {ceil_div(threads, kElementThreads), kElementThreads}, round_rows_kernel<E>,
           body);
    return;
  }
  // Each group, and the rows in none, need less than one band of additional rows.
  const int64_t bands =
      (body.x.rows + (body.groups.count + 1) * (body.block_rows - 1)) / body.block_rows;
  if (format.block_columns == 1) {
    launch(stream, {ceil_div(bands * body.across, kElementThreads), kElementThreads},
           round_columns_kernel<E>, body);
    return;
  }
  const int64_t packs = format.block_rows * format.block_columns / kPack;
  const auto threads = static_cast<int>(std::min<int64_t>(packs, kElementThreads));
  launch(stream, {bands * body.across, threads, kSharedWords}, round_blocks_kernel<E>, body);
}

namespace entry {

void largest_of_groups(Stream stream, DType dtype, const void* x, const GroupEnds& groups,
                       float* amax, int64_t rows, int64_t h) {
  const int64_t packs = ceil_div(h, kPack);
  if (packs == 0) return;
  launch(stream, {ceil_div(rows * packs, kPacksAThread * kElementThreads), kElementThreads},
         largest_of_groups_kernel, Matrix<const void*>(x, dtype, rows, h), groups, amax, packs,
         Divisor(packs));
}

void round_groups(Stream stream, const Format& format, DType from, DType to, const void* x,
                  const GroupEnds& groups, const float* amax, const float* scales, void* out,
                  int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  with_element(format.element, [&]<class E>(Type<E>) {
    const bool per_tensor = format.per_tensor();
    const int64_t columns = per_tensor ? kPack : format.block_columns;
    const int64_t across = ceil_div(h, columns == 1 ? kPack : columns);
    const Rounding body{Matrix<const void*>(x, from, rows, h),
                        Matrix<void*>(out, to, rows, h),
                        groups,
                        amax,
                        scales,
                        per_tensor,
                        per_tensor ? format.largest : format.largest * format.largest_scale,
                        format.four_over_six,
                        encoding::rule_for<E>(format),
                        per_tensor ? 1 : format.block_rows,
                        columns,
                        across,
                        Divisor(across)};
    round_to<E>(stream, format, body);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(largest_of_groups, "cuda");
TRANSFORMER_OPS_KERNEL(round_groups, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
