// Analyses of what later lines of a program do.
#pragma once

#include <initializer_list>

#include "executor/program.h"

namespace transformer_ops {

// Marks the lines of backward whose results are only gradients that all readers can replace by
// zeros.
void mark_skippable(Program::Code& code);

// Records for each line the values that no later line reads, except for those in `kept`.
void mark_dead(Program::Code& code, std::initializer_list<const std::vector<int>*> kept);

// Records which input gradients may be views of gradients that backward was given, and whether the
// program only returns a view of its input.
void note_views(Program& program);

}  // namespace transformer_ops
