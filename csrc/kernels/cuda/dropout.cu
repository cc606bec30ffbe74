// Dropout, alone and with the bias before it and the residual after it.
#include "kernels/cuda/bits.h"
#include "kernels/cuda/columns.h"
#include "kernels/dropout.h"
#include "kernels/random.h"

namespace transformer_ops::cuda {
namespace {

// The bits of kept elements. Element j of group g uses word j % 4 of Philox(key = seed, counter =
// (g, offset / 4 + j / 4)); each call of the op advances the offset by 8.
struct Draw {
  Philox philox;
  uint32_t threshold;
  bool keeps, draws;  // without draws, all elements are kept, or none

  Draw(const Philox& philox, double p)
      : philox(philox),
        threshold(random::keep_threshold(p)),
        keeps(p < 1.0),
        draws(p > 0.0 && p < 1.0) {}

  __device__ __forceinline__ unsigned bits(int64_t g) const {
    if (!draws) return keeps ? 0xff : 0;
    uint64_t seed = philox.seed, offset = philox.offset;
    if (philox.seed_at != nullptr) seed = static_cast<uint64_t>(*philox.seed_at);
    if (philox.offset_at != nullptr) offset += static_cast<uint64_t>(*philox.offset_at);
    unsigned kept = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto words = random::philox(seed, static_cast<uint64_t>(g), offset / 4 + half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        kept |= static_cast<unsigned>(words.word[j] >= threshold) << (4 * half + j);
      }
    }
    return kept;
  }
};

template <class A>
struct DrawAndScale {
  Draw draw;
  A scale;
  uint8_t* mask;  // may be null

  __device__ __forceinline__ unsigned before(int64_t g) const { return draw.bits(g); }
  __device__ __forceinline__ A each(A x, unsigned bits, int j) const {
    return scale_where_set(x, scale, bits, j);
  }
  __device__ __forceinline__ void after(int64_t g, unsigned bits) const {
    if (mask != nullptr) mask[g] = static_cast<uint8_t>(bits);
  }
};

// y = dropout(x + bias) + extra.
template <class T, class Sum>
struct BiasDropoutAdd {
  Draw draw;
  Acc<T> scale;
  const T* x;
  Vector bias;
  const Sum* extra;
  Sum* y;
  uint8_t* mask;  // may be null
  int64_t h;

  template <class Bias>
  __device__ __forceinline__ Pack<Sum, kGroup> add(const Pack<T, kGroup>& in, const Bias& bias,
                                                   const Pack<Sum, kGroup>& more,
                                                   unsigned bits) const {
    Pack<Sum, kGroup> out;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const Acc<T> sum = to_acc(in[j]) + bias[j];
      out[j] = round_to<Sum>(scale_where_set(sum, scale, bits, j) + to_acc(more[j]));
    }
    return out;
  }
};

// For rows that are whole groups.
template <class T, class Sum>
struct BiasDropoutAddRows : BiasDropoutAdd<T, Sum> {
  struct Column {
    int64_t first;
    Pack<Acc<T>, kGroup> bias;
  };
  struct Loads {
    Pack<T, kGroup> x;
    Pack<Sum, kGroup> extra;
    unsigned bits;
  };
  static constexpr int kRows = 2;

  __device__ __forceinline__ Column column(int64_t pack) const { return {pack * kGroup, {}}; }
  __device__ __forceinline__ void load_parameters(Column& column) const {
    column.bias = elements<true, kGroup, Acc<T>>(this->bias, column.first);
  }
  __device__ __forceinline__ Loads load(const Column& column, int64_t row) const {
    const int64_t i = row * this->h + column.first;
    return {cuda::load<true, kGroup>(this->x + i), cuda::load<true, kGroup>(this->extra + i),
            this->draw.bits(i / kGroup)};
  }
  template <class Add>
  __device__ __forceinline__ void finish(const Column& column, int64_t row, const Loads& loads,
                                         const Add&) const {
    const int64_t i = row * this->h + column.first;
    store<true, kGroup>(this->y + i, this->add(loads.x, column.bias, loads.extra, loads.bits));
    if (this->mask != nullptr) this->mask[i / kGroup] = static_cast<uint8_t>(loads.bits);
  }
};

// For rows that begin anywhere in a group, or are not aligned.
template <class T, class Sum>
__global__ void __launch_bounds__(kElementThreads)
    bias_dropout_add_kernel(BiasDropoutAdd<T, Sum> body, Divisor by_h, int64_t n) {
  const int64_t g =
      static_cast<int64_t>(blockIdx.x) * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int count = group_size(g, n);
  if (count == 0) return;
  const int64_t first = g * kGroup;
  const auto x = load_group<false>(body.x + first, count);
  const auto extra = load_group<false>(body.extra + first, count);
  Pack<Acc<T>, kGroup> bias;
  int64_t column = first - by_h.quotient(first) * body.h;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    bias[j] = element<Acc<T>>(body.bias, column);
    if (++column == body.h) column = 0;
  }
  const unsigned bits = body.draw.bits(g);
  store_group<false>(body.y + first, body.add(x, bias, extra, bits), count);
  if (body.mask != nullptr) body.mask[g] = static_cast<uint8_t>(lowest_bits(bits, count));
}

template <class T, class Sum>
void run(Stream stream, const BiasDropoutAdd<T, Sum>& body, int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  if (h % kGroup == 0 && aligned16(body.x, body.bias.data, body.extra, body.y)) {
    for_rows(stream, BiasDropoutAddRows<T, Sum>{body}, rows, h / kGroup);
    return;
  }
  launch(stream, {ceil_div(rows * h, int64_t{kGroup} * kElementThreads), kElementThreads},
         bias_dropout_add_kernel<T, Sum>, body, Divisor(h), rows * h);
}

namespace entry {

void dropout_forward(Stream stream, DType dtype, const void* x, void* y, uint8_t* mask,
                     const Philox& philox, double p, int64_t n) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto scale = static_cast<Acc<T>>(random::dropout_scale(p));
    map_groups<T>(stream, DrawAndScale<Acc<T>>{Draw(philox, p), scale, mask}, x, y, n);
  });
}

void dropout_backward(Stream stream, DType dtype, const void* grad_y, const uint8_t* mask,
                      void* grad_x, double p, int64_t n) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto scale = static_cast<Acc<T>>(random::dropout_scale(p));
    map_groups<T>(stream, ScaleWhereSet<Acc<T>>{mask, scale}, grad_y, grad_x, n);
  });
}

void bias_dropout_add(Stream stream, DType dtype, DType sum, const void* x, const Vector& bias,
                      const void* extra, void* y, uint8_t* mask, const Philox& philox, double p,
                      int64_t rows, int64_t h) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto start = [&](auto sum_type) {
      using Sum = typename decltype(sum_type)::type;
      run(stream,
          BiasDropoutAdd<T, Sum>{Draw(philox, p), static_cast<Acc<T>>(random::dropout_scale(p)),
                                 static_cast<const T*>(x), bias, static_cast<const Sum*>(extra),
                                 static_cast<Sum*>(y), mask, h},
          rows, h);
    };
    if (sum == dtype) return start(Type<T>());
    start(Type<Acc<T>>());
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(dropout_forward, "cuda");
TRANSFORMER_OPS_KERNEL(dropout_backward, "cuda");
TRANSFORMER_OPS_KERNEL(bias_dropout_add, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
