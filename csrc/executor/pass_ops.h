// The passes of a plan as two ops, for compiled code, which calls each op of its graph from Python:
//   plan_forward(str plan, Tensor[] tensors) -> Tensor[] results
//   plan_backward(str plan, Tensor[] grads, Tensor[] saved) -> Tensor[] results
// `tensors` are those of the plan in its order, and `saved` are those that forward saves. The
// results are Program::Code::results of the pass: what its caller does not have yet. Both ops exist
// as `.random` too, for passes that draw random numbers.
#pragma once

#include <string>
#include <string_view>

#include "executor/interpreter.h"

namespace transformer_ops {

Tensors plan_forward(std::string_view plan, at::TensorList tensors);
Tensors plan_backward(std::string_view plan, at::TensorList grads, at::TensorList saved);

// The text with which a call records one op for each pass: the plan in one line. It is empty if the
// call records the typed ops, or runs them:
// - it is no trace;
// - a dispatch mode chooses for each op, as in activation checkpointing, what is recomputed;
// - the input is known to be larger than 1 MiB. The calls then take no time, and a graph of typed
//   ops releases saved tensors one by one.
std::string recorded_text(std::string_view plan, at::TensorList tensors);

// Calls plan_forward or plan_backward where the lines of the pass would run. The frame has the
// values that the pass is given. Returns false, and does nothing, if the pass cannot be one op.
bool record_forward(std::string_view line, const Program& program, at::TensorList tensors,
                    Frame& frame);
bool record_backward(std::string_view line, const Program& program, Frame& frame);

}  // namespace transformer_ops
