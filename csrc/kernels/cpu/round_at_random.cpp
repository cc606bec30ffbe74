// Rounds rows up or down at random to numbers of a format.
#include "draw.h"
#include "kernels/quantize.h"
#include "rounding.h"

namespace transformer_ops::cpu {
namespace {

// The probability of rounding up is the distance to the lower number divided by that between the
// two numbers, as a multiple of 2^-16.
class AtRandom {
 public:
  static constexpr bool kToNearest = false;

  AtRandom(uint64_t seed, int64_t h)
      : seed_(seed), h_(h), drawn_((h + kBitBlock - 1) / kBitBlock + 1) {}

  void start_row(int64_t row) {
    const int64_t counters = (h_ + 7) / 8;
    for (int64_t i = 0; i < h_; i += kBitBlock) {
      draw_pieces(seed_, static_cast<uint64_t>(row * counters + i / 8), 0,
                  drawn_.data()[i / kBitBlock]);
    }
  }

  // The random bits are added below the last kept bit, and carry into it.
  template <class E, Range range>
  TRANSFORMER_OPS_INLINE Floats round(Floats x, Floats scale, int64_t i) const {
    using V = Vec<float>;
    typedef uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));
    constexpr int kDropped = 23 - E::kMantissa;
    constexpr auto kLeast = static_cast<int32_t>(encoding::kLeastExponent<E>);
    const V scaled((Floats)((Ints)x & 0x7fffffff) * scale);
    const Floats magnitude = at_most(scaled, E::kLargest).native;
    // A subnormal number becomes the fraction of a number with the same last bit.
    const auto base = (Floats)((Ints)(magnitude < (Floats)(kLeast + Ints{})) & kLeast);
    const auto random = (Unsigned)load(pieces() + i).native >> (32 - kDropped);
    constexpr uint32_t kHalf = 1u << (kDropped - 17), kKept = ~((1u << kDropped) - 1);
    const Unsigned rounded = ((Unsigned)(magnitude + base) + random + kHalf) & kKept;
    Floats value = (Floats)rounded - base;
    if constexpr (range == Range::Any) value = value_or_nan<E>(scaled, value);
    return copy_sign(V(value), V(x)).native;
  }

 private:
  // Loaded as bfloat16 numbers, the pieces are in the upper half of each lane.
  const BFloat16* pieces() const {
    return reinterpret_cast<const BFloat16*>(const_cast<Scratch<Pieces>&>(drawn_).data());
  }

  uint64_t seed_;
  int64_t h_;
  Scratch<Pieces> drawn_;
};

namespace entry {

void round_at_random(const kernel::Format& format, DType from, DType to, const void* x,
                     const TensorScale& tensor, uint64_t seed, int64_t first_row, void* out,
                     int64_t rows, int64_t h) {
  if (rows == 0 || h == 0) return;
  AtRandom rounding(seed, h);
  with_element(format.element, [&]<class E>(Tag<E>) {
    if constexpr (E::kFloat) {
      round_rows<E>(format, from, to, x, tensor, out, first_row, rows, h, rounding);
    }
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(round_at_random, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
