#pragma once

#include "fuser/analysis.h"
#include "fuser/plan.h"

namespace transformer_ops {

// Steps of native ops compute in the dtype that their ops insist on, a Linear anywhere among them
// first of all. What else they take is cast to it by instructions of their own, into temporaries:
//   t1.input = cast(x1, "bfloat16")
// A slot then holds the main tensor as it was cast, and a parameter as it was.
void add_forward_casts(const Analysis& analysis, Step& step);
// Parameters again; and the gradient of the main tensor to the dtype of that tensor.
void add_backward_casts(const Analysis& analysis, Step& step);

// Reads `to` instead of `from` in all calls of a step. Was there any?
bool replace_argument(Step& step, const Value& from, const Value& to);

// to = cast(from, dtype)
Instruction make_cast(const Argument& from, DType dtype, const Value& to);

// The dtype to which a forward step casts its main tensor; none where it takes it as it is.
std::optional<DType> input_cast(const Step& step);
// Its main tensor as the ops of a forward step take it.
Value taken_input(const Step& step);

}  // namespace transformer_ops
