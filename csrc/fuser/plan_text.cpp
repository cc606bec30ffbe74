// The text of a plan and its parser. One line a fact:
//   plan 5
//   op 0 LayerNorm eps=1e-05 normalized_shape=[16] zero_centered_gamma=false
//   inputs e2.ids | parameters p0.weight p0.bias | outputs o3.ids | route e4.ids=o3.ids
//   states st0.fp8_scale
//   gradients g0 dp0.weight dp0.bias
//   first_backward 0
//   forward layer_norm ops=[0]
//     x1, s0.mean, s0.rstd = layer_norm(x0, p0.weight, p0.bias, 1e-05, false)
//     save s0.input=x0, s0.mean=s0.mean
#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/op_node.h"
#include "fuser/plan.h"
#include "fuser/text.h"

namespace transformer_ops {
namespace {

constexpr const char* kHeader = "plan 5";
constexpr int kLongestRun = 100'000;

std::string argument_text(const Argument& argument) {
  if (const auto* value = std::get_if<Value>(&argument)) return to_text(*value);
  if (const auto* list = std::get_if<ValueList>(&argument)) return to_text(*list);
  if (const auto* constant = std::get_if<Attribute>(&argument)) return to_text(*constant);
  return "none";
}

template <typename List, typename Function>
std::string join(const List& list, const char* separator, Function&& item_text) {
  std::string text;
  for (const auto& item : list) text += (text.empty() ? "" : separator) + item_text(item);
  return text;
}

std::string result_text(const Result& result) {
  if (const auto* list = std::get_if<ValueList>(&result)) return to_text(*list);
  return to_text(std::get<Value>(result));
}

// Splits "weight12" into its letters and its number; the number is -1 if there is none.
std::pair<std::string, int> split_number(const std::string& name) {
  const size_t letters = name.find_last_not_of("0123456789") + 1;
  const bool is_plain = letters < name.size() && name.size() - letters < 7 &&
                        (name[letters] != '0' || letters + 1 == name.size());
  return {name.substr(0, letters), is_plain ? std::stoi(name.substr(letters)) : -1};
}

// Does `next` directly follow `value` in a list of tensors?
bool follows(const Value& value, const Value& next) {
  const auto [name, number] = split_number(value.name);
  Value expected = value;
  expected.name = name + std::to_string(number + 1);
  return number >= 0 && !name.empty() && value.part == Value::Part::Whole && next == expected;
}

// The number of values from `first` on that are written as one run: w0..3.
size_t run_length(const ValueList& values, size_t first) {
  size_t count = 1;
  while (first + count < values.size() &&
         follows(values[first + count - 1], values[first + count])) {
    ++count;
  }
  return count;
}

std::string run_text(const ValueList& values, size_t first, size_t count) {
  const std::string text = to_text(values[first]);
  if (count == 1) return text;
  return text + ".." + std::to_string(split_number(values[first + count - 1].name).second);
}

std::vector<std::string> run_texts(const ValueList& values) {
  std::vector<std::string> texts;
  for (size_t first = 0; first < values.size();) {
    const size_t count = run_length(values, first);
    texts.push_back(run_text(values, first, count));
    first += count;
  }
  return texts;
}

// Slots and the values that they save; runs of both are written together.
std::string saves_text(const std::vector<Save>& saves) {
  ValueList slots, sources;
  for (const Save& save : saves) {
    slots.push_back(save.slot);
    sources.push_back(save.source);
  }
  std::string text;
  for (size_t first = 0; first < saves.size();) {
    const size_t count = std::min(run_length(slots, first), run_length(sources, first));
    text += (text.empty() ? "" : ", ") + run_text(slots, first, count) + "=" +
            run_text(sources, first, count);
    first += count;
  }
  return text;
}

// Parses a value, or a run of values.
ValueList parse_run(const std::string& text) {
  const size_t dots = text.find("..");
  if (dots == std::string::npos) return {parse_value(text)};
  const Value first = parse_value(text.substr(0, dots));
  const auto [name, number] = split_number(first.name);
  const auto [no_name, last] = split_number(text.substr(dots + 2));
  check(number >= 0 && no_name.empty() && last > number && last - number < kLongestRun,
        "[plan] a run of values must read like p1.weight0..3, got '", text, "'");
  ValueList values;
  for (int i = number; i <= last; ++i) {
    values.push_back({first.kind, first.op, name + std::to_string(i), first.part});
  }
  return values;
}

// A user's name, which may be any text; quoted if it is not one plain word.
std::string name_text(const std::string& name) {
  constexpr const char* kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:<>-";
  const bool is_plain = !name.empty() && name.find_first_not_of(kPlain) == std::string::npos;
  return is_plain ? name : to_text(Attribute(name));
}

std::string parse_name(const std::string& text) {
  return text.starts_with('"') ? std::get<std::string>(parse_attribute(text)) : text;
}

std::string instruction_text(const Instruction& instruction) {
  const std::string arguments = join(instruction.arguments, ", ", argument_text);
  const std::string results = join(instruction.results, ", ", result_text);
  if (instruction.target.empty()) return "  " + results + " = " + arguments + "\n";
  return "  " + results + " = " + instruction.target + "(" + arguments + ")\n";
}

std::string step_text(const Step& step, const char* direction) {
  std::string text = std::string(direction) + " " + name_text(step.name) + " ops=" +
                     to_text(Attribute(std::vector<int64_t>(step.ops.begin(), step.ops.end())));
  if (step.python) text += " python=" + std::to_string(*step.python);
  if (step.joint) text += " joint=true";
  if (step.skipped) text += " skipped=true";
  text += "\n";
  for (const Instruction& instruction : step.instructions) text += instruction_text(instruction);
  if (!step.saves.empty()) {
    text += "  save " + saves_text(step.saves) + "\n";
  }
  return text;
}

std::pair<std::string, std::string> split_once(const std::string& text, char separator) {
  const size_t at = text.find(separator);
  check(at != std::string::npos, "[plan] '", text, "' must hold a '", separator, "'");
  return {text.substr(0, at), text.substr(at + 1)};
}

// Is it a list such as [p1.weight0..3] or [x1], not one of flags or numbers?
bool is_list_of_values(const std::string& text) {
  const auto starts_with = [&](const char* word) {
    return text.compare(1, std::strlen(word), word) == 0;
  };
  const bool has_word = text.size() > 2 && text.front() == '[' && std::isalpha(text[1]) != 0;
  return has_word && !starts_with("true") && !starts_with("false");
}

ValueList parse_list(const std::string& text) {
  check(text.ends_with(']'), "[plan] a list of values must end with ']', got '", text, "'");
  ValueList list;
  for (const std::string& word : split_text(text.substr(1, text.size() - 2), ',')) {
    for (Value& value : parse_run(word)) list.push_back(std::move(value));
  }
  return list;
}

Result parse_result(const std::string& text) {
  return text.starts_with('[') ? Result(parse_list(text)) : parse_value(text);
}

Argument parse_argument(const std::string& text) {
  if (text == "none") return None{};
  if (is_list_of_values(text)) return parse_list(text);
  const bool is_constant = text == "true" || text == "false" ||
                           std::string("\"[-0123456789").find(text.front()) != std::string::npos ||
                           text == "inf" || text == "nan";
  if (is_constant) return parse_attribute(text);
  return parse_value(text);
}

int parse_int(const std::string& text) {
  const Attribute attribute = parse_attribute(text);
  const auto* integer = std::get_if<int64_t>(&attribute);
  check(integer != nullptr, "[plan] an integer must stand here, got '", text, "'");
  return static_cast<int>(*integer);
}

size_t parse_count(const std::string& text) {
  const int count = parse_int(text);
  check(count >= 0 && count < 1000, "[plan] a count must be small, got ", count);
  return static_cast<size_t>(count);
}

bool parse_bool(const std::string& text) {
  check(text == "true" || text == "false", "[plan] a flag must be true or false, got '", text, "'");
  return text == "true";
}

class Parser {
 public:
  Plan parse(const std::string& text) {
    std::istringstream lines(text);
    std::string line;
    std::getline(lines, line);
    check(line == kHeader, "[plan] text must begin with '", kHeader, "', got '", line, "'");
    for (int number = 2; std::getline(lines, line); ++number) {
      try {
        if (!line.empty() && !line.starts_with('#')) parse_line(line);
      } catch (const std::exception& error) {
        fail(error.what(), " (line ", number, ")");
      }
    }
    verify(plan_);
    return std::move(plan_);
  }

 private:
  void parse_line(const std::string& line) {
    if (line.starts_with("  save ")) return parse_saves(line.substr(7));
    if (line.starts_with("  ")) return parse_instruction(line.substr(2));
    std::vector<std::string> words = split_text(line, ' ');
    check(!words.empty(), "[plan] a line must not be blank");
    const std::string head = words.front();
    words.erase(words.begin());
    if (head == "op") return parse_op(words);
    if (head == "forward") return parse_step(words, plan_.forward);
    if (head == "backward") return parse_step(words, plan_.backward);
    if (head == "inputs") return parse_values(words, plan_.extra_inputs);
    if (head == "parameters") return parse_values(words, plan_.parameters);
    if (head == "states") return parse_values(words, plan_.states);
    if (head == "outputs") return parse_values(words, plan_.extra_outputs);
    if (head == "gradients") return parse_values(words, plan_.gradients);
    if (head == "route") {
      for (const auto& word : words) {
        const auto [input, output] = split_once(word, '=');
        plan_.routes.push_back({parse_value(input), parse_value(output)});
      }
      return;
    }
    if (head == "saved") return parse_saved_as(words);
    if (head == "recipe") {
      plan_.recipe = recipe_of(line.substr(std::string("recipe ").size()));
      return;
    }
    check(words.size() == 1 && (head == "first_backward" || head == "autocast"),
          "[plan] a line must begin with a known word, got '", head, "'");
    if (head == "autocast") {
      plan_.autocast = parse_dtype(words[0]);
      return;
    }
    plan_.first_backward = parse_int(words[0]);
    check(plan_.first_backward >= 0, "[plan] first_backward must not be negative");
  }

  void parse_saved_as(const std::vector<std::string>& words) {
    const bool has_inputs = words.size() == 2 && words[1] == "inputs=true";
    check(words.size() == 1 || has_inputs, "[plan] saved must be a format, and inputs=true or ",
          "nothing, got ", words.size(), " words");
    plan_.saved.format = parse_saved_format(words[0]);
    plan_.saved.inputs = has_inputs;
  }

  void parse_op(const std::vector<std::string>& words) {
    check(words.size() >= 2 && parse_int(words[0]) == plan_.size(), "[plan] op ", plan_.size(),
          " must come next, got '", words.empty() ? "" : words[0], "'");
    PlannedOp op{.kind = parse_name(words[1])};
    for (size_t i = 2; i < words.size(); ++i) {
      const auto [name, value] = split_once(words[i], '=');
      if (name == "native") {
        op.native = parse_bool(value);
      } else if (!op.native && name == "extra_inputs") {
        op.extra_inputs = numbered_names(parse_count(value));
      } else if (!op.native && name == "extra_outputs") {
        op.extra_outputs = numbered_names(parse_count(value));
      } else if (name == "training") {
        op.training = parse_bool(value);
      } else {
        op.attributes[name] = parse_attribute(value);
      }
    }
    if (op.native) {
      const OpDeclaration& row = declaration(op.kind);
      op.extra_inputs = row.extra_inputs;
      op.extra_outputs = row.extra_outputs;
    }
    plan_.ops.push_back(std::move(op));
  }

  void parse_step(const std::vector<std::string>& words, std::vector<Step>& steps) {
    check(words.size() >= 2, "[plan] a step must have a name and ops");
    Step step{.name = parse_name(words[0])};
    for (size_t i = 1; i < words.size(); ++i) parse_step_field(words[i], step);
    check(!step.ops.empty(), "[plan] step '", step.name, "' must have ops");
    steps.push_back(std::move(step));
    step_ = &steps.back();
  }

  static void parse_step_field(const std::string& word, Step& step) {
    const auto [name, value] = split_once(word, '=');
    if (name == "ops") {
      const Attribute ops = parse_attribute(value);
      const auto* list = std::get_if<std::vector<int64_t>>(&ops);
      check(list != nullptr, "[plan] ops must be a list, got '", value, "'");
      step.ops.assign(list->begin(), list->end());
    } else if (name == "python") {
      step.python = parse_int(value);
    } else if (name == "joint") {
      step.joint = parse_bool(value);
    } else if (name == "skipped") {
      step.skipped = parse_bool(value);
    } else {
      fail("[plan] a step field must be known, got '", name, "'");
    }
  }

  static void parse_values(const std::vector<std::string>& words, std::vector<Value>& values) {
    for (const auto& word : words) {
      for (Value& value : parse_run(word)) values.push_back(std::move(value));
    }
  }

  void parse_instruction(const std::string& text) {
    check(step_ != nullptr, "[plan] an instruction must follow a step");
    const size_t equals = text.find(" = ");
    check(equals != std::string::npos, "[plan] an instruction must read 'results = ...'");
    Instruction instruction;
    for (const auto& word : split_text(text.substr(0, equals), ',')) {
      instruction.results.push_back(parse_result(word));
    }
    std::string call = text.substr(equals + 3);
    if (call.ends_with(")")) {
      const auto [target, arguments] = split_once(call.substr(0, call.size() - 1), '(');
      instruction.target = target;
      call = arguments;
    }
    for (const auto& word : split_text(call, ',')) {
      instruction.arguments.push_back(parse_argument(word));
    }
    check(!instruction.target.empty() || instruction.arguments.size() == 1,
          "[plan] a hand-over must have one argument, got '", text, "'");
    step_->instructions.push_back(std::move(instruction));
  }

  void parse_saves(const std::string& text) {
    check(step_ != nullptr, "[plan] a save must follow a step");
    for (const auto& word : split_text(text, ',')) {
      const auto [slot, source] = split_once(word, '=');
      const ValueList slots = parse_run(slot), sources = parse_run(source);
      check(slots.size() == sources.size(), "[plan] a save must have a source for each slot, got '",
            word, "'");
      for (size_t i = 0; i < slots.size(); ++i) step_->saves.push_back({slots[i], sources[i]});
    }
  }

  Plan plan_;
  Step* step_ = nullptr;
};

std::string values_line(const char* head, const std::vector<Value>& values) {
  const auto as_it_is = [](const std::string& text) { return text; };
  if (values.empty()) return "";
  return std::string(head) + " " + join(run_texts(values), " ", as_it_is) + "\n";
}

// The counts of a Python op's extra tensors, whose names are numbers.
std::string counts_text(const PlannedOp& op) {
  std::string text;
  if (!op.extra_inputs.empty()) text += " extra_inputs=" + std::to_string(op.extra_inputs.size());
  if (!op.extra_outputs.empty()) {
    text += " extra_outputs=" + std::to_string(op.extra_outputs.size());
  }
  return text;
}

// The setting for saved tensors. It does not follow from the steps, but is needed to plan again.
std::string saved_text(const SavedAs& saved) {
  if (saved.is_exact()) return "";
  return "saved " + to_text(saved.format) + (saved.inputs ? " inputs=true" : "") + "\n";
}

}  // namespace

std::string to_text(const ValueList& list) {
  return "[" + join(run_texts(list), ", ", [](const std::string& text) { return text; }) + "]";
}

std::string to_text(const Plan& plan) {
  std::string text = std::string(kHeader) + "\n";
  for (int i = 0; i < plan.size(); ++i) {
    const PlannedOp& op = plan.ops[i];
    text += "op " + std::to_string(i) + " " + name_text(op.kind);
    if (!op.native) text += " native=false" + counts_text(op);
    if (op.training) text += " training=true";
    for (const auto& [name, value] : op.attributes) text += " " + name + "=" + to_text(value);
    text += "\n";
  }
  text += values_line("inputs", plan.extra_inputs);
  text += values_line("parameters", plan.parameters);
  text += values_line("states", plan.states);
  text += values_line("outputs", plan.extra_outputs);
  if (!plan.routes.empty()) {
    text += "route " +
            join(plan.routes, " ",
                 [](const Route& route) {
                   return to_text(route.input) + "=" + to_text(route.output);
                 }) +
            "\n";
  }
  text += values_line("gradients", plan.gradients);
  text += "first_backward " + std::to_string(plan.first_backward) + "\n";
  if (plan.autocast) text += "autocast " + to_text(*plan.autocast) + "\n";
  if (plan.recipe != nullptr) text += "recipe " + to_text(*plan.recipe) + "\n";
  text += saved_text(plan.saved);
  for (const Step& step : plan.forward) text += step_text(step, "forward");
  for (const Step& step : plan.backward) text += step_text(step, "backward");
  return text;
}

Plan parse_plan(const std::string& text) { return Parser().parse(text); }

}  // namespace transformer_ops
