// Quantized tensors: codes and scales in one of the formats of kernels/format.h, and back.
//
// Rows are the leading dimensions together, blocks run along the last one; the last block of a row
// may be shorter. No gradient passes: neither op's results require one, whatever the arguments.
#include <ATen/Parallel.h>

#include <cstring>
#include <optional>

#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/quantized.h"
#include "kernels/encoding.h"
#include "kernels/quantize.h"

namespace transformer_ops {
namespace {

using kernel::Format;

int64_t row_bytes(const Format& format, int64_t h) { return (h * format.bits + 7) / 8; }

// f(first row, rows, first block) of whole blocks, on several threads.
template <typename Function>
void for_blocks(const Format& format, const FlatRows& shape, const Function& function) {
  const int64_t bands = (shape.rows + format.block_rows - 1) / format.block_rows;
  const int64_t across = (shape.h + format.block_columns - 1) / format.block_columns;
  cpu::parallel(bands, format.block_rows * shape.h, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * format.block_rows;
    const int64_t last = std::min(end * format.block_rows, shape.rows);
    function(first, last - first, begin * across);
  });
}

char* at(const Tensor& tensor, int64_t bytes) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + bytes;
}

// ---- quantize

TensorSpecs quantize_shape(const Args& args) {
  const Tensor& input = args.tensor(0);
  check_compute_dtype(args, "input", input);
  const Format& format = format_of(args, 1);
  return {codes_spec(format, input.sym_sizes()), scale_spec(format, input.sym_sizes())};
}

float largest_cpu(const Tensor& x) {
  const auto dtype = kernel_dtype(x);
  const auto larger = [](float a, float b) {
    return encoding::bits_of(a) > encoding::bits_of(b) ? a : b;
  };
  return at::parallel_reduce(
      0, x.numel(), 65536, 0.0f,
      [&](int64_t begin, int64_t end, float best) {
        const char* const from = at(x, begin * static_cast<int64_t>(x.element_size()));
        return larger(best, cpu::largest(dtype, from, end - begin));
      },
      larger);
}

void quantize_cpu(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(0);
  const Tensor &codes = results[0], &scale = results[1];
  const Format& format = format_of(args, 1);
  const FlatRows shape(x.sizes());
  const auto dtype = kernel_dtype(x);
  const auto size = static_cast<int64_t>(x.element_size());
  float tensor_scale = 1.0f;
  if (uint8_t* const to = tensor_scale_of(format, scale)) {
    tensor_scale = encoding::tensor_scale(format, largest_cpu(x));
    const float decoded = 1.0f / tensor_scale;
    std::memcpy(to, &decoded, sizeof(decoded));
  }
  const auto run = [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::quantize(format, dtype, at(x, element * size), tensor_scale, at(codes, byte),
                  at(scale, block * static_cast<int64_t>(scale.element_size())), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(x.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, begin, 0, 1, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t row, int64_t rows, int64_t block) {
    run(row * shape.h, row * row_bytes(format, shape.h), block, rows, shape.h);
  });
}

void quantize_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(0);
  const Format& format = format_of(args, 1);
  const FlatRows shape(x.sizes());
  const auto stream = cuda::stream_of(x);
  uint8_t* const tensor_scale = tensor_scale_of(format, results[1]);
  Tensor amax;
  if (tensor_scale != nullptr) {
    amax = empty({cuda::largest_parts(x.numel())}, at::kFloat, x.device());
    cuda::largest(stream, kernel_dtype(x), cuda::read(x), amax.mutable_data_ptr<float>(),
                  x.numel());
  }
  cuda::quantize(stream, format, kernel_dtype(x), cuda::read(x),
                 amax.defined() ? amax.const_data_ptr<float>() : nullptr, cuda::write(results[0]),
                 cuda::write(results[1]), tensor_scale, shape.rows, shape.h);
}

Tensors quantize_meaning(const Args& args) {
  return quantize_unfused(format_of(args, 1), args.tensor(0));
}

// ---- dequantize

at::ScalarType dtype_of(const Args& args, size_t i) {
  const std::string_view name = args.text(i);
  for (const auto& [text, dtype] :
       {std::pair("float16", at::kHalf), std::pair("bfloat16", at::kBFloat16),
        std::pair("float32", at::kFloat), std::pair("float64", at::kDouble)}) {
    if (name == text) return dtype;
  }
  TORCH_CHECK(false, "[", args.op(),
              "] dtype must be 'float16', 'bfloat16', 'float32' or 'float64', got '", name, "'");
}

// Of the tensor that was quantized: `shape`, or what the codes say.
c10::SymDimVector sizes_of(const Args& args, const Format& format) {
  constexpr size_t kShape = 4;
  if (args.values().size() > kShape && !args[kShape].isNone()) {
    const auto sizes = args[kShape].toSymIntVector();
    for (const auto& size : sizes) {
      TORCH_CHECK(size >= 0, "[", args.op(), "] shape must have no negative size, got ", size);
    }
    return c10::SymDimVector(sizes.begin(), sizes.end());
  }
  c10::SymDimVector sizes(args.tensor(0).sym_sizes());
  if (format.bits == 4 && !sizes.empty()) sizes.back() = sizes.back() * 2;
  return sizes;
}

TensorSpecs dequantize_shape(const Args& args) {
  const Format& format = format_of(args, 2);
  const auto dtype = dtype_of(args, 3);
  const auto sizes = sizes_of(args, format);
  check_spec(args, "codes", args.tensor(0), codes_spec(format, sizes));
  check_spec(args, "scale", args.tensor(1), scale_spec(format, sizes));
  return {{sizes, dtype}};
}

void dequantize_cpu(const Args& args, Tensors& results) {
  const Tensor &codes = args.tensor(0), &scale = args.tensor(1), &out = results[0];
  const Format& format = format_of(args, 2);
  const FlatRows shape(out.sizes());
  const auto dtype = kernel_dtype(out);
  const auto size = static_cast<int64_t>(out.element_size());
  float decoded = 1.0f;
  if (const uint8_t* const from = tensor_scale_of(format, scale)) {
    std::memcpy(&decoded, from, sizeof(decoded));
  }
  const auto run = [&](int64_t element, int64_t byte, int64_t block, int64_t rows, int64_t h) {
    cpu::dequantize(format, dtype, at(codes, byte),
                    at(scale, block * static_cast<int64_t>(scale.element_size())), decoded,
                    at(out, element * size), rows, h);
  };
  if (format.per_tensor()) {
    cpu::parallel(out.numel(), 1, cpu::kMaskAlign,
                  [&](int64_t begin, int64_t end) { run(begin, begin, 0, 1, end - begin); });
    return;
  }
  for_blocks(format, shape, [&](int64_t row, int64_t rows, int64_t block) {
    run(row * shape.h, row * row_bytes(format, shape.h), block, rows, shape.h);
  });
}

void dequantize_cuda(const Args& args, Tensors& results) {
  const Format& format = format_of(args, 2);
  const FlatRows shape(results[0].sizes());
  cuda::dequantize(cuda::stream_of(results[0]), format, kernel_dtype(results[0]),
                   cuda::read(args.tensor(0)), cuda::read(args.tensor(1)),
                   tensor_scale_of(format, args.tensor(1)), cuda::write(results[0]), shape.rows,
                   shape.h);
}

Tensors dequantize_meaning(const Args& args) {
  const Format& format = format_of(args, 2);
  return {dequantize_unfused(format, args.tensor(0), args.tensor(1), sizes_of(args, format),
                             dtype_of(args, 3))};
}

// ---- decode_saved: dequantize in backward, behind a gradient

Args behind_gradient(const Args& args) { return Args(args.op(), args.values().subspan(1)); }

TensorSpecs decode_saved_shape(const Args& args) { return dequantize_shape(behind_gradient(args)); }

void decode_saved_cpu(const Args& args, Tensors& results) {
  dequantize_cpu(behind_gradient(args), results);
}

void decode_saved_cuda(const Args& args, Tensors& results) {
  dequantize_cuda(behind_gradient(args), results);
}

Tensors decode_saved_meaning(const Args& args) { return dequantize_meaning(behind_gradient(args)); }

[[maybe_unused]] const bool registered = [] {
  register_typed_op({.schema = "quantize(Tensor input, str format) -> (Tensor codes, Tensor scale)",
                     .shape = quantize_shape,
                     .cpu = quantize_cpu,
                     .cuda = quantize_cuda,
                     .unfused = quantize_meaning,
                     .differentiable = false});
  register_typed_op({.schema = "dequantize(Tensor codes, Tensor scale, str format, str dtype, "
                               "SymInt[]? shape=None) -> Tensor output",
                     .shape = dequantize_shape,
                     .cpu = dequantize_cpu,
                     .cuda = dequantize_cuda,
                     .unfused = dequantize_meaning,
                     .differentiable = false});
  // The gradient keeps a compiler from decoding in forward what was encoded to save memory.
  register_typed_op({.schema = "decode_saved(Tensor grad_output, Tensor codes, Tensor scale, "
                               "str format, str dtype) -> Tensor output",
                     .shape = decode_saved_shape,
                     .cpu = decode_saved_cpu,
                     .cuda = decode_saved_cuda,
                     .unfused = decode_saved_meaning,
                     .reads_first = false,
                     .differentiable = false});
  return true;
}();

}  // namespace
}  // namespace transformer_ops
