// Matrices turned round, in memory of any alignment and with surplus between their rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/transpose.h"

namespace transformer_ops::cuda {
namespace {

struct Shape {
  int64_t rows, cols, from_pad, to_pad;
};

template <class T>
void expect_turned(const Shape& shape, int64_t shift) {
  const int64_t from_stride = shape.cols + shape.from_pad, to_stride = shape.rows + shape.to_pad;
  std::vector<T> from(static_cast<size_t>(shape.rows * from_stride + shift));
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<T>(i * 2654435761u >> 7);
  const T untouched = static_cast<T>(0xa5a5a5a5u);
  std::vector<T> to(static_cast<size_t>(shape.cols * to_stride + shift + 1), untouched);
  std::vector<T> want = to;
  for (int64_t i = 0; i < shape.rows; ++i) {
    for (int64_t j = 0; j < shape.cols; ++j) {
      want[static_cast<size_t>(j * to_stride + i + shift)] =
          from[static_cast<size_t>(i * from_stride + j + shift)];
    }
  }
  transpose(nullptr, sizeof(T), from.data() + shift, from_stride, to.data() + shift, to_stride,
            shape.rows, shape.cols);
  EXPECT_EQ(to, want) << shape.rows << " x " << shape.cols << " of " << sizeof(T);
}

TEST(Transpose, TurnsEveryElementAndNothingElse) {
  const Shape shapes[] = {{1, 1, 0, 0},     {128, 128, 0, 0}, {16, 48, 0, 0}, {7, 5, 0, 0},
                          {130, 260, 0, 0}, {33, 31, 3, 2},   {256, 4, 0, 4}, {4, 300, 4, 0},
                          {5, 129, 3, 3},   {64, 126, 2, 0},  {0, 16, 0, 0},  {16, 0, 0, 0}};
  for (const Shape& shape : shapes) {
    for (const int64_t shift : {0, 1, 4}) {
      expect_turned<uint8_t>(shape, shift);
      expect_turned<uint32_t>(shape, shift);
    }
  }
}

// By the indices of the cuBLAS documentation, "1D Block Scaling Factors Layout".
TEST(Transpose, ScalesInTiles) {
  struct Case {
    int64_t outers, inners, height;
  };
  for (const auto& [outers, inners, height] :
       {Case{128, 4, 1}, {32, 1, 1}, {300, 9, 1}, {300, 9, 16}, {16, 5, 16}}) {
    for (const bool by_columns : {false, true}) {
      const int64_t down = (outers + height - 1) / height;
      std::vector<uint8_t> from(static_cast<size_t>(down * inners));
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(1 + i * 7 % 255);
      const int64_t across = (inners + 3) / 4, tiles = (outers + 127) / 128 * across;
      std::vector<uint8_t> to(static_cast<size_t>(tiles * 512 + 4), 0xa5), want(to.size());
      std::fill(want.end() - 4, want.end(), 0xa5);
      const int64_t outer_stride = by_columns ? 1 : inners, inner_stride = by_columns ? down : 1;
      for (int64_t i = 0; i < outers; ++i) {
        for (int64_t b = 0; b < inners; ++b) {
          const int64_t tile = i / 128 * across + b / 4;
          const int64_t at = tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + b % 4;
          want[static_cast<size_t>(at)] =
              from[static_cast<size_t>(i / height * outer_stride + b * inner_stride)];
        }
      }
      tile_scales(nullptr, from.data(), height, outer_stride, inner_stride, to.data(), outers,
                  inners);
      EXPECT_EQ(to, want) << outers << " x " << inners << ", " << height << " high";
    }
  }
}

TEST(Rows, TheLastOnesAreSetToZero) {
  for (const int64_t words : {1, 3, 300}) {
    for (const int64_t first : {0, 1, 40, 41}) {
      constexpr int64_t kRows = 41;
      struct alignas(16) Word {
        int64_t a, b;
      };
      std::vector<Word> rows(static_cast<size_t>(kRows * words + 1), Word{3, 5});
      zero_rows_from(nullptr, rows.data(), &first, kRows, words * 16);
      for (int64_t i = 0; i <= kRows * words; ++i) {
        const auto [a, b] = rows[static_cast<size_t>(i)];
        const bool is_zero = i >= first * words && i < kRows * words;
        EXPECT_TRUE(a == (is_zero ? 0 : 3) && b == (is_zero ? 0 : 5)) << i << " of " << words;
      }
    }
  }
}

TEST(Transpose, FactorsOfAProductAreJoined) {
  const float left = 3.0f, right = -0.125f;
  alignas(4) char bytes[9];  // neither is aligned
  std::memcpy(bytes + 1, &left, sizeof(left));
  std::memcpy(bytes + 5, &right, sizeof(right));
  const auto joined = [](const void* a, const void* b) {
    std::array<float, 3> to = {9, 9, 9};
    join_factors(nullptr, a, b, /*alpha=*/0.5f, /*beta=*/2.0f, to.data());
    return to;
  };
  EXPECT_EQ(joined(bytes + 1, bytes + 5), (std::array{-0.1875f, 2.0f, 9.0f}));
  EXPECT_EQ(joined(nullptr, bytes + 5), (std::array{-0.0625f, 2.0f, 9.0f}));
  EXPECT_EQ(joined(bytes + 1, nullptr), (std::array{1.5f, 2.0f, 9.0f}));
}

}  // namespace
}  // namespace transformer_ops::cuda
