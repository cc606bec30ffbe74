#include "executor/plan_function.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/zeros.h>
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

// What the gradients of several outputs look like, in one list: dtype, number of sizes, sizes.
void save_outputs(AutogradContext* context, const Tensors& outputs) {
  std::vector<c10::SymInt> saved;
  for (const Tensor& output : outputs) {
    const auto sizes = output.sym_sizes();
    saved.emplace_back(static_cast<int64_t>(output.scalar_type()));
    saved.emplace_back(static_cast<int64_t>(sizes.size()));
    saved.insert(saved.end(), sizes.begin(), sizes.end());
  }
  context->saved_data["outputs"] = std::move(saved);
}

// Puts zeros in place of the gradients of outputs that no loss uses; one at least is used.
variable_list with_zeros(AutogradContext* context, variable_list grads) {
  const auto used = std::ranges::find_if(grads, [](const Tensor& grad) { return grad.defined(); });
  const at::TensorOptions options = used->options();
  const auto saved = context->saved_data["outputs"].toSymIntVector();
  auto next = saved.begin();
  for (Tensor& grad : grads) {
    const auto dtype = static_cast<at::ScalarType>((next++)->expect_int());
    const int64_t count = (next++)->expect_int();
    const std::vector<c10::SymInt> sizes(next, next + count);
    if (!grad.defined()) grad = at::zeros_symint(sizes, options.dtype(dtype));
    next += count;
  }
  return grads;
}

// A leaf takes a gradient that nobody else holds as its own, and adds to it in place; it does not
// see that other gradients share the memory of a view.
void unshare(Tensor& grad) {
  if (!grad.defined() || !grad.has_storage()) return;
  // Of a trace's tensors the count says nothing.
  const bool is_traced = grad.key_set().has(c10::DispatchKey::Python);
  if (!is_traced && grad.storage().use_count() > 1) grad = grad.clone();
}

// The gradients that depend on the gradient of an output that a loss uses: plain autograd gives
// none for the others.
std::vector<bool> reached_by(const Program& program, const variable_list& grads) {
  std::vector<bool> reached(program.backward.values);
  for (size_t i = 0; i < grads.size(); ++i) reached[program.output_grads[i]] = grads[i].defined();
  for (const auto& line : program.backward.lines) {
    if (const auto* call = std::get_if<Program::Call>(&line.what)) {
      for (size_t i = 0; i < call->results.size(); ++i) {
        reached[call->results[i]] = std::ranges::any_of(call->gradients, [&](const auto& gradient) {
          return reached[gradient.value] && gradient.op >= call->result_ops[i];
        });
      }
    } else if (const auto* cast = std::get_if<Program::Cast>(&line.what)) {
      reached[cast->to] = reached[cast->from];
    } else {
      const auto& copy = std::get<Program::Copy>(line.what);
      reached[copy.to] = reached[copy.to] || reached[copy.from];
    }
  }
  return reached;
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

variable_list PlanFunction::forward(AutogradContext* context, const SharedProgram& program,
                                    Tensors* constants, at::TensorList tensors) {
  const BelowAutograd below_autograd;
  Tensors values;
  Tensors outputs = run_forward(*program, tensors, values);
  context->saved_data["program"] = program.owner();
  context->saved_data["id"] = static_cast<int64_t>(program->id);
  save_shapes(context, program->shapes, values);
  const auto first = outputs.begin() + 1, last = first + program->constants;
  constants->assign(std::make_move_iterator(first), std::make_move_iterator(last));
  outputs.erase(first, last);
  for (const Tensor& output : outputs) {
    TORCH_CHECK(at::isFloatingType(output.scalar_type()),
                "[run_plan] outputs must be floating where a gradient is wanted, got ",
                output.scalar_type());
  }
  if (outputs.size() > 1) {
    context->set_materialize_grads(false);
    save_outputs(context, outputs);
  }
  variable_list saved;
  saved.reserve(program->saved.size());
  for (const int index : program->saved) saved.push_back(values[index]);
  context->save_for_backward(std::move(saved));
  return outputs;
}

variable_list PlanFunction::backward(AutogradContext* context, const variable_list& grads) {
  const auto program = SharedProgram::from(context->saved_data["program"].toTensor(),
                                           context->saved_data["id"].toInt());
  Tensors saved = context->get_saved_variables();
  // What the engine does afterwards, done now: each saved tensor dies with its last reader.
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    torch::autograd::CppNode<EarlyRelease>::release_variables(*context);
  }
  variable_list result(2);  // for the program and the constants
  if (std::ranges::none_of(grads, [](const Tensor& grad) { return grad.defined(); })) {
    result.resize(2 + program->inputs.size());
    return result;
  }
  if (at::GradMode::is_enabled()) {
    std::ranges::move(double_backward(*program, saved, grads), std::back_inserter(result));
    return result;
  }
  const BelowAutograd below_autograd;
  const Shapes shapes = load_shapes(context, program->shapes.size());
  Tensors values(program->backward.values);
  const bool all = std::ranges::all_of(grads, [](const Tensor& grad) { return grad.defined(); });
  const variable_list filled = all ? variable_list() : with_zeros(context, grads);
  const variable_list& given = all ? grads : filled;
  for (size_t i = 0; i < given.size(); ++i) values[program->output_grads[i]] = given[i];
  for (const auto& [position, index] : program->more_loads) values[index] = saved[position];
  for (size_t i = 0; i < saved.size(); ++i) values[program->loads[i]] = std::move(saved[i]);
  walk(program->backward, shapes, values);
  const std::vector<bool> reached = all ? std::vector<bool>() : reached_by(*program, grads);
  for (size_t i = 0; i < program->input_grads.size(); ++i) {
    const int index = program->input_grads[i];
    const bool yields = index >= 0 && (all || reached[index]);
    result.push_back(yields ? values[index] : Tensor());
    if (yields && program->views[i]) unshare(result.back());
  }
  return result;
}

}  // namespace transformer_ops
