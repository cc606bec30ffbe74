#include "executor/plan_function.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace transformer_ops {
namespace {
class EarlyRelease;
}
}  // namespace transformer_ops

// CppNode alone may touch what a context saves, and its release_variables() takes a lock that it
// holds while backward runs.
template <>
struct torch::autograd::CppNode<transformer_ops::EarlyRelease> {
  static void release_variables(AutogradContext& context) {
    context.saved_variables_.clear();
    context.has_freed_buffers_ = true;
  }
};

namespace transformer_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::string shape_key(size_t i) { return "shape" + std::to_string(i); }

void save_shapes(AutogradContext* context, const std::vector<int>& indices, const Tensors& values) {
  for (size_t i = 0; i < indices.size(); ++i) {
    context->saved_data[shape_key(i)] = values[indices[i]].sym_sizes().vec();
  }
}

Shapes load_shapes(AutogradContext* context, size_t count) {
  Shapes shapes;
  for (size_t i = 0; i < count; ++i) {
    shapes.push_back(context->saved_data[shape_key(i)].toSymIntVector());
  }
  return shapes;
}

}  // namespace

Tensors run_forward(const Program& program, at::TensorList tensors, Tensors& values) {
  values.resize(program.forward.values);
  for (size_t i = 0; i < tensors.size(); ++i) values[program.inputs[i]] = tensors[i];
  walk(program.forward, {}, values);
  Tensors outputs;
  outputs.reserve(program.outputs.size());
  for (const int index : program.outputs) {
    const Tensor& output = values[index];
    // Autograd needs a tensor of its own for each output.
    const bool repeated = std::ranges::any_of(outputs, [&](auto& o) { return o.is_same(output); });
    outputs.push_back(repeated ? at::alias(output) : output);
  }
  return outputs;
}

variable_list PlanFunction::forward(AutogradContext* context, const Program* program,
                                    at::TensorList tensors) {
  const BelowAutograd below_autograd;
  Tensors values;
  Tensors outputs = run_forward(*program, tensors, values);
  // Programs live as long as the process.
  context->saved_data["program"] = reinterpret_cast<int64_t>(program);
  save_shapes(context, program->shapes, values);
  variable_list saved;
  saved.reserve(program->saved.size());
  for (const int index : program->saved) saved.push_back(values[index]);
  context->save_for_backward(std::move(saved));
  return outputs;
}

variable_list PlanFunction::backward(AutogradContext* context, const variable_list& grads) {
  const auto* program = reinterpret_cast<const Program*>(context->saved_data["program"].toInt());
  Tensors saved = context->get_saved_variables();
  // What the engine does afterwards, done now: each saved tensor dies with its last reader.
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    torch::autograd::CppNode<EarlyRelease>::release_variables(*context);
  }
  variable_list result(1);  // the program has no gradient
  if (at::GradMode::is_enabled()) {
    std::ranges::move(double_backward(*program, saved, grads), std::back_inserter(result));
    return result;
  }
  const BelowAutograd below_autograd;
  Tensors values(program->backward.values);
  for (size_t i = 0; i < grads.size(); ++i) values[program->output_grads[i]] = grads[i];
  for (const auto& [position, index] : program->more_loads) values[index] = saved[position];
  for (size_t i = 0; i < saved.size(); ++i) values[program->loads[i]] = std::move(saved[i]);
  walk(program->backward, load_shapes(context, program->shapes.size()), values);
  for (const int index : program->input_grads) {
    result.push_back(index < 0 ? Tensor() : values[index]);
  }
  return result;
}

}  // namespace transformer_ops
