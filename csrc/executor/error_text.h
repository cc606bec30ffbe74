// Error texts that name the ops as a user wrote them, in place of the typed op of a fused step. All
// of this runs where a call has failed.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "executor/program.h"

namespace transformer_ops {

// `[linear_epilogue] input must ...` of a line becomes `[Linear] input must ... (op 1 of the
// Sequential)`. The op is the one that the argument belongs to, or else all ops of the step are
// named. Any other text stays as it is.
std::string named_error(const Program& program, const Program::Line& line, bool is_forward,
                        const std::string& text);

// The same error, of the same type, with another text.
[[noreturn]] void rethrow_as(const c10::Error& error, const std::string& text);

// Renames the exception that is being handled, where it is one of the host language's, in place.
using Rename = std::function<std::string(const std::string& text)>;
using RenameHostError = void (*)(const Rename& rename);
void set_rename_host_error(RenameHostError rename);
RenameHostError rename_host_error();

// The names of the ops of a plan whose text this thread traces: a graph has the text alone.
void note_traced_names(std::string text, std::vector<OpName> names);

}  // namespace transformer_ops
