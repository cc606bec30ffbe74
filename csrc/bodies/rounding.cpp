#include "bodies/rounding.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>

#include <bit>

#include "kernels/encoding.h"
#include "kernels/quantize.h"

namespace transformer_ops {
namespace {

using kernel::Format;

constexpr int64_t kTurned = 16;
// Of TransformerEngine's recipe; which rows are negated first is arbitrary, but the same for both
// operands.
constexpr float kSigns[kTurned] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

// Sylvester's matrix, [i, j] = (-1)^(ones that i and j share), with signs, orthonormal.
Tensor hadamard(const Tensor& like) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < kTurned; ++i) {
    for (int64_t j = 0; j < kTurned; ++j) {
      const bool is_odd = std::popcount(static_cast<uint64_t>(i & j)) % 2 == 1;
      numbers.push_back(kSigns[j] * (is_odd ? -0.25f : 0.25f));
    }
  }
  return at::tensor(numbers, at::kFloat).view({kTurned, kTurned}).to(like.options());
}

// What the scales of blocks are relative to, or all there is of one; else 1.
float tensor_scale_cpu(const Format& format, const Tensor& x) {
  if (!format.per_tensor() && !format.has_tensor_scale()) return 1.0f;
  return encoding::tensor_scale(format, largest_cpu(x));
}

char* element_at(const Tensor& tensor, int64_t i) {
  return bytes_at(tensor, i * static_cast<int64_t>(tensor.element_size()));
}

}  // namespace

float largest_cpu(const Tensor& x) {
  const auto dtype = kernel_dtype(x);
  const auto larger = [](float a, float b) {
    return encoding::bits_of(a) > encoding::bits_of(b) ? a : b;
  };
  return at::parallel_reduce(
      0, x.numel(), 65536, 0.0f,
      [&](int64_t begin, int64_t end, float best) {
        const char* const from = bytes_at(x, begin * static_cast<int64_t>(x.element_size()));
        return larger(best, cpu::largest(dtype, from, end - begin));
      },
      larger);
}

void round_to_format_cpu(const Format& format, const Tensor& x, const Tensor& output) {
  const float scale = tensor_scale_cpu(format, x);
  round_by_tensor_scale_cpu(format, x, scale, 1.0f / scale, output);
}

void round_by_tensor_scale_cpu(const Format& format, const Tensor& x, float encodes, float decodes,
                               const Tensor& output) {
  const FlatRows shape(x.sizes());
  const auto from = kernel_dtype(x), to = kernel_dtype(output);
  const auto run = [&](int64_t element, int64_t rows, int64_t h) {
    cpu::round_to_format(format, from, to, element_at(x, element), encodes, decodes,
                         element_at(output, element), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, 1, end - begin); });
    return;
  }
  for_blocks(format, shape,
             [&](int64_t first, int64_t rows, int64_t) { run(first * shape.h, rows, shape.h); });
}

void encode_operand_cpu(const Format& format, const Tensor& x, float encodes,
                        const Tensor& output) {
  if (!is_codes(output.scalar_type())) {
    round_by_tensor_scale_cpu(format, x, encodes, /*decodes=*/1.0f, output);
    return;
  }
  cpu::parallel(x.numel(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::quantize(format, kernel_dtype(x), element_at(x, begin), encodes, bytes_at(output, begin),
                  /*scales=*/nullptr, 1, end - begin);
  });
}

Tensor round_to_format_unfused(const Format& format, const Tensor& x, at::ScalarType dtype) {
  const auto [codes, scale] = quantize_unfused(format, x);
  return dequantize_unfused(format, codes, scale, x.sym_sizes(), dtype);
}

Tensor round_stochastically(const Checks& check, std::string_view format_name, const Tensor& x,
                            at::ScalarType dtype) {
  const Format& format = format_of(check, format_name);
  TORCH_CHECK(format.element != kernel::Element::Int8, "[", check.op(),
              "] format must be floating, got '", format_name, "'");
  const auto [codes, scale] = quantize_unfused(format, x, /*stochastic=*/true);
  return dequantize_unfused(format, codes, scale, x.sym_sizes(), dtype);
}

Tensor turn_columns(const Tensor& input) {
  const Tensor x = to_accumulate(input);
  const c10::SymInt h = x.dim() == 0 ? c10::SymInt(1) : x.sym_size(-1);
  const Tensor rows = x.reshape_symint({-1, h});
  const c10::SymInt whole = rows.sym_size(0) / kTurned * kTurned;
  const Tensor blocks = rows.slice_symint(0, 0, whole).reshape_symint({-1, kTurned, h});
  const Tensor turned = at::matmul(hadamard(x), blocks).reshape_symint({whole, h});
  return at::cat({turned, rows.slice_symint(0, whole)}).reshape_symint(x.sym_sizes());
}

}  // namespace transformer_ops
