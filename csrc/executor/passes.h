// What the lines of a program know of those behind them.
#pragma once

#include <initializer_list>

#include "executor/program.h"

namespace transformer_ops {

// Marks the lines of backward that give nothing but gradients which all their readers can replace
// by zeros.
void mark_skippable(Program::Code& code);

// Notes behind each line the values that nobody reads any more, but for those in `kept`.
void mark_dead(Program::Code& code, std::initializer_list<const std::vector<int>*> kept);

// Notes which gradients of inputs may be views of what backward was given, and whether the program
// gives nothing but a view of its input.
void note_views(Program& program);

}  // namespace transformer_ops
