// Matrices turned round, in memory of any alignment and with surplus between their rows.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

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

}  // namespace
}  // namespace transformer_ops::cuda
