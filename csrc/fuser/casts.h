#pragma once

#include "fuser/analysis.h"
#include "fuser/plan.h"

namespace transformer_ops {

// Steps of native ops compute in the dtype that their ops require; a Linear among them decides.
// Other arguments are cast to it by separate instructions, into temporaries:
//   t1.input = cast(x1, "bfloat16")
// A slot then saves the main tensor after its cast, and a parameter before it.
void add_forward_casts(const Analysis& analysis, Step& step);
// Casts the parameters again, and the main tensor's gradient to the dtype of that tensor.
void add_backward_casts(const Analysis& analysis, Step& step);

// Replaces `from` by `to` in the arguments of all calls of a step. Returns whether there was any.
bool replace_argument(Step& step, const Value& from, const Value& to);

// to = cast(from, dtype)
Instruction make_cast(const Argument& from, DType dtype, const Value& to);

// The dtype to which a forward step casts its main tensor; none if it does not cast it.
std::optional<DType> input_cast(const Step& step);
// The step's main tensor as its ops read it, after a cast if there is one.
Value taken_input(const Step& step);

}  // namespace transformer_ops
