#include "executor/pass_ops.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>

#include "executor/plan_line.h"
#include "op/frame.h"
#include "op/torch_library.h"

namespace transformer_ops {
namespace {

constexpr const char* kForward = "transformer_ops::plan_forward";
constexpr const char* kBackward = "transformer_ops::plan_backward";
// The bytes of an input for which a call takes a part in a thousand of the block.
constexpr int64_t kMostBytes = int64_t{1} << 20;

void check_count(const char* op, const char* what, size_t wanted, size_t got) {
  TORCH_CHECK(wanted == got, "[", op, "] ", what, " must be ", wanted, " tensors, got ", got);
}

void check_results(const char* op, const Program::Code& code) {
  TORCH_CHECK(!code.results.empty(), "[", op, "] plan must have a pass that can run as one op, ",
              "got one that only run_plan can run");
}

Tensors take(const std::vector<int>& results, Frame& frame) {
  Tensors found;
  found.reserve(results.size());
  for (const int value : results) found.push_back(std::move(frame.values[value]));
  return found;
}

bool is_traced(const Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
}

bool may_record_passes(at::TensorList tensors) {
  if (std::ranges::none_of(tensors, is_traced)) return false;
  const auto numbers = tensors[0].sym_numel().maybe_as_int();
  if (numbers && *numbers * tensors[0].element_size() > kMostBytes) return false;
  // Activation checkpointing sees each op in a dispatch mode, and so do the modes of users.
  return !c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true);
}

bool draws(const Program::Code& code) {
  return std::ranges::any_of(code.lines, [](const Program::Line& line) {
    const auto* const call = std::get_if<Program::Call>(&line.what);
    return call != nullptr && call->typed != nullptr && call->typed->random;
  });
}

template <typename Signature>
auto find(const char* name, const Program::Code& code) {
  const char* const overload = draws(code) ? "random" : "";
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

void put(const std::vector<int>& results, Tensors found, Frame& frame) {
  for (size_t i = 0; i < results.size(); ++i) frame.values[results[i]] = std::move(found[i]);
}

Tensors values_at(const std::vector<int>& places, const Frame& frame) {
  Tensors values;
  values.reserve(places.size());
  for (const int place : places) values.push_back(frame.values[place]);
  return values;
}

template <typename Function>
void add(torch::Library& library, const std::string& name, const std::string& schema,
         Function* function) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> random_tags = {at::Tag::pt2_compliant_tag,
                                            at::Tag::nondeterministic_seeded};
  for (const bool is_random : {false, true}) {
    const std::string full = name + (is_random ? ".random" : "");
    library.def((full + schema).c_str(), is_random ? random_tags : tags);
    library.impl(full.c_str(), c10::DispatchKey::CompositeExplicitAutograd, function);
    for (const c10::DispatchKey key : autograd_keys()) {
      library.impl(
          full.c_str(),
          torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<refuse_gradients>()));
    }
  }
}

TORCH_LIBRARY_FRAGMENT(transformer_ops, library) {
  add(library, "plan_forward", "(str plan, Tensor[] tensors) -> Tensor[] results", &plan_forward);
  add(library, "plan_backward", "(str plan, Tensor[] grads, Tensor[] saved) -> Tensor[] results",
      &plan_backward);
}

}  // namespace

Tensors plan_forward(std::string_view plan, at::TensorList tensors) {
  const SharedProgram program = program_for(plan);
  check_results("plan_forward", program->forward);
  check_count("plan_forward", "tensors", program->inputs.size(), tensors.size());
  const BelowAutograd below_autograd;
  Frame frame{.caches_weights = false};
  frame.values.resize(program->forward.values);
  frame.metadata.resize(program->metadata);
  for (size_t i = 0; i < tensors.size(); ++i) frame.values[program->inputs[i]] = tensors[i];
  interpret(*program, program->forward, frame);
  return take(program->forward.results, frame);
}

Tensors plan_backward(std::string_view plan, at::TensorList grads, at::TensorList saved) {
  const SharedProgram program = program_for(plan);
  check_results("plan_backward", program->backward);
  check_count("plan_backward", "grads", program->output_grads.size(), grads.size());
  check_count("plan_backward", "saved", program->loads.size(), saved.size());
  const BelowAutograd below_autograd;
  Frame frame{.caches_weights = false};
  frame.values.resize(program->backward.values);
  for (size_t i = 0; i < grads.size(); ++i) frame.values[program->output_grads[i]] = grads[i];
  for (size_t i = 0; i < saved.size(); ++i) frame.values[program->loads[i]] = saved[i];
  for (const auto& [position, value] : program->more_loads) frame.values[value] = saved[position];
  interpret(*program, program->backward, frame);
  return take(program->backward.results, frame);
}

std::string recorded_text(std::string_view plan, at::TensorList tensors) {
  return may_record_passes(tensors) ? to_line(plan).value_or("") : "";
}

bool record_forward(std::string_view line, const Program& program, at::TensorList tensors,
                    Frame& frame) {
  const Program::Code& code = program.forward;
  if (code.results.empty()) return false;
  put(code.results,
      find<Tensors(c10::string_view, at::TensorList)>(kForward, code).call(line, tensors), frame);
  for (const Program::Line& each : code.lines) {
    const auto* const take = std::get_if<Program::TakeMetadata>(&each.what);
    if (take != nullptr) frame.metadata[take->metadata] = metadata_of(frame.values[take->value]);
  }
  return true;
}

bool record_backward(std::string_view line, const Program& program, Frame& frame) {
  const Program::Code& code = program.backward;
  if (code.results.empty() || frame.is_partial) return false;
  put(code.results,
      find<Tensors(c10::string_view, at::TensorList, at::TensorList)>(kBackward, code)
          .call(line, values_at(program.output_grads, frame), values_at(program.loads, frame)),
      frame);
  return true;
}

}  // namespace transformer_ops
