#include "executor/run.h"

#include <c10/core/InferenceMode.h>
#include <algorithm>

#include "executor/backward_pass.h"
#include "executor/pass_ops.h"
#include "executor/plan_function.h"
#include "executor/preflight.h"

namespace transformer_ops {
namespace {

std::string states_text(const Plan& plan) {
  const size_t count = plan.states.size();
  return count == 0 ? "" : " and " + std::to_string(count) + " states";
}

void check_count(const Program& program, at::TensorList tensors) {
  TORCH_CHECK(tensors.size() == program.inputs.size(), "[run_plan] tensors must be 1 input, ",
              program.plan.extra_inputs.size(), " extra inputs and ",
              program.plan.parameters.size(), " parameters", states_text(program.plan), ", got ",
              tensors.size(), " in all");
}

bool under_functorch() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool requires_gradient(at::TensorList tensors) {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         std::ranges::any_of(tensors, [](const Tensor& tensor) { return tensor.requires_grad(); });
}

// Does backward return a gradient for every tensor that requires one?
bool serves(const Program& program, at::TensorList tensors) {
  if (!program.plan.needs_backward()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad() && program.input_grads[i] < 0) return false;
  }
  return true;
}

// Weights whose gradients are computed later become leaves of their own. Otherwise autograd would
// call the hooks of the parameters without a gradient.
Tensors with_own_leaves(const Program& program, at::TensorList tensors) {
  Tensors own = tensors.vec();
  for (const int position : program.delayed) {
    const bool requires_grad = own[position].requires_grad();
    own[position] = own[position].detach().set_requires_grad(requires_grad);
  }
  return own;
}

// The outputs of the node, with the outputs that need no gradient inserted at their positions.
Tensors apply(const SharedProgram& program, const SharedHostCall& host, at::TensorList tensors,
              std::string_view recorded = {}) {
  Tensors constants;
  const PlanCall call{program, host, tensors, constants, recorded};
  Tensors outputs = host ? HostPlanFunction::apply(call, call.inputs())
                         : PlanFunction::apply(call, call.inputs());
  outputs.insert(outputs.begin() + 1, std::make_move_iterator(constants.begin()),
                 std::make_move_iterator(constants.end()));
  return outputs;
}

Tensors run_differentiable(const SharedProgram& program, const SharedHostCall& host,
                           at::TensorList tensors) {
  if (!host || program->delayed.empty()) return apply(program, host, tensors);
  return apply(program, host, with_own_leaves(*program, tensors));
}

// The names of the steps that only the host language can run.
std::string host_steps(const Plan& plan) {
  std::vector<std::string> names;
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const Step& step : *steps) {
      const bool is_new = std::ranges::find(names, step.name) == names.end();
      if (step.python && !step.skipped && is_new) names.push_back(step.name);
    }
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

void refuse_host_steps(const Program& program, const char* what) {
  TORCH_CHECK(!program.has_host_steps, "[Sequential] ", what, ", got the Python steps ",
              host_steps(program.plan));
}

void refuse_saved_codes(const Program& program, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(!program.plan.saved.is_exact() || !program.plan.saves_codes(),
                              "[Sequential] ", what,
                              " must run without cache_quantized_input, got an op that has it set");
  const SavedFormat format = program.plan.saved.format;
  TORCH_CHECK_NOT_IMPLEMENTED(format == SavedFormat::Exact, "[Sequential] ", what,
                              " must run with saved=\"exact\", got saved=\"", to_text(format),
                              "\"");
  const Recipe* const recipe = program.plan.recipe;
  TORCH_CHECK_NOT_IMPLEMENTED(recipe == nullptr, "[Sequential] ", what,
                              " must run without a recipe, got the formats ",
                              recipe == nullptr ? "" : to_text(*recipe));
  TORCH_CHECK_NOT_IMPLEMENTED(!program.plan.has_quantized_parameters(), "[Sequential] ", what,
                              " must run over plain parameters, got quantized ones");
}

Tensors run_decomposed(const SharedProgram& fused, at::TensorList tensors, const char* what) {
  check_count(*fused, tensors);
  refuse_host_steps(*fused, (std::string(what) + " must run over native ops only").c_str());
  refuse_saved_codes(*fused, what);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const SharedProgram program = unfused_program_for(*fused, tensors);
  Frame frame{.is_decomposed = true};
  return run_forward(*program, tensors, frame);
}

Tensors run_recorded(std::string_view text, at::TensorList tensors) {
  const SharedProgram program = program_for(text);
  check_count(*program, tensors);
  const bool is_plain = !under_functorch() && std::ranges::none_of(tensors, has_tangent);
  const std::string line = is_plain && !program->only_views ? recorded_text(text, tensors) : "";
  if (line.empty()) return run(program, tensors);
  if (requires_gradient(tensors)) {
    return serves(*program, tensors) ? apply(program, {}, tensors, line) : run(program, tensors);
  }
  Frame frame;
  const BelowAutograd below_autograd;
  // A plan with a backward would return what it saves, too.
  return run_forward(*program, tensors, frame, program->saved.empty() ? line : "");
}

Tensors run(const SharedProgram& shared, at::TensorList tensors, const SharedHostCall& host) {
  const Program& program = *shared;
  check_count(program, tensors);
  current_backward_pass();
  if (under_functorch() || std::ranges::any_of(tensors, has_tangent)) {
    return run_decomposed(shared, tensors, "torch.func transforms");
  }
  if (!host) refuse_host_steps(program, "steps must be native to run without a host");
  if (program.random && !program.has_host_steps) preflight(program, tensors);
  Frame frame{.host = host ? &*host : nullptr};
  // A view is left to torch's autograd, which also handles in-place modifications.
  if (program.only_views) return run_forward(program, tensors, frame);
  if (requires_gradient(tensors)) {
    if (serves(program, tensors)) return run_differentiable(shared, host, tensors);
    refuse_host_steps(program, "flags of the call must be those of its plan");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !program.plan.has_quantized_parameters(),
        "[run_plan] tensors that require gradients must be those that the plan of quantized ",
        "parameters was made for, got others");
    // The plan was made for other flags, as in an exported program.
    return run_differentiable(unfused_program_for(program, tensors), host, tensors);
  }
  const BelowAutograd below_autograd;
  return run_forward(program, tensors, frame);
}

}  // namespace transformer_ops
