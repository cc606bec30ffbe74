#include "bodies/quantized_cuda.h"

#include "bodies/cuda.h"
#include "kernels/quantize.h"

namespace transformer_ops {

using kernel::Format;

Tensor largest_cuda(const Tensor& x) {
  Tensor found = empty({cuda::largest_parts(x.numel())}, at::kFloat, x.device());
  cuda::largest(cuda::stream_of(x), kernel_dtype(x), cuda::read(x), found.mutable_data_ptr<float>(),
                x.numel());
  return found;
}

void encode_cuda(const Format& format, const Tensor& x, void* codes, void* scales, void* decodes,
                 const float* encodes) {
  const FlatRows shape(x.sizes());
  Tensor amax;
  if (decodes != nullptr && encodes == nullptr) amax = largest_cuda(x);
  cuda::quantize(cuda::stream_of(x), format, kernel_dtype(x), cuda::read(x),
                 amax.defined() ? amax.const_data_ptr<float>() : nullptr, encodes, codes, scales,
                 decodes, shape.rows, shape.h);
}

void encode_row_pairs_cuda(const Format& format, const Tensor& x, const Tensor& codes,
                           const Tensor& scale) {
  const FlatRows shape(x.sizes());
  const Tensor amax = largest_cuda(x);
  cuda::quantize_row_pairs(cuda::stream_of(x), format, kernel_dtype(x), cuda::read(x),
                           amax.const_data_ptr<float>(), cuda::write(codes), cuda::write(scale),
                           tensor_scale_of(format, scale), shape.rows, shape.h);
}

void encode_operand_cuda(const Format& format, const Tensor& x, const Tensor& output,
                         const Tensor& decodes, const float* encodes) {
  if (is_codes(output.scalar_type())) {
    encode_cuda(format, x, cuda::write(output), /*scales=*/nullptr, cuda::write(decodes), encodes);
    return;
  }
  const auto make = [&](const TensorSpec& spec) {
    return empty(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype, x.device());
  };
  const Tensor codes = make(codes_spec(format, x.sym_sizes())),
               scales = make(scale_spec(format, x.sym_sizes()));
  encode_cuda(format, x, cuda::write(codes), cuda::write(scales), cuda::write(decodes), encodes);
  const FlatRows shape(x.sizes());
  cuda::dequantize(cuda::stream_of(x), format, kernel_dtype(output), cuda::read(codes),
                   cuda::read(scales), /*decoded_tensor_scale=*/nullptr, cuda::write(output),
                   shape.rows, shape.h);
}

}  // namespace transformer_ops
