// transformer_ops::run_call(str call, Tensor[] tensors) -> Tensor[]: a call of an op that torch has
// no schema of, because it is a form of another one that plans alone need:
//   run_call('rms_norm.rounded(%, %, 1e-05, false, "mx e4m3", "")', [x, weight])
// A tensor is "%", and a list of two "[%, %]"; constants are written as in the text of a plan. The
// results are one list, those of lists one after another.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>

#include <optional>
#include <string>

namespace transformer_ops {

inline constexpr const char* kRunCall = "transformer_ops::run_call";

// Which op of torch runs the calls of a plan that name `target`, and what it takes there.
struct Callee {
  c10::OperatorHandle op;
  const c10::FunctionSchema* schema;  // that of the target, which lives as long as the process
  bool by_text;                       // the op is run_call
};
// None where there is no op of that name.
std::optional<Callee> find_callee(const std::string& target);

// Has run_call serve tensors of another device type, too, by the CUDA bodies.
void add_run_call(c10::DispatchKey key);

}  // namespace transformer_ops
