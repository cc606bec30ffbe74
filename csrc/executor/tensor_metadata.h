#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace transformer_ops {

// The properties of a tensor that are needed to replace it by zeros, or to check its gradient.
struct TensorMetadata {
  c10::SymDimVector sizes;
  at::ScalarType dtype;
  at::Device device;
};
// None for a tensor that was never computed.
using TensorMetadataList = std::vector<std::optional<TensorMetadata>>;

std::optional<TensorMetadata> metadata_of(const at::Tensor& tensor);
// Does the tensor have real memory, so that it is neither meta nor part of a trace?
bool is_real(const at::Tensor& tensor);
// As Python prints them.
std::string shape_text(c10::SymIntArrayRef sizes);
std::string dtype_text(at::ScalarType dtype);
// A caller may free the memory of a storage that tensors still refer to.
bool lacks_memory(const at::Tensor& tensor);
// What keeps a native step from reading the memory of the tensor; empty if nothing does.
std::string fault_of(const at::Tensor& tensor);
at::Tensor zeros_like(const TensorMetadata& metadata);

// Packs an id and metadata into saved data of an autograd node that compiled autograd understands.
c10::IValue pack(uint64_t id, const TensorMetadataList& metadata);
uint64_t unpack_id(const c10::IValue& packed);
TensorMetadataList unpack_metadata(const c10::IValue& packed);

// Converts the gradient of `what`, which host step `step` returned, to shape, dtype and device of
// its tensor: expanded dimensions are summed, the dtype is cast, a single number is moved to the
// device. Throws c10::Error for another shape or device, and for complex numbers if the tensor is
// real.
at::Tensor fitted(const std::string& step, const std::function<std::string()>& what,
                  at::Tensor gradient, const TensorMetadata& metadata, bool keep_dtype = false);

}  // namespace transformer_ops
