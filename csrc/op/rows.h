// Tensors as rows, loops over rows on several threads, and sums of rows, for CPU kernel wrappers
// with loops of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <span>
#include <vector>

namespace transformer_ops::cpu {

// A contiguous tensor as rows of `width` elements.
struct Rows {
  const at::Tensor& tensor;
  int64_t width;

  int64_t count() const { return width == 0 ? 0 : tensor.numel() / width; }
  // The first element of a row.
  const void* read(int64_t row) const { return offset(tensor.const_data_ptr(), row * width); }
  void* write(int64_t row) const {
    return const_cast<void*>(offset(tensor.mutable_data_ptr(), row * width));
  }

 private:
  const void* offset(const void* data, int64_t elements) const {
    return static_cast<const char*>(data) + elements * tensor.element_size();
  }
};

// Bit masks are split at multiples of this, so that the ranges of mask and elements are both
// aligned.
constexpr int64_t kMaskAlign = 64;

// Calls function(begin, end) for ranges of [0, count), on several threads if that is faster. An
// item costs as much as `work` elements; ranges start at multiples of `align`.
void parallel(int64_t count, int64_t work, int64_t align,
              c10::function_ref<void(int64_t, int64_t)> function);

// Adds the rows from first to last to one array of sums for each result, in the accumulate dtype.
using AddRows = c10::function_ref<void(int64_t, int64_t, const std::vector<void*>&)>;

// Sums over rows of `like` into `results` of `width` elements each. The sums are deterministic for
// any number of threads: the parts are fixed, have zeroed sums of their own, and are added in
// order.
void sum_rows(int64_t rows, int64_t width, const at::Tensor& like, std::span<at::Tensor> results,
              AddRows add_rows);

}  // namespace transformer_ops::cpu
