// What the CPU bodies of ops share: dtypes, pointers, threads, and sums over rows.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <span>
#include <vector>

#include "bodies/kernel_dtype.h"
#include "kernels/cpu.h"
#include "op/buffer.h"

namespace transformer_ops::cpu {

using transformer_ops::kernel_dtype;

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

// Bit masks split at multiples of it: the ranges of both the mask and the elements are aligned.
constexpr int64_t kMaskAlign = 64;

// Splits [0, count) of items that cost `work` elements each; the ranges start at multiples of
// `align`. Less than 2 * kGrain elements take about as long as waking a second thread.
template <typename Function>
void parallel(int64_t count, int64_t work, int64_t align, const Function& function) {
  constexpr int64_t kGrain = 32768;
  const int64_t units = (count + align - 1) / align;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work * align));
  if (units < 2 * grain) {
    if (count > 0) function(0, count);
    return;
  }
  at::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    function(begin * align, std::min(end * align, count));
  });
}

// A parameter in the accumulate dtype of `like`, plus `add`. No copy where none is needed.
at::Tensor to_accumulate(const at::Tensor& parameter, const at::Tensor& like, double add = 0.0);

// Adds the rows first to last to one array of sums a result, in the accumulate dtype.
using AddRows = c10::function_ref<void(int64_t, int64_t, const std::vector<void*>&)>;

// Sums over rows of `like` into `results` of `width` elements each; deterministic for any number of
// threads: a fixed split into parts, each with zeroed sums of its own, added in order.
void sum_rows(int64_t rows, int64_t width, const at::Tensor& like, std::span<at::Tensor> results,
              AddRows add_rows);

}  // namespace transformer_ops::cpu
