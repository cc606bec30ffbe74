// Vector code that chooses the scales of blocks whose largest number becomes 6 or 4, bitwise as the
// formulas of kernels/encoding.h.
#pragma once

#include "nearest.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

using kernel::TensorScale;

// Blocks are 16 numbers of a row or of a column, or 16 x 16.
template <class N>
class ScaleChoices {
 public:
  // Formats that do not choose scales need no memory.
  ScaleChoices(const kernel::Format& format, const TensorScale& tensor, int64_t h)
      : format_(format),
        tensor_scale_(tensor.encode),
        rule_(encoding::error_rule(format, tensor.amax)),
        h_(h),
        blocks_((h + format.block_columns - 1) / format.block_columns),
        stride_(blocks_ + kLanes),
        memory_(format.chooses_scale() ? 2 * size_of_candidate() + blocks_ * kWidth : 0) {}

  // Chooses for a strip (the rows of one row of blocks); amax has a number for each block.
  void choose(const N* x, int64_t rows, const float* amax) {
    Candidate six = candidate(0), four = candidate(1);
    for (int64_t block = 0; block < blocks_; ++block) {
      const auto choice = encoding::scale_choice(amax[block], tensor_scale_);
      six.set(block, choice.six);
      four.set(block, choice.four);
    }
    for (const Candidate& each : {six, four}) {
      rule_.squared ? add_errors<true>(each, x, rows) : add_errors<false>(each, x, rows);
    }
    for (int64_t block = 0; block < blocks_; ++block) {
      if (encoding::takes_four(six.error[block], four.error[block])) {
        six.encode[block] = four.encode[block];
        six.number[block] = four.number[block];
      }
    }
  }

  // The choice for each block: the scale that encodes it, and the E4M3 number that decodes it.
  const float* encode() { return candidate(0).encode; }
  const float* number() { return candidate(0).number; }

 private:
  static constexpr int64_t kWidth = 16, kLanes = Vec<N>::kLanes;

  // Arrays with one number for each block. For square blocks, `error` has one for each block and
  // each of its 16 rows.
  struct Candidate {
    float *encode, *number, *error;

    void set(int64_t block, const encoding::BlockScale& scale) const {
      encode[block] = scale.encode;
      number[block] = scale.number;
    }
  };

  // A whole vector can be read at the end of an array.
  int64_t size_of_candidate() const {
    return stride_ * (2 + (has_columns() ? 1 : format_.block_rows));
  }
  Candidate candidate(int64_t i) {
    float* const from = memory_.data() + i * size_of_candidate();
    return {from, from + stride_, from + 2 * stride_};
  }
  float* row_of_errors() { return memory_.data() + 2 * size_of_candidate(); }

  bool has_columns() const { return format_.block_columns == 1; }

  template <bool squared>
  TRANSFORMER_OPS_INLINE Floats errors(Floats x, Floats encode, Floats number) const {
    const Floats value =
        ToNearest().template round<encoding::E2M1, Range::Finite>(x, encode, /*i=*/0);
    const Floats error = value * number * rule_.amax / rule_.most - x;
    if constexpr (squared) {
      const auto exact = __builtin_convertvector(error, DoublesOfFloats);
      return __builtin_convertvector(exact * exact, Floats);
    }
    return (Floats)((Ints)error & 0x7fffffff);
  }

  template <bool squared>
  void add_errors(const Candidate& candidate, const N* x, int64_t rows) {
    if (has_columns()) {
      memset(candidate.error, 0, static_cast<size_t>(stride_) * sizeof(float));
      for (int64_t row = 0; row < rows; ++row) add_columns<squared>(candidate, x + row * h_);
      return;
    }
    for (int64_t row = 0; row < rows; ++row) {
      find_errors<squared>(candidate, x + row * h_);
      sum_blocks(candidate.error + row * stride_);
    }
    if (format_.block_rows > 1) sum_rows(candidate, rows);
  }

  template <bool squared>
  void add_columns(const Candidate& candidate, const N* x) {
    float* const sum = candidate.error;
    const auto found = [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      return errors<squared>(load(x + i, lanes).native,
                             load_unaligned<Floats>(candidate.encode + i),
                             load_unaligned<Floats>(candidate.number + i));
    };
    int64_t i = 0;
    for (; i + kLanes <= h_; i += kLanes) {
      store(sum + i, Vec<float>(load(sum + i).native + found(i, AllLanes())));
    }
    if (i < h_) {
      store(sum + i, Vec<float>(load(sum + i).native + found(i, FirstLanes{h_ - i})));
    }
  }

  // Computes the errors of a row's numbers, followed by zeros up to the end of the last block.
  template <bool squared>
  void find_errors(const Candidate& candidate, const N* x) {
    for (int64_t block = 0, i = 0; i < h_; i += kWidth, ++block) {
      const Floats encode = candidate.encode[block] + Floats{};
      const Floats number = candidate.number[block] + Floats{};
      for (int64_t at = 0; at < kWidth; at += kLanes) {
        float* const to = row_of_errors() + i + at;
        const int64_t left = h_ - i - at;
        const Floats numbers = left >= kLanes ? load(x + i + at).native
                               : left > 0     ? load(x + i + at, FirstLanes{left}).native
                                              : Floats{};
        store(to, Vec<float>(errors<squared>(numbers, encode, number)));
      }
    }
  }

  void sum_blocks(float* sums) {
    const float* const row = row_of_errors();
#pragma omp simd
    for (int64_t block = 0; block < blocks_; ++block) {
      float sum = row[block * kWidth];
      for (int64_t i = 1; i < kWidth; ++i) sum += row[block * kWidth + i];
      sums[block] = sum;
    }
  }

  // Adds up the rows of square blocks; rows from `rows` on count as zeros.
  void sum_rows(const Candidate& candidate, int64_t rows) {
    for (int64_t row = rows; row < format_.block_rows; ++row) {
      memset(candidate.error + row * stride_, 0, static_cast<size_t>(blocks_) * sizeof(float));
    }
    for (int64_t half = format_.block_rows / 2; half > 0; half /= 2) {
      for (int64_t row = 0; row < half; ++row) {
        float* const sums = candidate.error + row * stride_;
        const float* const others = candidate.error + (row + half) * stride_;
        for (int64_t block = 0; block < blocks_; ++block) sums[block] += others[block];
      }
    }
  }

  const kernel::Format& format_;
  float tensor_scale_;
  encoding::ErrorRule rule_;
  int64_t h_, blocks_, stride_;
  Scratch<float> memory_;
};

}  // namespace
}  // namespace transformer_ops::cpu
