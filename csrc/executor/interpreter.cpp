#include "executor/interpreter.h"

#include <algorithm>

#include "executor/deferred_call.h"
#include "executor/error_text.h"
#include "executor/host_results.h"
#include "op/decomposition.h"
#include "op/dtype.h"

namespace transformer_ops {
namespace {

using Result = Program::HostBackward::Result;

// The error of a torch op does not say in which op of the plan it failed.
std::string text_of(const Program::Line& line, const std::string& text) {
  const auto* const call = std::get_if<Program::Call>(&line.what);
  if (call == nullptr || call->typed != nullptr || text.starts_with("[")) return text;
  const std::string name = call->schema->name();
  return "[" + name.substr(name.find("::") + 2) + "] " + text;
}

bool takes_real_numbers(at::ScalarType dtype) {
  return at::isFloatingType(dtype) || at::isComplexType(dtype);
}

class Interpreter {
 public:
  Interpreter(const Program& program, const Program::Code& code, Frame& frame)
      : program_(program), code_(code), frame_(frame), values_(frame.values) {
    stack_.reserve(12);
  }

  void run(const Program::Line& line) {
    try {
      std::visit(*this, line.what);
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      const std::string named = name(line, text_of(line, text));
      if (named == text) throw;
      rethrow_as(error, named);
    } catch (...) {
      // In a trace, a typed op may run in the host language.
      const bool is_call = std::holds_alternative<Program::Call>(line.what);
      if (const RenameHostError rename = rename_host_error(); is_call && rename != nullptr) {
        rename([&](const std::string& text) { return name(line, text_of(line, text)); });
      }
      throw;
    }
    for (const int value : line.dead) values_[value].reset();
  }

  void operator()(const Program::Call& call) {
    if (frame_.is_partial) {
      run_partly_used(call);
    } else {
      run_call(call);
    }
  }

  void operator()(const Program::Cast& cast) {
    if (!values_[cast.from].defined()) return;
    values_[cast.to] = cast_floating(cast.step.c_str(), values_[cast.from], cast.dtype);
    if (frame_.is_partial) frame_.reached[cast.to] = frame_.reached[cast.from];
  }

  void operator()(const Program::Copy& copy) {
    if (!values_[copy.from].defined()) return;
    Tensor& to = values_[copy.to];
    to = to.defined() ? to + values_[copy.from] : values_[copy.from];
    if (frame_.is_partial && frame_.reached[copy.from]) frame_.reached[copy.to] = true;
  }

  void operator()(const Program::Record& record) {
    const Tensor& found = values_[record.found];
    if (!found.defined()) return;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("transformer_ops::record_amax_", "")
                               .typed<void(const Tensor&, const Tensor&, int64_t)>();
    op.call(values_[record.state], found, record.place);
  }

  void operator()(const Program::TakeMetadata& take) {
    frame_.metadata[take.metadata] = metadata_of(values_[take.value]);
  }

  void operator()(const Program::FitDtype& fit) {
    Tensor& gradient = values_[fit.value];
    const auto& metadata = frame_.metadata[fit.metadata];
    if (gradient.defined() && metadata) gradient = gradient.to(metadata->dtype);
  }

  void operator()(const Program::HostForward& call) {
    Tensors arguments;
    arguments.reserve(call.arguments.size());
    for (const int value : call.arguments) {
      arguments.push_back(value < 0 ? Tensor() : values_[value]);
    }
    const std::vector<at::ScalarType> dtypes = dtypes_of(call);
    Tensors results;
    {
      const c10::impl::ForceDispatchKeyGuard as_called(frame_.callers);
      results = frame_.host->forward(call.step, dtypes, arguments);
    }
    Tensors parameters;
    parameters.reserve(call.parameters.size());
    for (const int value : call.parameters) {
      parameters.push_back(value < 0 ? Tensor() : values_[value]);
    }
    check_results(program_.plan, call, arguments, parameters, *frame_.host, results);
    for (size_t i = 0; i < call.results.size(); ++i) values_[call.results[i]] = results[i];
  }

  void operator()(const Program::HostBackward& call) {
    HostCall::BackwardArguments arguments;
    std::vector<Program::Gradient> reached;
    for (const auto& gradient : call.gradients) {
      if (is_reached(gradient.value)) reached.push_back(gradient);
    }
    if (call.skippable && reached.empty()) return;
    for (const auto& gradient : call.gradients) {
      arguments.grads.push_back(gradient_or_zeros(gradient));
    }
    for (const auto& saved : call.saved) add_saved(saved, arguments);
    arguments.own = frame_.own.back();
    Tensors results;
    {
      const c10::impl::ForceDispatchKeyGuard as_called(frame_.callers);
      results = frame_.host->backward(call.step, arguments);
    }
    check_count(call.name, call.results.size(), results);
    for (size_t i = 0; i < call.results.size(); ++i) {
      const Result& result = call.results[i];
      if (result.value < 0) continue;
      const bool depends = std::ranges::any_of(
          reached, [&](const auto& gradient) { return gradient.op >= result.op; });
      put(call, result, std::move(results[i]), depends);
    }
  }

 private:
  std::string name(const Program::Line& line, const std::string& text) const {
    return named_error(program_, line, /*is_forward=*/&code_ == &program_.forward, text);
  }

  void run_call(const Program::Call& call) {
    const bool may_cache = call.weight_cache_key && frame_.caches_weights;
    WeightCache* const made = may_cache ? WeightCache::current() : nullptr;
    const auto may_keep = [&](const WeightCache::Call::Weight& weight) {
      return WeightCache::may_keep(values_[weight.value]);
    };
    if (made != nullptr && std::ranges::all_of(call.weight_cache_key->weights, may_keep)) {
      run_once(call, *made);
    } else {
      run_now(call);
    }
  }

  void run_once(const Program::Call& call, WeightCache& made) {
    const WeightCache::Call& once = *call.weight_cache_key;
    Tensors weights, states, results;
    for (const auto& weight : once.weights) weights.push_back(values_[weight.value]);
    for (const int state : once.states) states.push_back(values_[state]);
    if (const Tensors* const known = made.find(once, weights, states, call.results.size())) {
      for (size_t i = 0; i < call.results.size(); ++i) values_[call.results[i]] = (*known)[i];
      return;
    }
    run_now(call);
    for (const int result : call.results) results.push_back(values_[result]);
    made.add(once, weights, states, std::move(results));
  }

  void run_now(const Program::Call& call) {
    load(call);
    if (call.accumulates && frame_.host != nullptr) {
      accumulate(call);
    } else {
      run_op(call);
    }
  }

  void run_op(const Program::Call& call) {
    if (frame_.is_decomposed && call.typed != nullptr) {
      Tensors results = call_decomposition(call.name, stack_);
      // Results that only backward uses may be omitted.
      results.resize(call.results.size());
      for (size_t i = 0; i < results.size(); ++i) values_[call.results[i]] = std::move(results[i]);
      return;
    }
    call.op.callBoxed(stack_);
    if (!call.text.isNone()) return take_list_of_results(call);
    take_results(call);
  }

  // run_call returns one list.
  void take_list_of_results(const Program::Call& call) {
    const auto results = std::move(stack_[0]).toTensorList();
    TORCH_CHECK(results.size() == call.results.size(), "[", call.name, "] results must be ",
                call.results.size(), ", as the plan says, got ", results.size());
    for (size_t i = 0; i < call.results.size(); ++i) {
      values_[call.results[i]] = results.extract(i);
    }
  }

  void take_results(const Program::Call& call) {
    if (!call.counts.empty()) return take_lists(call);
    for (size_t i = 0; i < call.results.size(); ++i) {
      values_[call.results[i]] = std::move(stack_[i]).toTensor();
    }
  }

  void take_lists(const Program::Call& call) {
    auto next = call.results.begin();
    for (size_t i = 0; i < call.counts.size(); ++i) {
      if (call.counts[i] < 0) {
        values_[*next++] = std::move(stack_[i]).toTensor();
        continue;
      }
      const auto list = stack_[i].toListRef();
      TORCH_CHECK(list.size() == static_cast<size_t>(call.counts[i]), "[", call.name, "] ",
                  call.schema->returns()[i].name(), " must have ", call.counts[i],
                  " tensors, as the plan says, got ", list.size());
      for (const c10::IValue& item : list) values_[*next++] = item.toTensor();
    }
  }

  void load(const Program::Call& call) {
    stack_.clear();
    if (!call.text.isNone() && !frame_.is_decomposed) return load_tensors(call);
    for (const auto& operand : call.operands) {
      if (const auto* load = std::get_if<Program::Load>(&operand)) {
        Tensor& value = values_[load->value];
        load->last ? stack_.emplace_back(std::move(value)) : stack_.emplace_back(value);
      } else if (const auto* list = std::get_if<Program::LoadList>(&operand)) {
        stack_.emplace_back(load_list(*list));
      } else if (const auto* constant = std::get_if<Program::Constant>(&operand)) {
        stack_.push_back(constant->value);
      } else {
        const auto& metadata = frame_.metadata[std::get<Program::ShapeOf>(operand).metadata];
        stack_.emplace_back(c10::SymIntArrayRef(metadata->sizes));
      }
    }
  }

  // Loads the tensors of run_call.
  void load_tensors(const Program::Call& call) {
    c10::List<Tensor> tensors;
    const auto add = [&](const Program::Load& load) {
      Tensor& value = values_[load.value];
      load.last ? tensors.push_back(std::move(value)) : tensors.push_back(value);
    };
    for (const auto& operand : call.operands) {
      if (const auto* const load = std::get_if<Program::Load>(&operand)) add(*load);
      if (const auto* const list = std::get_if<Program::LoadList>(&operand)) {
        std::ranges::for_each(*list, add);
      }
    }
    stack_.push_back(call.text);
    stack_.emplace_back(std::move(tensors));
  }

  c10::List<Tensor> load_list(const Program::LoadList& loads) {
    c10::List<Tensor> list;
    list.reserve(loads.size());
    for (const auto& load : loads) {
      Tensor& value = values_[load.value];
      load.last ? list.push_back(std::move(value)) : list.push_back(value);
    }
    return list;
  }

  // ---- missing gradients

  // Replaces missing gradients by zeros, or skips the call if it is not needed.
  void run_partly_used(const Program::Call& call) {
    std::vector<int> zeros;
    for (const auto& gradient : call.gradients) {
      if (!is_reached(gradient.value)) zeros.push_back(gradient.value);
    }
    if (call.skippable && zeros.size() == call.gradients.size()) return;
    for (const auto& gradient : call.gradients) {
      values_[gradient.value] = gradient_or_zeros(gradient);
    }
    run_call(call);
    note_reached(call, zeros);
  }

  bool is_reached(int value) const {
    return value >= 0 && values_[value].defined() && frame_.reached[value];
  }

  Tensor gradient_or_zeros(const Program::Gradient& gradient) const {
    if (gradient.value >= 0 && values_[gradient.value].defined()) return values_[gradient.value];
    const auto& metadata =
        gradient.metadata < 0 ? std::nullopt : frame_.metadata[gradient.metadata];
    return metadata ? zeros_like(*metadata) : Tensor();
  }

  void note_reached(const Program::Call& call, const std::vector<int>& zeros) {
    for (size_t i = 0; i < call.results.size(); ++i) {
      frame_.reached[call.results[i]] =
          call.gradients.empty() || std::ranges::any_of(call.gradients, [&](const auto& gradient) {
            return std::ranges::find(zeros, gradient.value) == zeros.end() &&
                   gradient.op >= call.result_ops[i];
          });
    }
  }

  // ---- weights that accumulate

  void accumulate(const Program::Call& call) {
    const auto& [position, first, wanted, op, into, later] = *call.accumulates;
    if (later) {
      const DeferredCall::Op delayed{call.op, into, position, wanted};
      frame_.host->delay(op, std::make_shared<const DeferredCall>(delayed, stack_));
      stack_.clear();
      return;
    }
    // An op that writes into a buffer has no other list results.
    bool gives_lists = false;
    for (int i = 0; i < std::ssize(call.counts); ++i) {
      gives_lists |= i != position && call.counts[i] > 0;
    }
    const bool all_wanted = std::ranges::find(wanted, false) == wanted.end();
    std::optional<Accumulation> target;
    if (into && all_wanted && !gives_lists) target = frame_.host->accumulation(op);
    if (target) {
      push_accumulation(*target, *into, stack_);
      into->callBoxed(stack_);
      if (call.counts.empty()) stack_.insert(stack_.begin() + position, Tensor());
      for (int i = 0; i < std::ssize(call.counts); ++i) {
        if (call.counts[i] >= 0) {
          stack_.insert(stack_.begin() + i, Tensors(call.counts[i]));
        } else if (i == position) {
          stack_.insert(stack_.begin() + i, Tensor());
        }
      }
    } else {
      call.op.callBoxed(stack_);
    }
    take_results(call);
    for (size_t i = 0; i < wanted.size(); ++i) {
      Tensor& value = values_[call.results[first + i]];
      value = wanted[i] ? frame_.host->accumulate(op, static_cast<int>(i), value) : Tensor();
    }
  }

  // ---- steps of the host language

  // The dtype that each op of the step computes in, by the rule of required_dtype(). Host steps may
  // choose dtypes that a plan cannot know.
  std::vector<at::ScalarType> dtypes_of(const Program::HostForward& call) const {
    at::ScalarType running = values_[call.arguments[0]].scalar_type();
    const bool is_floating = at::isFloatingType(running);
    const auto& autocast = program_.plan.autocast;
    std::vector<at::ScalarType> dtypes;
    for (const auto& [parameter, autocasts] : call.dtypes) {
      if (parameter >= 0) running = values_[parameter].scalar_type();
      if (autocast && autocasts && running != at::kDouble && is_floating) {
        running = to_torch(*autocast);
      }
      dtypes.push_back(running);
    }
    return dtypes;
  }

  void add_saved(const Program::HostBackward::Saved& saved,
                 HostCall::BackwardArguments& arguments) {
    arguments.dtypes.emplace_back();
    if (saved.dtype >= 0) arguments.dtypes.back() = frame_.metadata[saved.dtype]->dtype;
    if (saved.own_row >= 0) {
      // The tensors are freed with the step.
      arguments.saved.push_back(std::move(frame_.own[saved.own_row]));
      return;
    }
    Tensors& row = arguments.saved.emplace_back();
    for (const int value : saved.slots) row.push_back(value < 0 ? Tensor() : values_[value]);
  }

  std::string describe(const Result& result) const {
    const std::string op = std::to_string(result.op);
    if (result.of == Result::Of::Input) return "the input";
    if (result.of == Result::Of::ExtraInput) {
      return "extra input " + std::to_string(result.k) + " of op " + op;
    }
    return "parameter '" + frame_.host->parameter_name(result.op, result.k) + "' of op " + op;
  }

  void put(const Program::HostBackward& call, const Result& result, Tensor gradient, bool depends) {
    const auto& metadata = result.metadata < 0 ? std::nullopt : frame_.metadata[result.metadata];
    const bool is_input = result.of == Result::Of::Input;
    TORCH_CHECK(metadata || gradient.defined() || !is_input, "[", call.name,
                "] gradient of the input must be a tensor here, got None");
    if (!is_input && (!metadata || !takes_real_numbers(metadata->dtype))) return;
    if (gradient.defined()) {
      // Only autograd reads the gradient of a parameter, which may be sparse.
      const bool may_be_sparse = result.of == Result::Of::Parameter && gradient.is_sparse();
      const std::string fault = may_be_sparse ? "" : fault_of(gradient);
      TORCH_CHECK(fault.empty(), "[", call.name, "] gradient of ", describe(result),
                  " must be a dense tensor with memory, got ", fault);
    }
    if (gradient.defined() && metadata) {
      // A buffer may have a wider dtype than its weight.
      gradient = fitted(
          call.name, [&] { return describe(result); }, std::move(gradient), *metadata,
          /*keep_dtype=*/result.accumulates);
    }
    if (gradient.defined() && result.accumulates) {
      gradient = frame_.host->accumulate(result.op, result.k, gradient);
    }
    const bool is_there = gradient.defined() && depends;
    Tensor& value = values_[result.value];
    if (result.previous >= 0 && value.defined()) {
      if (gradient.defined()) value = value + gradient;
      frame_.reached[result.value] = frame_.reached[result.value] || is_there;
    } else {
      value = std::move(gradient);
      frame_.reached[result.value] = is_there;
    }
  }

  const Program& program_;
  const Program::Code& code_;
  Frame& frame_;
  Tensors& values_;
  torch::jit::Stack stack_;
};

}  // namespace

void interpret(const Program& program, const Program::Code& code, Frame& frame) {
  Interpreter interpreter(program, code, frame);
  for (const auto& line : code.lines) interpreter.run(line);
}

void interpret_step(const Program& program, const Program::Code& code, int op, Frame& frame) {
  Interpreter interpreter(program, code, frame);
  for (const auto& line : code.lines) {
    if (line.op == op) interpreter.run(line);
  }
}

}  // namespace transformer_ops
