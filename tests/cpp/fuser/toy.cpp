#include "toy.h"

#include "fuser/declaration.h"

namespace transformer_ops::toy {
namespace {

bool declare() {
  add_declaration({.kind = "Square",
                   .summary = "x^2",
                   .flags = {kCacheQuantizedInput},
                   .slots = {{"input"}},
                   .forward = "square(Tensor input) -> Tensor output",
                   .backward = "square_backward(Tensor grad_output, Tensor input) -> "
                               "Tensor grad_input",
                   .recompute = "recompute_square(Tensor grad_output, Tensor input) -> "
                                "Tensor output",
                   .dtype = DTypeRule::Autocast});
  add_declaration({.kind = "Root",
                   .summary = "x^0.5",
                   .slots = {{"output"}},
                   .forward = "root(Tensor input) -> Tensor output",
                   .backward = "root_backward(Tensor grad_output, Tensor output) -> "
                               "Tensor grad_input"});
  add_declaration({.kind = "Product",
                   .summary = "x W^T",
                   .parameters = {"weight"},
                   .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
                   .forward = "product(Tensor input, Tensor weight) -> Tensor output",
                   .backward = "product_backward(Tensor grad_output, Tensor? input, "
                               "Tensor? weight, bool[2] output_mask) -> "
                               "(Tensor grad_input, Tensor grad_weight)",
                   .recompute = "recompute_product(Tensor grad_output, Tensor input, "
                                "Tensor weight) -> Tensor output",
                   .dtype = DTypeRule::Parameter,
                   .operands = {"input", "weight"},
                   .scalable = true});
  add_declaration({.kind = "Tally",
                   .summary = "x W^T, whose weight may have a sum of gradients of its own",
                   .parameters = {"weight"},
                   .attributes = {"tallies"},
                   .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
                   .states = {{"total", "weight", "tallies"}},
                   .forward = "product(Tensor input, Tensor weight) -> Tensor output",
                   .backward = "product_backward(Tensor grad_output, Tensor? input, "
                               "Tensor? weight, bool[2] output_mask) -> "
                               "(Tensor grad_input, Tensor grad_weight)",
                   .dtype = DTypeRule::Parameter});
  add_declaration({.kind = "Blend",
                   .summary = "x times the sum of W[i], plus that of b[i]",
                   .parameters = {"weight", "shift"},
                   .lists = {{"weight", "count"}, {"shift", "count", "single", /*optional=*/true}},
                   .attributes = {"count", "single", "tallies"},
                   .slots = {{"input", {"weight"}}, {"weight", {"input"}}},
                   .states = {{"total", "weight", "tallies"}},
                   .forward = "blend(Tensor input, Tensor[] weight, Tensor[] shift) -> "
                              "Tensor output",
                   .backward = "blend_backward(Tensor grad_output, Tensor? input, "
                               "Tensor[] weight, Tensor[] shift, int count, "
                               "bool[3] output_mask) -> (Tensor grad_input, "
                               "Tensor[] grad_weight, Tensor[] grad_shift)",
                   .recompute = "recompute_blend(Tensor grad_output, Tensor input, "
                                "Tensor[] weight, Tensor[] shift) -> Tensor output",
                   .dtype = DTypeRule::Parameter,
                   .operands = {"input", "weight"}});
  add_declaration({.kind = "Shift",
                   .summary = "x + b",
                   .parameters = {"shift"},
                   .forward = "shift(Tensor input, Tensor shift) -> Tensor output",
                   .backward = "shift_backward(Tensor grad_output) -> Tensor grad_shift",
                   .recompute = "recompute_shift(Tensor grad_output, Tensor input, Tensor shift) "
                                "-> Tensor output"});
  add_declaration({.kind = "Scale",
                   .summary = "x * factor",
                   .attributes = {"factor"},
                   .forward = "scale(Tensor input, float factor) -> Tensor output",
                   .backward = "scale(Tensor grad_output, float factor) -> Tensor grad_input",
                   .recompute = "recompute_scale(Tensor grad_output, Tensor input, float factor) "
                                "-> Tensor output"});
  add_declaration({.kind = "Norm",
                   .summary = "x / |x|",
                   .attributes = {"eps"},
                   .slots = {{"input"}, {"rstd"}},
                   .forward = "norm(Tensor input, float eps) -> (Tensor output, Tensor rstd)",
                   .backward = "norm_backward(Tensor grad_output, Tensor input, Tensor rstd) -> "
                               "Tensor grad_input",
                   .recompute = "recompute_norm(Tensor grad_output, Tensor input, Tensor rstd) -> "
                                "Tensor output",
                   .dtype = DTypeRule::Autocast});
  add_declaration({.kind = "Soft",
                   .summary = "exp(x) / sum(exp(x))",
                   .slots = {{"input"}, {.name = "sum", .of_exact = true}},
                   .forward = "soft(Tensor input) -> (Tensor output, Tensor sum)",
                   .backward = "soft_backward(Tensor grad_output, Tensor input, Tensor? sum) -> "
                               "Tensor grad_input"});
  add_declaration({.kind = "Mask",
                   .summary = "x where a bit is set",
                   .slots = {{"mask"}},
                   .forward = "mask(Tensor input, bool save_mask) -> (Tensor output, Tensor mask)",
                   .backward = "mask_backward(Tensor grad_output, Tensor mask) -> "
                               "Tensor grad_input",
                   .recompute = "recompute_mask(Tensor grad_output, Tensor input, Tensor mask) -> "
                                "Tensor output",
                   .inactive = [](const Attributes&, bool training) { return !training; }});
  add_declaration({.kind = "Repeat",
                   .summary = "x several times, which costs little to do again",
                   .forward = "repeat(Tensor input) -> Tensor output",
                   .backward = "repeat_backward(Tensor grad_output) -> Tensor grad_input",
                   .recompute = "recompute_repeat(Tensor grad_output, Tensor input) -> "
                                "Tensor output",
                   .recompute_adds_input = true});
  add_declaration({.kind = "Same", .summary = "x"});
  add_declaration({.kind = "View",
                   .summary = "reshape",
                   .attributes = {"shape"},
                   .forward = "aten::reshape(Tensor input, SymInt[] shape) -> Tensor output",
                   .backward = "aten::reshape(Tensor grad_output, SymInt[] input_shape) -> "
                               "Tensor grad_input"});
  add_declaration({.kind = "Add",
                   .summary = "x + extra",
                   .extra_inputs = {"extra_input"},
                   .forward = "add(Tensor input, Tensor extra_input) -> Tensor output",
                   .dtype = DTypeRule::Promote});
  add_declaration({.kind = "Pick",
                   .summary = "x + rows + table[ids]",
                   .parameters = {"table"},
                   .extra_inputs = {"rows", "ids"},
                   .integers = {"ids"},
                   .slots = {{"ids", {"table"}}},
                   .forward = "pick(Tensor input, Tensor? rows, Tensor ids, Tensor? table) -> "
                              "Tensor output",
                   .backward = "pick_backward(Tensor grad_output, Tensor? ids, "
                               "bool[2] output_mask) -> (Tensor grad_rows, Tensor grad_table)"});
  add_declaration({.kind = "Groups",
                   .summary = "x W[g]^T + b[g] for the rows of each group",
                   .parameters = {"weight", "bias"},
                   .extra_inputs = {"splits"},
                   .integers = {"splits"},
                   .slots = {{"input", {"weight"}}, {"splits"}, {"weight", {"input"}}},
                   .forward = "groups(Tensor input, Tensor splits, Tensor weight, Tensor bias) -> "
                              "Tensor output",
                   .backward = "groups_backward(Tensor grad_output, Tensor? input, Tensor splits, "
                               "Tensor? weight, bool[3] output_mask) -> "
                               "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                   .dtype = DTypeRule::Parameter,
                   .operands = {"input", "weight"}});
  add_declaration({.kind = "Router",
                   .summary = "x, a weight and an id for each row",
                   .extra_outputs = {"weights", "chosen"},
                   .integers = {"chosen"},
                   .slots = {{"input"}},
                   .forward = "route(Tensor input) -> "
                              "(Tensor output, Tensor weights, Tensor chosen)",
                   .backward = "route_backward(Tensor grad_output, Tensor? grad_weights, "
                               "Tensor input) -> Tensor grad_input"});
  add_declaration({.kind = "Spread",
                   .summary = "x, in several places",
                   .extra_outputs = {"places"},
                   .integers = {"places"},
                   .slots = {{"places"}},
                   .forward = "spread(Tensor input) -> (Tensor output, Tensor places)",
                   .backward = "spread_backward(Tensor grad_output, Tensor places) -> "
                               "Tensor grad_input",
                   .recompute = "recompute_spread(Tensor grad_output, Tensor input, "
                                "Tensor places) -> Tensor output",
                   .recompute_adds_input = true});
  add_declaration({.kind = "Choose",
                   .summary = "x, and an id for each row",
                   .extra_outputs = {"ids"},
                   .integers = {"ids"},
                   .forward = "choose(Tensor input) -> Tensor ids"});
  add_declaration({.kind = "Fork",
                   .summary = "x; an extra output is x, too",
                   .extra_outputs = {"extra_output"},
                   .backward = "fork_backward(Tensor grad_output, Tensor grad_extra_output) -> "
                               "Tensor grad_input"});
  return true;
}

[[maybe_unused]] const bool declared = declare();

Attribute default_of(const std::string& attribute) {
  if (attribute == "factor") return 2.0;
  if (attribute == "eps") return 1e-5;
  if (attribute == "count") return int64_t{3};
  if (attribute == "single") return false;
  return std::vector<int64_t>{-1, 4};
}

}  // namespace

OpNode node(const std::string& kind) {
  const OpDeclaration& row = declaration(kind);
  Attributes attributes;
  for (const auto& name : row.attributes) attributes[name] = default_of(name);
  return make_op(kind, std::move(attributes));
}

OpNode python_node(const std::string& kind, int parameters) {
  return {.kind = kind, .native = false, .parameters = numbered_names(parameters)};
}

std::vector<OpNode> nodes(const std::vector<std::string>& kinds) {
  std::vector<OpNode> ops;
  for (const auto& kind : kinds) ops.push_back(node(kind));
  return ops;
}

void connect(std::vector<OpNode>& ops, int output, int input, bool visible) {
  ops[input].sources[0] = {output, 0};
  ops[output].visible[0] = visible;
}

PlanKey key(const std::vector<OpNode>& ops, bool grad) {
  const TensorMeta tensor{DType::Float32, grad};
  PlanKey key{.grad_enabled = grad};
  size_t count = 1 + extra_inputs_from_caller(ops);
  for (const OpNode& op : ops) count += op.parameters.size();
  key.tensors.assign(count, tensor);
  key.training.assign(ops.size(), true);
  return key;
}

TensorMeta& parameter(PlanKey& key, const std::vector<OpNode>& ops, int op) {
  size_t place = 1 + extra_inputs_from_caller(ops);
  for (int i = 0; i < op; ++i) place += ops[i].parameters.size();
  return key.tensors[place];
}

Plan plan(const std::vector<OpNode>& ops) { return plan(ops, key(ops)); }

Plan plan(const std::vector<OpNode>& ops, const PlanKey& key) { return make_plan(ops, key).plan; }

std::string saved_slots(const Plan& plan) {
  std::string text;
  for (const Step& step : plan.forward) {
    for (const Save& save : step.saves) {
      if (save.source.kind != Value::Kind::Parameter) text += to_text(save.slot) + " ";
    }
  }
  return text;
}

std::string steps_text(const Plan& plan) {
  const std::string text = to_text(plan);
  return text.substr(text.find("first_backward"));
}

Rule forward_rule() {
  return {.name = "product_shift_square",
          .pass = Pass::Forward,
          .benefit = 30,
          .pattern = {{"Product"}, {"Shift"}, {"Square"}},
          .forward =
              "product_shift_square(Tensor input, Tensor weight, Tensor shift, "
              "bool save_kept) -> (Tensor output, Tensor kept)",
          .bind = [](const Match&) {
            return Bindings{{"kept", Field{2, "input"}}};
          }};
}

Rule backward_rule() {
  return {.name = "square_shift",
          .pass = Pass::Backward,
          .benefit = 20,
          .pattern = {{"Shift"}, {"Square"}},
          .why_not = [](const Match& match) -> std::optional<std::string> {
            if (match.parameter_requires_grad(0, 0)) return std::nullopt;
            return "the shift needs no gradient";
          },
          .backward =
              "square_shift_backward(Tensor grad_output, Tensor kept) -> "
              "(Tensor grad_input, Tensor grad_shift)",
          .bind =
              [](const Match&) {
                return Bindings{{"kept", Field{1, "input"}}};
              }};
}

Rule joint_rule() {
  return {.name = "square_product",
          .pass = Pass::Joint,
          .benefit = 10,
          .pattern = {{"Square"}, {"Product"}},
          .forward =
              "square_product(Tensor input, Tensor weight) -> "
              "(Tensor output, Tensor squared)",
          .backward =
              "square_product_backward(Tensor grad_output, Tensor squared, "
              "Tensor weight, bool[2] output_mask) -> "
              "(Tensor grad_input, Tensor grad_weight)",
          .bind = [](const Match&) {
            return Bindings{{"squared", Field{1, "input"}}};
          }};
}

}  // namespace transformer_ops::toy
