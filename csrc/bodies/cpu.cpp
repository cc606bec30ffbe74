#include "bodies/cpu.h"

#include "kernels/convert.h"
#include "op/typed_op.h"

namespace transformer_ops::cpu {

at::Tensor to_accumulate(const at::Tensor& parameter, const at::Tensor& like, double add) {
  const auto dtype = accumulate_dtype(like.scalar_type());
  if (parameter.scalar_type() == dtype && add == 0.0) return parameter;
  // The kernel converts from any dtype to that dtype's own compute type.
  if (accumulate_dtype(parameter.scalar_type()) != dtype) return parameter.to(dtype).add(add);
  at::Tensor result = empty_cpu(parameter.sizes(), dtype);
  convert_to_acc(kernel_dtype(parameter), parameter.const_data_ptr(), result.mutable_data_ptr(),
                 add, parameter.numel());
  return result;
}

void sum_rows(int64_t rows, int64_t width, const at::Tensor& like, std::span<at::Tensor> results,
              AddRows add_rows) {
  constexpr int64_t kMostParts = 16;
  constexpr int64_t kElementsPerPart = 65536;
  const int64_t parts =
      std::clamp<int64_t>(rows * width / kElementsPerPart, 1, std::min(kMostParts, rows + 1));
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
