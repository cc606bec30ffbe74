#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <functional>
#include <optional>
#include <vector>

namespace transformer_ops {

// What zeros in the place of a tensor, or a check of its gradient, need to know of it.
struct TensorMetadata {
  c10::SymDimVector sizes;
  at::ScalarType dtype;
  at::Device device;
};
// None for a tensor that was never made.
using TensorMetadataList = std::vector<std::optional<TensorMetadata>>;

std::optional<TensorMetadata> metadata_of(const at::Tensor& tensor);
at::Tensor zeros_like(const TensorMetadata& metadata);

// An id and metadata, for an autograd node, whose saved data compiled autograd has to understand.
c10::IValue pack(uint64_t id, const TensorMetadataList& metadata);
uint64_t unpack_id(const c10::IValue& packed);
TensorMetadataList unpack_metadata(const c10::IValue& packed);

// The gradient of `what`, which host step `step` returned, in shape and dtype of its tensor: a
// shape that the tensor expands to is summed, a dtype cast, a single number moved to its device.
// Throws c10::Error for another shape or device, and for complex numbers where the tensor is real.
at::Tensor fitted(const std::string& step, const std::function<std::string()>& what,
                  at::Tensor gradient, const TensorMetadata& metadata, bool keep_dtype = false);

}  // namespace transformer_ops
