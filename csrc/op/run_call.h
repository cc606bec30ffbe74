// transformer_ops::run_call(str call, Tensor[] tensors) -> Tensor[] calls an op that has no schema
// in torch, because only plans call it. Ops that draw random numbers are called by run_call.random,
// which has torch's tag for them:
//   run_call('rms_norm.rounded(%, %, 1e-05, false, "mx e4m3", "")', [x, weight])
// A tensor is "%", and a list of two is "[%, %]". Constants are written as in the text of a plan.
// The results are one list, with those of lists one after another.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>

#include <optional>
#include <string>

namespace transformer_ops {

inline constexpr const char* kRunCall = "transformer_ops::run_call";

// The torch op that runs a plan's calls of `target`, and the schema of those calls.
struct Callee {
  c10::OperatorHandle op;
  const c10::FunctionSchema* schema;  // the schema of the target, which lives as long as the
                                      // process
  bool by_text;                       // the op is run_call
};
// Returns none if there is no op of that name.
std::optional<Callee> find_callee(const std::string& target);

// Registers run_call for another device type, too; it uses the CUDA kernel wrappers.
void add_run_call(c10::DispatchKey key);

}  // namespace transformer_ops
