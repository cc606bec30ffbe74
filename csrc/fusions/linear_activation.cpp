// backward:  g ─► BasicLinear' ─► activation' ─► g
//             └─► grad_weight ◄─ y, computed again in the same pass
#include "ops/linear_activation.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_activation",
             .pass = Pass::Backward,
             .benefit = 30,
             .pattern = {activations_that_keep_input(), {"BasicLinear"}},
             .why_not = [](const Match& match) { return why_not_recomputed(match, 0); },
             .bind = [](const Match& match) { return bind_linear_activation(match, 0); }},
    .backward = {.schema = std::string("linear_activation_backward(") + kLinearActivationArguments +
                           ") -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = linear_activation_outputs,
                 .overwrites = {1},
                 .cpu = linear_activation_cpu,
                 .cuda = linear_activation_cuda,
                 .unfused = linear_activation_unfused,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
