// Error texts that name the ops as a user wrote them, instead of the typed op of a fused step. This
// code runs only after a call has failed.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "executor/program.h"

namespace transformer_ops {

// Changes `[linear_epilogue] input must ...` of a line to `[Linear] input must ... (op 1 of the
// Sequential)`. The op is the one that the argument belongs to, or else all ops of the step. Other
// texts do not change.
std::string named_error(const Program& program, const Program::Line& line, bool is_forward,
                        const std::string& text);

// Throws an error of the same type with another text.
[[noreturn]] void rethrow_as(const c10::Error& error, const std::string& text);

// Renames the current exception in place, if it is one of the host language's.
using Rename = std::function<std::string(const std::string& text)>;
using RenameHostError = void (*)(const Rename& rename);
void set_rename_host_error(RenameHostError rename);
RenameHostError rename_host_error();

// The op names of a plan whose text this thread traces, because a graph has only the text.
void note_traced_names(std::string text, std::vector<OpName> names);

}  // namespace transformer_ops
