#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <functional>
#include <optional>
#include <vector>

namespace transformer_ops {

// What a tensor looks like: all that zeros in its place, or a check of its gradient, need.
struct Look {
  c10::SymDimVector sizes;
  at::ScalarType dtype;
  at::Device device;
};
// None for a tensor that was never made.
using Looks = std::vector<std::optional<Look>>;

std::optional<Look> look_of(const at::Tensor& tensor);
at::Tensor zeros_like(const Look& look);

// An id and looks, for an autograd node, whose saved data compiled autograd has to understand.
c10::IValue pack(uint64_t id, const Looks& looks);
uint64_t unpack_id(const c10::IValue& packed);
Looks unpack_looks(const c10::IValue& packed);

// The gradient of `what`, which host step `step` returned, in shape and dtype of its tensor: a
// shape that the tensor expands to is summed, a dtype cast, a single number moved to its device.
// Throws c10::Error for another shape or device, and for complex numbers where the tensor is real.
at::Tensor fitted(const std::string& step, const std::function<std::string()>& what,
                  at::Tensor gradient, const Look& look, bool keep_dtype = false);

}  // namespace transformer_ops
