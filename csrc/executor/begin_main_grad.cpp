// Compiled code calls this op before it adds to a main_grad that is overwritten: only at run time
// is it known whether the gradient is the first one of the pass.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zero.h>
#include <torch/library.h>

#include "executor/backward_pass.h"
#include "executor/main_grad_passes.h"

namespace transformer_ops {
namespace {

using at::Tensor;

void begin(const Tensor& main_grad, int64_t number) {
  const uint64_t pass = current_backward_pass();
  if (pass > 0 && last_pass_of(number) == pass) return;
  main_grad.zero_();
  note_pass_of(number, pass);
}

void begin_meta(const Tensor&, int64_t) {}

TORCH_LIBRARY_FRAGMENT(transformer_ops, library) {
  library.def("begin_main_grad_(Tensor(a!) main_grad, int number) -> ()",
              {at::Tag::pt2_compliant_tag});
  library.impl("begin_main_grad_", c10::DispatchKey::CPU, TORCH_FN(begin));
  library.impl("begin_main_grad_", c10::DispatchKey::CUDA, TORCH_FN(begin));
  library.impl("begin_main_grad_", c10::DispatchKey::Meta, TORCH_FN(begin_meta));
}

}  // namespace
}  // namespace transformer_ops
