// The entry point for torch.compile, torch.export and C++ programs. Eager mode calls run()
// directly.
#include <torch/library.h>

#include "executor/run.h"

namespace transformer_ops {
namespace {

using at::Tensor;

// Joins the tensors in the order of the plan.
std::vector<Tensor> tensors_of(const Tensor& input, at::TensorList extra_inputs,
                               at::TensorList parameters) {
  std::vector<Tensor> tensors = {input};
  tensors.insert(tensors.end(), extra_inputs.begin(), extra_inputs.end());
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  return tensors;
}

// plan: its text. The op is composite, so that tracing records the typed ops.
std::vector<Tensor> run_plan(c10::string_view plan, const Tensor& input,
                             at::TensorList extra_inputs, at::TensorList parameters) {
  return run(program_for(plan), tensors_of(input, extra_inputs, parameters));
}

// The op in a graph of torch.compile: tracing it records one op for each pass, if it can.
std::vector<Tensor> run_plan_by_passes(c10::string_view plan, const Tensor& input,
                                       at::TensorList extra_inputs, at::TensorList parameters) {
  return run_recorded(plan, tensors_of(input, extra_inputs, parameters));
}

// Tracing this records only ops of torch, for exporters that know no others.
std::vector<Tensor> run_plan_unfused(c10::string_view plan, const Tensor& input,
                                     at::TensorList extra_inputs, at::TensorList parameters) {
  return run_decomposed(program_for(plan), tensors_of(input, extra_inputs, parameters),
                        "an export to ops of torch");
}

TORCH_LIBRARY_FRAGMENT(transformer_ops, library) {
  library.def(
      "run_plan(str plan, Tensor input, Tensor[] extra_inputs, Tensor[] parameters) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  library.impl("run_plan", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(run_plan));
  library.def(
      "run_plan.by_passes(str plan, Tensor input, Tensor[] extra_inputs, Tensor[] parameters) "
      "-> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  library.impl("run_plan.by_passes", c10::DispatchKey::CompositeImplicitAutograd,
               TORCH_FN(run_plan_by_passes));
  library.def(
      "run_plan_unfused(str plan, Tensor input, Tensor[] extra_inputs, Tensor[] parameters) "
      "-> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  library.impl("run_plan_unfused", c10::DispatchKey::CompositeImplicitAutograd,
               TORCH_FN(run_plan_unfused));
  // vmap looks this key up separately from the others.
  library.impl("run_plan", c10::DispatchKey::FuncTorchBatchedDecomposition, TORCH_FN(run_plan));
  library.impl("run_plan.by_passes", c10::DispatchKey::FuncTorchBatchedDecomposition,
               TORCH_FN(run_plan_by_passes));
}

}  // namespace
}  // namespace transformer_ops
