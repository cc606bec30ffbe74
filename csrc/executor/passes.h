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

// Records what each pass returns if it runs as one op, which it can if
// - it has more than one call: a single call is an op already;
// - each result is made by a typed op: others may be an alias of an argument, and a cast is not
//   saved where the tensor itself is;
// - it updates no state, and has no host steps;
// - backward needs no metadata but that of results and inputs of forward.
void note_results(Program& program);

}  // namespace transformer_ops
