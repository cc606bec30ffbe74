// Conversion of rows to codes and block scales, and back. A thread has packs of 8 adjacent numbers;
// blocks are a multiple of that wide, or one column.
#include "kernels/quantize.h"

#include "kernels/cuda/four_over_six.h"

namespace transformer_ops::cuda {
namespace {

using encoding::BlockScale;
using kernel::Format;
using kernel::ScaleRule;

template <class E>
constexpr int kPackBytes = kPack* E::kBits / 8;

// ---- the largest magnitude

template <bool Aligned, class T>
__global__ void __launch_bounds__(kElementThreads)
    largest_kernel(const T* x, uint32_t* partials, int64_t n) {
  TRANSFORMER_OPS_SHARED(uint32_t, shared);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  uint32_t best = 0;
  for (int64_t g =
           static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
       g * kPack < n; g += step) {
    best = larger(best, largest_of(load_group<Aligned>(x + g * kPack, group_size(g, n))));
  }
  best = largest_of_block(best, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = best;
}

__global__ void __launch_bounds__(kElementThreads)
    finish_kernel(uint32_t* partials, int64_t parts) {
  TRANSFORMER_OPS_SHARED(uint32_t, shared);
  uint32_t best = 0;
  for (int64_t i = threadIdx.x; i < parts; i += kElementThreads) best = larger(best, partials[i]);
  best = largest_of_block(best, shared);
  if (threadIdx.x == 0) partials[0] = best;
}

// ---- codes of a pack

// Stores the first `wanted` bytes.
template <int N>
TRANSFORMER_OPS_DEVICE void store_bytes(uint8_t* to, const uint8_t (&bytes)[N], int wanted) {
  if (wanted == N && reinterpret_cast<uintptr_t>(to) % N == 0) {
    using Word = std::conditional_t<N == 8, uint64_t, uint32_t>;
    Word word;
    memcpy(&word, bytes, sizeof(word));
    *reinterpret_cast<Word*>(to) = word;
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j < wanted) to[j] = bytes[j];
  }
}

template <class E>
TRANSFORMER_OPS_DEVICE void store_codes(uint8_t* to, const uint32_t (&code)[kPack], int count) {
  uint8_t bytes[kPackBytes<E>];
#pragma unroll
  for (int j = 0; j < kPackBytes<E>; ++j) {
    if constexpr (E::kBits == 4) {
      bytes[j] = static_cast<uint8_t>(encoding::pair_of<E>(code[2 * j], code[2 * j + 1]));
    } else {
      bytes[j] = static_cast<uint8_t>(code[j]);
    }
  }
  store_bytes(to, bytes, (count * kPackBytes<E> + kPack - 1) / kPack);
}

// scale_of(j) returns the scale of number j; numbers from `count` on are zeros.
template <class E, class T, class Scale>
TRANSFORMER_OPS_DEVICE void codes_of(uint32_t (&code)[kPack], const Pack<T, kPack>& x, int count,
                                     const Scale& scale_of) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    code[j] = j < count ? encoding::encode<E>(to_number(x[j]), scale_of(j)) & 0xff : 0;
  }
}
template <class E, class T, class Scale>
TRANSFORMER_OPS_DEVICE void encode_each(uint8_t* to, const Pack<T, kPack>& x, int count,
                                        const Scale& scale_of) {
  uint32_t code[kPack];
  codes_of<E>(code, x, count, scale_of);
  store_codes<E>(to, code, count);
}
template <class E, class T>
TRANSFORMER_OPS_DEVICE void encode_pack(uint8_t* to, const Pack<T, kPack>& x, int count,
                                        float scale) {
  encode_each<E>(to, x, count, [scale](int) { return scale; });
}

// ---- arguments of the kernels

// The numbers of rows and of columns in whole packs, and the blocks that they are divided into.
struct Layout {
  int64_t rows, h;
  int64_t block_rows, block_columns;
  int64_t blocks;  // of a row
  ScaleRule rule;

  Layout(const Format& format, ScaleRule rule, int64_t rows, int64_t h)
      : rows(rows),
        h(h),
        block_rows(format.per_tensor() ? std::max<int64_t>(rows, 1) : format.block_rows),
        block_columns(format.per_tensor() ? ceil_div(std::max<int64_t>(h, 1), kPack) * kPack
                                          : format.block_columns),
        blocks(ceil_div(h, block_columns)),
        rule(rule) {}
};

template <class E, class T>
struct Encoder {
  Layout layout;
  const T* x;
  const uint32_t* amax;  // of the tensor, if the format needs it
  const float* given;    // the scale of the tensor, if it is given
  uint8_t* codes;
  void* scales;
  uint8_t* decoded_tensor_scale;
  float most_of_tensor;  // the largest number of the tensor becomes this number
  kernel::FourOverSix four_over_six;
  int64_t across;  // blocks of a row; packs if blocks are one column wide
  Divisor by_across;

  __device__ __forceinline__ float tensor_scale() const {
    if (given != nullptr) return *given;
    if (amax == nullptr) return 1.0f;
    return encoding::encoding_scale(layout.rule, encoding::from_bits(*amax), most_of_tensor);
  }
  __device__ __forceinline__ bool chooses_scale() const {
    return kMayChoose<E> && four_over_six != kernel::FourOverSix::Off;
  }
  __device__ __forceinline__ encoding::ErrorRule error_rule() const {
    return {encoding::from_bits(*amax), most_of_tensor,
            four_over_six == kernel::FourOverSix::Squared};
  }
  __device__ __forceinline__ BlockScale scale_of(uint32_t amax_of_block, float scale) const {
    return encoding::block_scale<E>(layout.rule, encoding::from_bits(amax_of_block), scale);
  }
  __device__ __forceinline__ uint8_t* codes_at(int64_t row, int64_t column) const {
    const int64_t row_bytes = (layout.h * kPackBytes<E> + kPack - 1) / kPack;
    return codes + row * row_bytes + column / kPack * kPackBytes<E>;
  }
  // One thread must call this once.
  __device__ __forceinline__ void store_tensor_scale(float scale) const {
    if (decoded_tensor_scale == nullptr) return;
    const uint32_t bits = encoding::bits_of(1.0f / scale);
    for (int i = 0; i < 4; ++i) decoded_tensor_scale[i] = static_cast<uint8_t>(bits >> (8 * i));
  }
};

// For 4-bit codes: a byte has the codes of an even row and of the next row, if there is one.
template <bool Aligned, class E, class T, class Scale>
TRANSFORMER_OPS_DEVICE void encode_pair(const Encoder<E, T>& body, int64_t row, int64_t column,
                                        int count, const Scale& scale_of) {
  const int64_t h = body.layout.h;
  const T* const from = body.x + row * h + column;
  const int below = row + 1 < body.layout.rows ? count : 0;
  uint32_t upper[kPack], lower[kPack];
  codes_of<E>(upper, load_group<Aligned>(from, count), count, scale_of);
  Pack<T, kPack> next = {};
  if (below > 0) next = load_group<Aligned>(from + h, below);
  codes_of<E>(lower, next, below, scale_of);
  uint8_t bytes[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) bytes[j] = static_cast<uint8_t>(upper[j] | lower[j] << 4);
  store_bytes(body.codes + row / 2 * h + column, bytes, count);
}

// ---- one scale for all numbers

template <bool Aligned, class E, class T>
__global__ void __launch_bounds__(kElementThreads)
    encode_all_kernel(Encoder<E, T> body, int64_t n) {
  const int64_t g =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const float scale = body.tensor_scale();
  if (g == 0) body.store_tensor_scale(scale);
  const int count = group_size(g, n);
  if (count == 0) return;
  encode_pack<E>(body.codes + g * kPackBytes<E>, load_group<Aligned>(body.x + g * kPack, count),
                 count, scale);
}

// ---- blocks of one row: some adjacent lanes of a warp have one block each

template <bool Aligned, class E, class T>
__global__ void __launch_bounds__(kElementThreads) encode_rows_kernel(Encoder<E, T> body) {
  const Layout& layout = body.layout;
  const int lanes = static_cast<int>(layout.block_columns) / kPack;
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t block = thread / lanes, row = body.by_across.quotient(block);
  const int lane = static_cast<int>(thread % lanes);
  const int64_t column = (block - row * layout.blocks) * layout.block_columns + lane * kPack;
  const int count = row < layout.rows ? count_of(column, layout.h) : 0;
  Pack<T, kPack> x = {};
  if (count > 0) x = load_group<Aligned>(body.x + row * layout.h + column, count);
  const uint32_t amax = largest_of_lanes(largest_of(x), lanes);
  const float tensor_scale = body.tensor_scale();
  if (thread == 0) body.store_tensor_scale(tensor_scale);
  const BlockScale scale = body.chooses_scale()
                               ? choose_for_row(body.error_rule(), amax, tensor_scale, x)
                               : body.scale_of(amax, tensor_scale);
  if (count == 0) return;
  if (lane == 0) encoding::store_scale(layout.rule, body.scales, block, scale);
  encode_pack<E>(body.codes_at(row, column), x, count, scale.encode);
}

// ---- blocks of several rows: a block of threads has one each

// Pairs: a byte has codes of two rows.
template <bool Aligned, bool Pairs, class E, class T>
__global__ void __launch_bounds__(kElementThreads) encode_blocks_kernel(Encoder<E, T> body) {
  TRANSFORMER_OPS_SHARED(uint32_t, shared);
  const Layout& layout = body.layout;
  const int64_t block = blockIdx.x, down = body.by_across.quotient(block);
  const int64_t left = (block - down * layout.blocks) * layout.block_columns;
  const int packs = static_cast<int>(layout.block_columns) / kPack;
  const int64_t all = layout.block_rows * packs;
  // Numbers beyond the tensor count as zeros.
  const auto with_pack = [&](int64_t i, const auto& f) {
    const int64_t row = down * layout.block_rows + i / packs;
    const int64_t column = left + i % packs * kPack;
    const int count = row < layout.rows ? count_of(column, layout.h) : 0;
    Pack<T, kPack> x = {};
    if (count > 0) x = load_group<Aligned>(body.x + row * layout.h + column, count);
    return f(row, column, x, count);
  };
  const auto for_packs = [&](const auto& f) {
    for (int64_t i = threadIdx.x; i < all; i += blockDim.x) {
      with_pack(i, [&](int64_t row, int64_t column, const Pack<T, kPack>& x, int count) {
        if (count > 0) f(row, column, x, count);
      });
    }
  };
  uint32_t amax = 0;
  for_packs(
      [&](int64_t, int64_t, const Pack<T, kPack>& x, int) { amax = larger(amax, largest_of(x)); });
  amax = largest_of_block(amax, shared);
  const float tensor_scale = body.tensor_scale();
  BlockScale scale = body.scale_of(amax, tensor_scale);
  if (body.chooses_scale()) {  // a warp has the block
    with_pack(threadIdx.x, [&](int64_t, int64_t, const Pack<T, kPack>& x, int) {
      scale = choose_for_square(body.error_rule(), amax, tensor_scale, x);
    });
  }
  if (threadIdx.x == 0) {
    // For an empty tensor there is one block of threads, but no block of numbers.
    if (left < layout.h && layout.rows > 0)
      encoding::store_scale(layout.rule, body.scales, block, scale);
    if (block == 0) body.store_tensor_scale(tensor_scale);
  }
  for_packs([&](int64_t row, int64_t column, const Pack<T, kPack>& x, int count) {
    if constexpr (!Pairs) {
      encode_pack<E>(body.codes_at(row, column), x, count, scale.encode);
    } else if (row % 2 == 0) {
      encode_pair<Aligned>(body, row, column, count, [&](int) { return scale.encode; });
    }
  });
}

// ---- blocks of one column: a thread has a pack of them

template <bool Aligned, bool Pairs, class E, class T>
__global__ void __launch_bounds__(kElementThreads) encode_columns_kernel(Encoder<E, T> body) {
  const Layout& layout = body.layout;
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t down = body.by_across.quotient(thread);
  const int64_t column = (thread - down * body.across) * kPack;
  const int64_t first = down * layout.block_rows;
  const int count = first < layout.rows ? count_of(column, layout.h) : 0;
  const float tensor_scale = body.tensor_scale();
  if (thread == 0) body.store_tensor_scale(tensor_scale);
  if (count == 0) return;
  const int64_t end =
      first + layout.block_rows < layout.rows ? first + layout.block_rows : layout.rows;
  const auto load_row = [&](int64_t row) {
    return load_group<Aligned>(body.x + row * layout.h + column, count);
  };
  uint32_t amax[kPack] = {};
  for (int64_t row = first; row < end; ++row) {
    const Pack<T, kPack> x = load_row(row);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      amax[j] = larger(amax[j], encoding::bits_of(to_number(x[j])) & encoding::kMagnitude);
    }
  }
  BlockScale scales[kPack];
  if (body.chooses_scale()) {
    choose_columns(body.error_rule(), amax, tensor_scale, first, end, load_row, scales);
  } else {
#pragma unroll
    for (int j = 0; j < kPack; ++j) scales[j] = body.scale_of(amax[j], tensor_scale);
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (j < count)
      encoding::store_scale(layout.rule, body.scales, down * layout.h + column + j, scales[j]);
  }
  const auto scale_of = [&](int j) { return scales[j].encode; };
  for (int64_t row = first; row < end; row += Pairs ? 2 : 1) {
    if constexpr (Pairs) {
      encode_pair<Aligned>(body, row, column, count, scale_of);
    } else {
      encode_each<E>(body.codes_at(row, column), load_row(row), count, scale_of);
    }
  }
}

template <bool Aligned, bool Pairs, class E, class T>
void encode_high(Stream stream, const Format& format, const Encoder<E, T>& body) {
  const Layout& layout = body.layout;
  const int64_t bands = ceil_div(layout.rows, layout.block_rows);
  if (format.block_columns == 1) {
    const int64_t blocks = std::max<int64_t>(1, ceil_div(body.across * bands, kElementThreads));
    launch(stream, {blocks, kElementThreads}, encode_columns_kernel<Aligned, Pairs, E, T>, body);
    return;
  }
  const int64_t packs = format.block_rows * format.block_columns / kPack;
  const auto threads = static_cast<int>(std::min<int64_t>(packs, kElementThreads));
  launch(stream, {std::max<int64_t>(layout.blocks * bands, 1), threads, kSharedWords},
         encode_blocks_kernel<Aligned, Pairs, E, T>, body);
}

template <bool Aligned, class E, class T>
void encode(Stream stream, const Format& format, const Encoder<E, T>& body) {
  const Layout& layout = body.layout;
  if (format.per_tensor()) {
    const int64_t n = layout.rows * layout.h;
    // There is at least one block of threads, which stores the scale.
    const int64_t blocks = std::max<int64_t>(1, ceil_div(n, int64_t{kPack} * kElementThreads));
    launch(stream, {blocks, kElementThreads}, encode_all_kernel<Aligned, E, T>, body, n);
    return;
  }
  if (format.block_rows != 1) return encode_high<Aligned, /*Pairs=*/false>(stream, format, body);
  const int64_t blocks = layout.blocks * layout.rows;
  const int64_t threads = std::max<int64_t>(1, blocks * (layout.block_columns / kPack));
  launch(stream, {ceil_div(threads, kElementThreads), kElementThreads},
         encode_rows_kernel<Aligned, E, T>, body);
}

template <class E, class T>
Encoder<E, T> encoder(const Format& format, const void* x, const float* amax,
                      const float* tensor_scale, void* codes, void* scales,
                      void* decoded_tensor_scale, int64_t rows, int64_t h) {
  const Layout layout(format, encoding::rule_for<E>(format), rows, h);
  const int64_t across = format.block_columns == 1 ? ceil_div(h, kPack) : layout.blocks;
  return {layout,
          static_cast<const T*>(x),
          reinterpret_cast<const uint32_t*>(amax),
          tensor_scale,
          static_cast<uint8_t*>(codes),
          scales,
          static_cast<uint8_t*>(decoded_tensor_scale),
          format.per_tensor() ? format.largest : format.largest * format.largest_scale,
          format.four_over_six,
          across,
          Divisor(std::max<int64_t>(across, 1))};
}

// ---- decode

template <class E, class T>
struct Decoder {
  Layout layout;
  const uint8_t* codes;
  const void* scales;
  const uint8_t* decoded_tensor_scale;
  T* out;
  int64_t packs;  // of a row
  Divisor by_packs, by_columns;
  bool per_tensor;
};

TRANSFORMER_OPS_DEVICE float float_at(const uint8_t* bytes) {
  uint32_t bits = 0;
  if (bytes == nullptr) return 1.0f;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  return encoding::from_bits(bits);
}

template <bool Aligned, class E, class T>
__global__ void __launch_bounds__(kElementThreads) decode_kernel(Decoder<E, T> body) {
  const Layout& layout = body.layout;
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t row = body.by_packs.quotient(thread);
  const int64_t column = (thread - row * body.packs) * kPack;
  if (row >= layout.rows) return;
  const int count = count_of(column, layout.h);
  const float tensor_scale = float_at(body.decoded_tensor_scale);
  const int64_t first_block = row / layout.block_rows * layout.blocks;
  const auto scale_of = [&](int64_t block) {
    return encoding::decoding_scale(layout.rule, body.scales, first_block + block, tensor_scale);
  };
  const bool has_columns = layout.block_columns == 1;
  float scale = tensor_scale;
  if (!body.per_tensor && !has_columns) scale = scale_of(body.by_columns.quotient(column));
  const int64_t row_bytes = (layout.h * kPackBytes<E> + kPack - 1) / kPack;
  const uint8_t* const from = body.codes + row * row_bytes + column / kPack * kPackBytes<E>;
  Pack<T, kPack> out;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    uint32_t code = j < count ? from[j * E::kBits / 8] : 0;
    if constexpr (E::kBits == 4) code = encoding::code_in<E>(code, j % 2 != 0);
    if (has_columns && j < count) scale = scale_of(column + j);
    out[j] = scaled<T>(encoding::decode<E>(code), scale);
  }
  store_group<Aligned>(body.out + row * layout.h + column, out, count);
}

namespace entry {

int64_t largest_parts(int64_t n) {
  return std::clamp<int64_t>(ceil_div(n, int64_t{kPack} * kElementThreads * 4), 1, 1024);
}

void largest(Stream stream, DType dtype, const void* x, float* partials, int64_t n) {
  const int64_t parts = largest_parts(n);
  auto* const words = reinterpret_cast<uint32_t*>(partials);
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = aligned16(x) ? largest_kernel<true, T> : largest_kernel<false, T>;
    launch(stream, {parts, kElementThreads, kSharedWords}, kernel, static_cast<const T*>(x), words,
           n);
  });
  if (parts > 1) launch(stream, {1, kElementThreads, kSharedWords}, finish_kernel, words, parts);
}

void quantize(Stream stream, const Format& format, DType dtype, const void* x, const float* amax,
              const float* tensor_scale, void* codes, void* scales, void* decoded_tensor_scale,
              int64_t rows, int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_element(format.element, [&]<class E>(Type<E>) {
      const auto body = encoder<E, T>(format, x, amax, tensor_scale, codes, scales,
                                      decoded_tensor_scale, rows, h);
      if (aligned16(x) && h % kPack == 0) return encode<true>(stream, format, body);
      encode<false>(stream, format, body);
    });
  });
}

void quantize_row_pairs(Stream stream, const Format& format, DType dtype, const void* x,
                        const float* amax, void* codes, void* scales, void* decoded_tensor_scale,
                        int64_t rows, int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto body = encoder<encoding::E2M1, T>(format, x, amax, /*tensor_scale=*/nullptr, codes,
                                                 scales, decoded_tensor_scale, rows, h);
    if (aligned16(x) && h % kPack == 0)
      return encode_high<true, /*Pairs=*/true>(stream, format, body);
    encode_high<false, /*Pairs=*/true>(stream, format, body);
  });
}

void dequantize(Stream stream, const Format& format, DType dtype, const void* codes,
                const void* scales, const void* decoded_tensor_scale, void* out, int64_t rows,
                int64_t h) {
  if (rows == 0 || h == 0) return;
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_element(format.element, [&]<class E>(Type<E>) {
      const Layout layout(format, encoding::rule_for<E>(format), rows, h);
      const int64_t packs = ceil_div(h, kPack);
      const Decoder<E, T> body{layout,
                               static_cast<const uint8_t*>(codes),
                               scales,
                               static_cast<const uint8_t*>(decoded_tensor_scale),
                               static_cast<T*>(out),
                               packs,
                               Divisor(packs),
                               Divisor(layout.block_columns),
                               format.per_tensor()};
      const auto kernel =
          aligned16(out) && h % kPack == 0 ? decode_kernel<true, E, T> : decode_kernel<false, E, T>;
      launch(stream, {ceil_div(rows * packs, kElementThreads), kElementThreads}, kernel, body);
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(largest_parts, "cuda");
TRANSFORMER_OPS_KERNEL(largest, "cuda");
TRANSFORMER_OPS_KERNEL(quantize, "cuda");
TRANSFORMER_OPS_KERNEL(quantize_row_pairs, "cuda");
TRANSFORMER_OPS_KERNEL(dequantize, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
