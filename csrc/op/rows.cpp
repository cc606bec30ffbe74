#include "op/rows.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "op/buffer.h"
#include "op/split.h"
#include "op/typed_op.h"

namespace transformer_ops::cpu {

void parallel(int64_t count, int64_t work, int64_t align,
              c10::function_ref<void(int64_t, int64_t)> function) {
  const LoopSplit split = split_loop(count, work, align);
  if (split.is_serial()) {
    if (count > 0) function(0, count);
    return;
  }
  at::parallel_for(0, split.units, split.grain, [&](int64_t begin, int64_t end) {
    function(begin * align, std::min(end * align, count));
  });
}

void sum_rows(int64_t rows, int64_t width, const at::Tensor& like, std::span<at::Tensor> results,
              AddRows add_rows) {
  const int64_t parts = sum_parts(rows, width);
  const auto accumulate = accumulate_dtype(like.scalar_type());
  const bool in_place = parts == 1 && std::ranges::all_of(results, [&](const at::Tensor& result) {
                          return result.scalar_type() == accumulate;
                        });
  if (in_place) {
    std::vector<void*> sums;
    sums.reserve(results.size());
    for (const at::Tensor& result : results) {
      sums.push_back(result.mutable_data_ptr());
      std::fill_n(static_cast<char*>(sums.back()), result.nbytes(), '\0');
    }
    add_rows(0, rows, sums);
    return;
  }
  const auto count = static_cast<int64_t>(results.size());
  at::Tensor sums = empty_cpu({parts, count, width}, accumulate);
  sums.zero_();
  auto* data = static_cast<char*>(sums.mutable_data_ptr());
  const int64_t bytes = width * static_cast<int64_t>(sums.element_size());
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      std::vector<void*> pointers;
      for (int64_t k = 0; k < count; ++k) pointers.push_back(data + (part * count + k) * bytes);
      add_rows(rows * part / parts, rows * (part + 1) / parts, pointers);
    }
  });
  const at::Tensor total = sums.sum(0);
  for (int64_t k = 0; k < count; ++k) results[k].copy_(total[k].view(results[k].sizes()));
}

}  // namespace transformer_ops::cpu
