// What the frame of a typed op needs of its schema, read once: a call does not look at the text.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <string>
#include <vector>

namespace transformer_ops {

class Signature {
 public:
  // `any_strides`: the tensor arguments that bodies take as they are. Raises where there is none of
  // such a name. Tensors that are written to are taken as they are, too.
  Signature(const std::string& schema, const std::vector<std::string>& any_strides);

  // Raises where no tensor argument of that name is required. `field` of a declaration names it.
  size_t index_of(const std::string& tensor, const char* field) const;

  // Of a list, its first.
  const at::Tensor& first_tensor(std::span<c10::IValue> values) const {
    const c10::IValue& value = values[first_];
    return value.isTensor() ? value.toTensor() : value.toListRef()[0].toTensor();
  }

  // Raises where a tensor is missing, has no memory or is on another device than the first, and
  // where a list of flags has another length than the schema says. `op` names the op in an error
  // text.
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
  // Of a list.
  static void make_contiguous(c10::IValue& value);

  std::string name_;
  std::vector<TensorArgument> tensors_;
  std::vector<ListArgument> lists_;  // of flags
  std::vector<TensorArgument> tensor_lists_;
  size_t first_ = 0;                // a tensor that has to be there, or a list
  std::vector<size_t> contiguous_;  // indices of tensors
};

}  // namespace transformer_ops
