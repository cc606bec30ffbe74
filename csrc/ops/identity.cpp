// Identity: passes its input through, and the gradient back.
#include "op/op.h"

namespace transformer_ops::ops::identity {
namespace {

[[maybe_unused]] const bool registered =
    register_op({.declaration = {.kind = "Identity", .summary = "x"}});

}  // namespace
}  // namespace transformer_ops::ops::identity
