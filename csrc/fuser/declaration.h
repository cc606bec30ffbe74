#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fuser/attribute.h"
#include "fuser/recipe.h"
#include "fuser/schema.h"

namespace transformer_ops {

// Which dtype an op computes and returns (ops.md, "Dtypes and shapes").
enum class DTypeRule {
  Keep,       // its input's, also under autocast
  Autocast,   // its input's, or the autocast dtype
  Parameter,  // its first parameter's, or the autocast dtype; parameters are cast too
  Promote,    // as an addition with the extra input
};

// A tensor that backward reads, by name; `needed_for` lists the gradients ("input" or a parameter)
// that read it, empty for all of them.
struct Slot {
  std::string name;
  std::vector<std::string> needed_for = {};
};

// A buffer of the caller's, outside autograd: where the attribute is set, backward adds the
// gradient of the parameter to it in place of giving it.
struct State {
  std::string name;
  std::string parameter;
  std::string attribute;
  // No buffer: the host keeps the call that gives the gradient, and runs it when it is asked to.
  bool later = false;

  // Is a value of that name this state, or that of one tensor of a listed parameter?
  bool has_value(const std::string& value) const;
};

// A parameter that is a list: tensors <parameter>0, <parameter>1, ..., as many as an attribute
// says, which schemas take as `Tensor[]`. A missing one, where it may be missing, is an empty list.
struct ListedParameter {
  std::string parameter;
  std::string count;
  // Where this flag is set, one tensor of the parameter's own name is all of the list.
  std::string single = {};
  bool optional = false;
};

// A flag of ops whose input is kept as codes of E4M3 with one scale, whoever holds it, unless
// another op has it kept as it is.
inline constexpr const char* kCacheQuantizedInput = "cache_quantized_input";

// The planner's half of an op's one declaration. Schema fields are bound by name:
//   forward   input, a parameter, an attribute, an extra input, save_<slot> (is it needed?)
//             -> output, an extra output, or a slot
//   backward  grad_output, grad_<extra output>, a slot, a parameter, an attribute, output_mask,
//             input_shape -> grad_input, grad_<parameter>, grad_<extra input>
//   recompute grad_output, input, a slot, a parameter, an attribute -> output
// A parameter or an extra input may be None where forward takes it as `Tensor?`. Of a list, fields
// are `Tensor[]`: all its tensors, and a gradient for each.
// An absent forward, or an absent grad_input, hands the tensor on.
struct OpDeclaration {
  std::string kind;
  std::string summary;
  std::vector<std::string> parameters = {};
  std::vector<ListedParameter> lists = {};  // of the parameters
  std::vector<std::string> attributes = {};
  // Attributes that are false where an op has them not.
  std::vector<std::string> flags = {};
  std::vector<std::string> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  std::vector<std::string> integers = {};  // extra tensors that hold integers: no gradients
  std::vector<Slot> slots = {};
  std::vector<State> states = {};
  std::string forward = {};
  std::string backward = {};
  // Of a cheap producer: its output again, in backward. It takes the gradient that the reading step
  // is given, so that a compiler neither merges it with forward nor moves it there.
  std::string recompute = {};
  // Where nothing kept leads to its output, forward saves its input, which is smaller.
  bool recompute_adds_input = false;
  // Forward hands the tensor on; its typed op is what decomposed plans call for the derivative.
  bool hands_on = false;
  DTypeRule dtype = DTypeRule::Keep;
  // Of a product y = x W^T: the names of x and W, which a recipe asks to be quantized, as it does
  // the gradient of y. An op without typed ops that names its input is no product: it rounds its
  // main tensor, or the gradient, where its attribute `rounds_input`, or `rounds_grad_output`, says
  // so.
  std::vector<std::string> operands = {};
  // Whether there are <forward>_scaled and <backward>_scaled, for operands that come with a scale.
  bool scalable = false;
  // Does nothing in this mode: planned as a plain hand-over, and patterns pass over it.
  std::function<bool(const Attributes&, bool training)> inactive = {};
  // Width of the last dimension after the op; -1 where it cannot be known.
  std::function<int64_t(const Attributes&, int64_t width)> width = {};
  // Where slot_bits() is wrong for one of its slots.
  std::function<int64_t(const std::string& slot, int64_t width, int64_t element_bits)> slot_bits =
      {};

  Schema forward_schema = {};
  Schema backward_schema = {};
  Schema recompute_schema = {};

  bool has_parameter(const std::string& name) const;
  bool has_extra_input(const std::string& name) const;
  bool has_extra_output(const std::string& name) const;
  bool has_attribute(const std::string& name) const;
  bool has_flag(const std::string& name) const;
  bool has_slot(const std::string& name) const;
  bool has_operand(const std::string& name) const;
  bool is_integer(const std::string& extra_tensor) const;
  // Null where the parameter is one tensor.
  const ListedParameter* list_of(const std::string& parameter) const;
  // The names of a parameter's tensors, and those of all parameters. Throws PlanError for a count
  // of less than 1.
  std::vector<std::string> tensors_of(const std::string& parameter, const Attributes&) const;
  std::vector<std::string> parameter_tensors(const Attributes& attributes) const;
  // The names of the slots, a list's one by one.
  std::vector<std::string> slot_tensors(const Attributes& attributes) const;
  // The parameter that a tensor of such a name belongs to; empty where there is none.
  std::string parameter_of(const std::string& tensor) const;
  // Which state takes the gradient of a parameter; null where autograd does.
  const State* state_of(const std::string& parameter, const Attributes& attributes) const;
  // Does backward read an argument for the gradients that its output mask names?
  bool is_read(const std::string& argument, const std::vector<bool>& mask) const;
  // May the parameter, tensor of one, extra input or attribute be None? Ops leave out such an
  // attribute.
  bool is_optional(const std::string& name) const;
};

// All declarations by kind; a row stays where it is.
const std::map<std::string, OpDeclaration>& declarations();
const OpDeclaration& declaration(const std::string& kind);
bool is_declared(const std::string& kind);
// The row whose forward is that typed op; null where there is none.
const OpDeclaration* find_declaration_of(const std::string& forward);
// The same for the typed op of backward.
const OpDeclaration* find_declaration_of_backward(const std::string& backward);
// The row with its schemas parsed. Throws PlanError for two things of one name, and for `integers`
// that are no extra tensors.
OpDeclaration checked(OpDeclaration row);
// Adds the checked row. Throws PlanError for a kind declared twice.
void add_declaration(OpDeclaration row);

// Does the recipe (or null) have the op take quantized operands, or round its main tensor?
bool is_quantized(const OpDeclaration& row, int op, const Recipe* recipe);

// Bits a saved slot takes per row of the op's input, `width` elements of `element_bits` each: all
// of it for an input or output, one an element for a mask, none for a parameter (it is kept
// anyway), else one statistic. -1 where the width is unknown (-1) and matters.
int64_t slot_bits(const OpDeclaration& row, const std::string& slot, int64_t width,
                  int64_t element_bits);

}  // namespace transformer_ops
