#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fuser/attribute.h"
#include "fuser/recipe.h"
#include "fuser/schema.h"

namespace transformer_ops {

// The dtype that an op computes in and returns (ops.md, "Dtypes and shapes").
enum class DTypeRule {
  Keep,       // the input's, also under autocast
  Autocast,   // the input's, or the autocast dtype
  Parameter,  // the first parameter's, or the autocast dtype; parameters are cast too
  Promote,    // that of an addition with the extra input
};

// A tensor that is saved for backward. `needed_for` lists the gradients ("input" or a parameter)
// that read it; if empty, all gradients do. With `when`, backward reads it only if that attribute
// has that value; its argument is a `Tensor?` then. So it is with `of_exact`: where backward reads
// decoded tensors, the slot is not saved, and backward computes it again.
struct Slot {
  struct When {
    std::string attribute;
    Attribute value;
  };

  std::string name;
  std::vector<std::string> needed_for = {};
  std::optional<When> when = {};
  bool of_exact = false;

  bool is_read_with(const Attributes& attributes) const;
};

// A buffer of the caller, outside autograd. If the attribute is set, backward adds the parameter's
// gradient to the buffer instead of returning it.
struct State {
  std::string name;
  std::string parameter;
  std::string attribute;
  // There is no buffer: the host stores the call that computes the gradient, and runs it on demand.
  bool later = false;

  // Does the value's name refer to this state, or to that of one tensor of a listed parameter?
  bool has_value(const std::string& value) const;
};

// A parameter that is a list of tensors <parameter>0, <parameter>1, ...; an attribute says how
// many. Schemas take it as `Tensor[]`. An optional list that is not given is empty.
struct ListedParameter {
  std::string parameter;
  std::string count;
  // If this flag is set, the list is a single tensor with the parameter's own name.
  std::string single = {};
  bool optional = false;
};

// A flag of ops whose input is saved as E4M3 codes with one scale, also if the caller holds it,
// unless another op saves it exactly.
inline constexpr const char* kCacheQuantizedInput = "cache_quantized_input";

// The planner's part of an op's declaration. Schema fields are bound by name:
//   forward   input, a parameter, an attribute, an extra input, save_<slot> (is it needed?),
//             training -> output, an extra output, or a slot
//   backward  grad_output, grad_<extra output>, a slot, a parameter, an attribute, output_mask,
//             input_shape, training -> grad_input, grad_<parameter>, grad_<extra input>
//   recompute grad_output, input, a slot, a parameter, an attribute -> output
// A parameter or an extra input is optional if forward takes it as `Tensor?`. A list is bound to
// `Tensor[]` fields: all its tensors, and a gradient for each.
// Without a forward, or without grad_input, the tensor is passed through.
struct OpDeclaration {
  std::string kind;
  std::string summary;
  std::vector<std::string> parameters = {};
  std::vector<ListedParameter> lists = {};  // the parameters that are lists
  std::vector<std::string> attributes = {};
  // Attributes that are false unless an op sets them.
  std::vector<std::string> flags = {};
  std::vector<std::string> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  std::vector<std::string> integers = {};  // extra tensors of integers, which have no gradient
  // Extra inputs without a gradient, such as a mask. A call raises if one requires a gradient.
  std::vector<std::string> constants = {};
  std::vector<std::string> detached = {};  // other extra outputs that have no gradient
  std::vector<Slot> slots = {};
  std::vector<State> states = {};
  std::string forward = {};
  std::string backward = {};
  // Recomputes the output of a cheap op in backward. It takes the gradient of the step that reads
  // the output, so that a compiler neither merges it with forward nor moves it there.
  std::string recompute = {};
  // If the output does not follow from saved tensors, forward saves the op's smaller input.
  bool recompute_adds_input = false;
  // Forward passes the tensor through; decomposed plans call its typed op for the derivative.
  bool hands_on = false;
  DTypeRule dtype = DTypeRule::Keep;
  // Parameters that the op reads in their own dtype, unless autocast is on.
  std::vector<std::string> own_dtype = {};
  // Is the output in the accumulate dtype, as a loss is?
  bool accumulates_output = false;
  // For a product y = x W^T, the names of x and W. A recipe quantizes these and the gradient of y.
  // An op without typed ops that names its input here is no product: it rounds its main tensor if
  // its attribute `rounds_input` is set, and the gradient if `rounds_grad_output` is.
  std::vector<std::string> operands = {};
  // Recipes leave the operands as they are; weights that are encoded are decoded.
  bool exact_operands = false;
  // Do <forward>_scaled and <backward>_scaled exist, for operands with a scale?
  bool scalable = false;
  // Does the op do nothing in this mode? Plans then pass the tensor through, and patterns skip the
  // op.
  std::function<bool(const Attributes&, bool training)> inactive = {};
  // The width of the last dimension after the op; -1 if it is unknown.
  std::function<int64_t(const Attributes&, int64_t width)> width = {};
  // Overrides slot_bits() for slots that it is wrong for.
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
  bool is_constant(const std::string& extra_tensor) const;
  // Does a plan depend on the op's training flag?
  bool asks_training() const;
  bool is_detached(const std::string& extra_output) const;
  // Null if the parameter is a single tensor.
  const ListedParameter* list_of(const std::string& parameter) const;
  // The names of a parameter's tensors, and those of all parameters. Throws PlanError if a count is
  // less than 1.
  std::vector<std::string> tensors_of(const std::string& parameter, const Attributes&) const;
  std::vector<std::string> parameter_tensors(const Attributes& attributes) const;
  // The names of the slots, with one for each tensor of a list.
  std::vector<std::string> slot_tensors(const Attributes& attributes) const;
  // The parameter that a tensor of this name belongs to; empty if there is none.
  std::string parameter_of(const std::string& tensor) const;
  // The state that takes the gradient of a parameter; null if autograd does.
  const State* state_of(const std::string& parameter, const Attributes& attributes) const;
  // Does backward read an argument to compute the gradients of its output mask?
  bool is_read(const std::string& argument, const std::vector<bool>& mask) const;
  // May the parameter, tensor of a list, extra input or attribute be None? Ops omit such an
  // attribute.
  bool is_optional(const std::string& name) const;
};

// The argument that is true while the op's module is in training mode.
inline constexpr const char* kTraining = "training";

// All declarations by kind. A row never moves.
const std::map<std::string, OpDeclaration>& declarations();
const OpDeclaration& declaration(const std::string& kind);
bool is_declared(const std::string& kind);
// The row with that forward typed op; null if there is none.
const OpDeclaration* find_declaration_of(const std::string& forward);
// The row with that backward typed op; null if there is none.
const OpDeclaration* find_declaration_of_backward(const std::string& backward);
// The row with its schemas parsed. Throws PlanError if two things have one name, or if `integers`
// names something other than extra tensors.
OpDeclaration checked(OpDeclaration row);
// Adds the checked row. Throws PlanError if the kind is already declared.
void add_declaration(OpDeclaration row);

// Does the recipe (or null) quantize the op's operands, or make it round its main tensor?
bool is_quantized(const OpDeclaration& row, int op, const Recipe* recipe);

// The bits that a saved slot takes for each row of the op's input, which has `width` elements of
// `element_bits` each. An input or output takes all of it, a mask one bit an element, a parameter
// none (it is stored anyway), and any other slot one statistic. -1 if it depends on an unknown
// width.
int64_t slot_bits(const OpDeclaration& row, const std::string& slot, int64_t width,
                  int64_t element_bits);

}  // namespace transformer_ops
