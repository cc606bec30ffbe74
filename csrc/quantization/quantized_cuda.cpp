#include "quantization/quantized_cuda.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "kernels/quantize.h"
#include "wrappers/cuda.h"
#include "wrappers/group_bands.h"
#include "wrappers/grouped.h"
#include "wrappers/linear.h"

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

void round_cuda(const Format& format, const Tensor& x, const Tensor& output, const Tensor& decodes,
                const float* encodes) {
  void* const separate = decodes.defined() ? cuda::write(decodes) : nullptr;
  if (is_codes(output.scalar_type())) {
    return encode_cuda(format, x, cuda::write(output), /*scales=*/nullptr, separate, encodes);
  }
  const auto make = [&](const TensorSpec& spec) {
    return empty(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype, x.device());
  };
  const Tensor codes = make(codes_spec(format, x.sym_sizes())),
               scales = make(scale_spec(format, x.sym_sizes()));
  uint8_t* const joined = separate == nullptr ? tensor_scale_of(format, scales) : nullptr;
  encode_cuda(format, x, cuda::write(codes), cuda::write(scales),
              separate == nullptr ? joined : separate, encodes);
  const FlatRows shape(x.sizes());
  cuda::dequantize(cuda::stream_of(x), format, kernel_dtype(output), cuda::read(codes),
                   cuda::read(scales), joined, cuda::write(output), shape.rows, shape.h);
}

namespace {

// The rows of groups, and the ends of the groups. If those are undefined, all rows are one group.
struct DeviceGroups {
  Tensor rows, ends, bands = {};
  int64_t count = 1;

  // The groups of one tensor.
  DeviceGroups(const Tensor& input, const Tensor* splits) : rows(as_matrix(input)) {
    if (splits != nullptr) {
      ends = group_ends(*splits, rows.size(0));
    } else if (input.dim() == 3) {
      const auto options = input.options().dtype(at::kLong);
      ends = at::arange(1, input.size(0) + 1, options) * input.size(1);
    } else {
      return;
    }
    count = ends.size(0);
  }

  Tensor sizes() const { return group_sizes(ends); }
  void count_bands(const Format& format) {
    if (ends.defined() && format.block_rows > 1) bands = band_ends(sizes(), format.block_rows);
  }
  cuda::GroupEnds view() const { return {data_of(ends), data_of(bands), count}; }

  static const int64_t* data_of(const Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<int64_t>() : nullptr;
  }
};

// The numbers of the matrices from `first` on, in a tensor with one number for each matrix.
const float* numbers_from(const Tensor& of_groups, size_t first) {
  return of_groups.defined() ? of_groups.const_data_ptr<float>() + first : nullptr;
}

void largest_of_groups_cuda(const DeviceGroups& groups, float* amax) {
  const Tensor& rows = groups.rows;
  cuda::largest_of_groups(cuda::stream_of(rows), kernel_dtype(rows), cuda::read(rows),
                          groups.view(), amax, rows.size(0), rows.size(1));
}

}  // namespace

void round_groups_cuda(const Format& format, const Tensors& input, const Tensor* splits,
                       const Tensors& output, const Tensor& encodes) {
  const bool of_tensor = format.per_tensor() || format.has_tensor_scale();
  for (size_t i = 0; i < input.size(); ++i) {
    DeviceGroups groups(input[i], splits);
    groups.count_bands(format);
    Tensor amax;
    if (of_tensor && !encodes.defined()) {
      amax = at::zeros({groups.count}, input[i].options().dtype(at::kFloat));
      largest_of_groups_cuda(groups, amax.mutable_data_ptr<float>());
    }
    const Tensor& rows = groups.rows;
    cuda::round_groups(cuda::stream_of(rows), format, kernel_dtype(rows), kernel_dtype(output[i]),
                       cuda::read(rows), groups.view(), numbers_from(amax, 0),
                       numbers_from(encodes, i), cuda::write(output[i]), rows.size(0),
                       rows.size(1));
  }
}

void largest_of_groups_cuda(const Tensors& input, const Tensor* splits, float nothing,
                            const Tensor& amax) {
  for (size_t i = 0; i < input.size(); ++i) {
    const DeviceGroups groups(input[i], splits);
    const Tensor own = amax.narrow(0, static_cast<int64_t>(i), groups.count);
    if (groups.ends.defined()) {
      own.zero_().masked_fill_(groups.sizes() <= 0, nothing);
    } else {
      own.fill_(groups.rows.size(0) > 0 ? 0.0f : nothing);
    }
    largest_of_groups_cuda(groups, own.mutable_data_ptr<float>());
  }
}

}  // namespace transformer_ops
