#include "ops/cpu.h"

#include "ops/typed_op.h"

namespace transformer_ops::cpu {

DType kernel_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "a shape rule checks the dtype first");
  }
}

at::Tensor to_accumulate(const at::Tensor& parameter, const at::Tensor& like, double add) {
  const auto dtype = accumulate_dtype(like.scalar_type());
  if (parameter.scalar_type() == dtype && add == 0.0) return parameter;
  // The kernel converts from any dtype to that dtype's own compute type.
  if (accumulate_dtype(parameter.scalar_type()) != dtype) return parameter.to(dtype).add(add);
  at::Tensor result = at::detail::empty_cpu(parameter.sizes(), dtype);
  kernels().convert_to_acc(kernel_dtype(parameter), parameter.const_data_ptr(),
                           result.mutable_data_ptr(), add, parameter.numel());
  return result;
}

std::vector<at::Tensor> sum_rows(
    int64_t rows, int64_t width, const at::Tensor& like, const std::vector<at::ScalarType>& dtypes,
    const std::function<void(int64_t, int64_t, const std::vector<void*>&)>& function) {
  constexpr int64_t kMostParts = 16;
  constexpr int64_t kElementsPerPart = 65536;
  const int64_t parts =
      std::clamp<int64_t>(rows * width / kElementsPerPart, 1, std::min(kMostParts, rows + 1));
  const auto count = static_cast<int64_t>(dtypes.size());
  const auto accumulate = accumulate_dtype(like.scalar_type());
  at::Tensor sums = at::detail::empty_cpu({parts, count, width}, accumulate);
  sums.zero_();
  auto* data = static_cast<char*>(sums.mutable_data_ptr());
  const int64_t bytes = width * static_cast<int64_t>(sums.element_size());
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      std::vector<void*> pointers;
      for (int64_t k = 0; k < count; ++k) pointers.push_back(data + (part * count + k) * bytes);
      function(rows * part / parts, rows * (part + 1) / parts, pointers);
    }
  });
  const at::Tensor total = parts == 1 ? sums[0] : sums.sum(0);
  std::vector<at::Tensor> results;
  for (int64_t k = 0; k < count; ++k) {
    const at::Tensor row = total[k];
    // A result of its own memory: the sums would keep each other alive.
    results.push_back(row.scalar_type() == dtypes[k] ? row.clone() : row.to(dtypes[k]));
  }
  return results;
}

}  // namespace transformer_ops::cpu
