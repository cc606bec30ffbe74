#include "op/defaults.h"

#include <algorithm>

namespace transformer_ops {
namespace {

bool is_tensor(const Schema::Field& field) { return field.type.starts_with("Tensor"); }
bool is_list(const Schema::Field& field) { return field.type == "Tensor[]"; }
bool is_switch(const Schema::Field& field) { return field.name.starts_with("save_"); }

TensorSpecs like_first(const std::string& name, const Tensor& first, const Checks& check) {
  check.compute_dtype(name.c_str(), first);
  return {like(first)};
}

// A forward argument that has a gradient.
struct Gradient {
  size_t place;  // its index among the arguments of backward
  std::string name;
  bool is_list;
};

struct Backward {
  TypedOp forward;
  std::vector<bool> is_switch;  // for each forward argument: is it a switch? Backward has no such
                                // argument
  std::vector<Gradient> gradients;
  bool has_mask;

  // Runs the checks of `forward` on the same arguments; each gradient is like its argument.
  TensorSpecs shape(const Checks& check, Values values) const {
    std::vector<c10::IValue> arguments;
    size_t next = 1;
    for (const bool off : is_switch) arguments.push_back(off ? c10::IValue(false) : values[next++]);
    const TensorSpecs outputs = forward.shape(check, arguments);
    check.spec("grad_output", values[0].toTensor(), outputs[0]);
    TensorSpecs specs;
    for (const Gradient& gradient : gradients) {
      const bool is_wanted = !has_mask || values.back().toListRef()[specs.size()].toBool();
      if (gradient.is_list) {
        specs.push_back(is_wanted ? like(values[gradient.place].toTensorVector()) : list_of({}));
        continue;
      }
      const auto* const tensor = BodyParameter<const Tensor*>::get(values[gradient.place]);
      TORCH_CHECK(tensor != nullptr || !is_wanted, "[", check.op(), "] ", gradient.name,
                  " must be given for its gradient, got none");
      specs.push_back(is_wanted ? like(*tensor) : absent(outputs[0].dtype));
    }
    return specs;
  }
};

bool takes_gradient(const OpDeclaration& row, const Schema::Field& field) {
  return is_tensor(field) && !row.is_integer(field.name) && !row.is_constant(field.name);
}

// Raises if the derived backward reads a tensor that is not saved. Parameters are always available.
void check_is_kept(const OpDeclaration& row, const std::string& op, const Schema::Field& field) {
  if (!is_tensor(field)) return;
  const auto slot = std::ranges::find(row.slots, field.name, &Slot::name);
  const bool is_slot = slot != row.slots.end();
  TORCH_CHECK(
      is_slot || row.has_parameter(field.name), "[", op, "] slots must have '", field.name,
      "', which the derivative of .bodies.decomposition reads, got none; or give .backward");
  TORCH_CHECK(!is_slot || slot->needed_for.empty(), "[", op, "] slot '", field.name,
              "' must be kept for all gradients where .backward is derived, got some of them");
}

// The products of a backward follow from those of `forward`. Every gradient but that of the matrix
// needs the gradient of the rows.
Products products_behind(const Products& forward, const std::vector<Gradient>& gradients) {
  Products products;
  for (const Product& product : forward.list) {
    std::vector<std::string> others;
    for (const Gradient& gradient : gradients) {
      if (gradient.name != product.matrix) others.push_back("grad_" + gradient.name);
    }
    products.list.push_back({product.matrix, std::move(others)});
  }
  return products;
}

}  // namespace

void complete(TypedOp& op) {
  const Schema schema = parse_schema(op.schema);
  op.shape.check(schema, op.schema, "shape");
  op.bodies.cpu.check(schema, op.schema, "cpu");
  op.bodies.cuda.check(schema, op.schema, "cuda");
  op.bodies.decomposition.check(schema, op.schema, "decomposition", /*may_leave_out=*/true);
  if (op.shape || schema.results.size() != 1 || is_list(schema.results[0])) return;
  const auto first = std::ranges::find_if(schema.arguments, is_tensor);
  // Another check raises for this.
  if (first == schema.arguments.end() || is_list(*first)) return;
  op.shape = ShapeRule::of_values([i = first - schema.arguments.begin(), name = first->name](
                                      const Checks& check, Values values) {
    return like_first(name, values[i].toTensor(), check);
  });
}

TypedOp default_backward(const OpDeclaration& row, const TypedOp& forward) {
  const Schema schema = parse_schema(forward.schema);
  Backward backward{.forward = forward};
  complete(backward.forward);
  Schema made{.name = schema.name + "_backward", .arguments = {{"Tensor", "grad_output"}}};
  for (const Schema::Field& field : schema.arguments) {
    backward.is_switch.push_back(is_switch(field));
    if (is_switch(field)) continue;
    check_is_kept(row, schema.name, field);
    if (takes_gradient(row, field)) {
      made.results.push_back({is_list(field) ? "Tensor[]" : "Tensor", "grad_" + field.name});
      backward.gradients.push_back({made.arguments.size(), field.name, is_list(field)});
    }
    made.arguments.push_back({field.type, field.name});
  }
  const size_t count = backward.gradients.size();
  backward.has_mask = count > 1;
  if (count > 1) made.arguments.push_back({"bool[" + std::to_string(count) + "]", "output_mask"});
  Products products = products_behind(forward.products, backward.gradients);
  return {.schema = to_text(made),
          .shape = ShapeRule::of_values(
              [backward = std::move(backward)](const Checks& check, Values values) {
                return backward.shape(check, values);
              }),
          .products = std::move(products)};
}

}  // namespace transformer_ops
