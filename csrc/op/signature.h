// What the frame of a typed op needs from its schema. It is parsed once; calls do not read the
// text.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <string>
#include <vector>

namespace transformer_ops {

class Signature {
 public:
  // `any_strides` names the tensor arguments that need not be contiguous; tensors that are written
  // to need not be, either. Raises if there is no tensor argument of such a name.
  Signature(const std::string& schema, const std::vector<std::string>& any_strides);

  // Raises if there is no required tensor argument of that name. `field` names the declaration's
  // field in the error.
  size_t index_of(const std::string& tensor, const char* field) const;

  // The first tensor argument. For a list, it is the list's first tensor.
  const at::Tensor& first_tensor(std::span<c10::IValue> values) const {
    const c10::IValue& value = values[first_];
    return value.isTensor() ? value.toTensor() : value.toListRef()[0].toTensor();
  }

  // Raises if a tensor is missing, has no memory or is on another device than the first, or if a
  // list of flags has another length than the schema says. `op` names the op in an error text.
  void check(const char* op, std::span<c10::IValue> values) const;

  void make_contiguous(std::span<c10::IValue> values) const;

 private:
  struct TensorArgument {
    size_t index;
    std::string name;
    bool optional;
  };
  struct ListArgument {
    size_t index;
    std::string name;
    size_t size;
  };

  void check_lists_are_full(const char* op, std::span<c10::IValue> values) const;
  void check_lists(const char* op, std::span<c10::IValue> values) const;
  // Makes every tensor of a list contiguous.
  static void make_contiguous(c10::IValue& value);

  std::string name_;
  std::vector<TensorArgument> tensors_;
  std::vector<ListArgument> lists_;  // lists of flags
  std::vector<TensorArgument> tensor_lists_;
  size_t first_ = 0;                // a required tensor, or a list
  std::vector<size_t> contiguous_;  // the indices of the tensors to make contiguous
};

}  // namespace transformer_ops
