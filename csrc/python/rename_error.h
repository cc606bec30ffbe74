// Renames errors that pass through Python: in a trace, Python runs the typed ops of a plan.
#pragma once

#include "executor/error_text.h"

namespace transformer_ops::python {

// Changes the message of the current Python exception in place.
void rename_python_error(const Rename& rename);

}  // namespace transformer_ops::python
