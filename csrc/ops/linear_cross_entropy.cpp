// LinearCrossEntropy: the cross entropy of x W^T + b, by chunks of rows. A loss that is one number
// may have its gradients made in forward: backward then only scales them.
#include "wrappers/linear_cross_entropy.h"

#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops::ops::linear_cross_entropy {
namespace {

// When the gradients are computed.
bool in_forward(const Checks& check, std::string_view gradients_in,
                const CrossEntropyOptions& options) {
  TORCH_CHECK(gradients_in == "forward" || gradients_in == "backward", "[", check.op(),
              "] gradients_in must be forward or backward, got '", gradients_in, "'");
  const bool is_forward = gradients_in == "forward";
  TORCH_CHECK(!is_forward || !options.has_rows(), "[", check.op(),
              "] gradients_in must be backward where reduction is none, got 'forward'");
  return is_forward;
}

// The log-sum-exp of each row or, if forward makes the gradients, the number that they lack.
TensorSpec statistics_spec(const CrossEntropyOperands& operands, bool is_forward) {
  const auto dtype = accumulate_dtype(operands.input.scalar_type());
  if (is_forward) return {{1}, dtype};
  return {c10::SymDimVector(operands.target.sym_sizes()), dtype};
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor* bias, const Tensor& target, int64_t ignore_index,
                          double label_smoothing, std::optional<double> softcap, double z_loss,
                          std::string_view reduction, std::string_view gradients_in,
                          std::optional<int64_t> chunk, bool save_statistics, bool save_grads_input,
                          bool save_grads_weight, bool save_grads_bias) {
  const CrossEntropyOperands operands{input, weight, bias, target};
  const CrossEntropyOptions options{ignore_index, label_smoothing, softcap, z_loss, reduction};
  check_cross_entropy(check, operands, options, chunk);
  const bool is_forward = in_forward(check, gradients_in, options);
  const auto dtype = accumulate_dtype(input.scalar_type());
  const auto made = [&](bool wanted, const Tensor* tensor) {
    const bool is_made = wanted && is_forward && tensor != nullptr;
    return is_made ? like(*tensor) : absent(input.scalar_type());
  };
  return {cross_entropy_output(operands, options),
          {c10::SymDimVector(target.sym_sizes()), dtype},
          {{}, dtype},
          save_statistics ? statistics_spec(operands, is_forward) : absent(dtype),
          made(save_grads_input, &input),
          made(save_grads_weight, &weight),
          made(save_grads_bias, bias)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <auto run>
Forward forward(const Checks& check, const Tensor& input, const Tensor& weight, const Tensor* bias,
                const Tensor& target, int64_t ignore_index, double label_smoothing,
                std::optional<double> softcap, double z_loss, std::string_view reduction,
                std::string_view gradients_in, std::optional<int64_t> chunk, bool save_statistics,
                bool save_grads_input, bool save_grads_weight, bool save_grads_bias) {
  const CrossEntropyOptions options{ignore_index, label_smoothing, softcap, z_loss, reduction};
  const bool is_forward = gradients_in == "forward";
  CrossEntropyResults found = run(check, {input, weight, bias, target}, options, chunk,
                                  {is_forward && save_grads_input, is_forward && save_grads_weight,
                                   is_forward && save_grads_bias && bias != nullptr});
  Tensor statistics = is_forward ? found.factor : found.lse;
  const auto or_empty = [&](bool is_there, const Tensor& tensor) {
    if (is_there && tensor.defined()) return tensor;
    return empty({0}, input.scalar_type(), input.device());
  };
  auto& [grads_input, grads_weight, grads_bias] = found.gradients;
  if (!save_statistics) statistics = empty({0}, found.lse.scalar_type(), input.device());
  return {found.output,
          found.log_probs,
          found.accuracy,
          statistics,
          or_empty(save_grads_input, grads_input),
          or_empty(save_grads_weight, grads_weight),
          or_empty(save_grads_bias, grads_bias)};
}

std::tuple<Tensor, Tensor, Tensor> forward_decomposed(
    const Tensor& input, const Tensor& weight, const Tensor* bias, const Tensor& target,
    int64_t ignore_index, double label_smoothing, std::optional<double> softcap, double z_loss,
    std::string_view reduction, std::string_view, std::optional<int64_t>, bool, bool, bool, bool) {
  return cross_entropy_decomposed({input, weight, bias, target},
                                  {ignore_index, label_smoothing, softcap, z_loss, reduction});
}

// A gradient that forward has made. `last_sizes` are its last sizes where others tell them, else
// -1.
void check_made(const Checks& check, const char* name, const Tensor* made, bool wanted,
                std::initializer_list<c10::SymInt> last_sizes, bool is_matrix) {
  TORCH_CHECK(made != nullptr || !wanted, "[", check.op(), "] ", name,
              " must be given where gradients_in is forward, got none");
  if (made == nullptr) return;
  check.compute_dtype(name, *made);
  const int64_t dims = std::ssize(last_sizes);
  TORCH_CHECK(is_matrix ? made->dim() == dims : made->dim() >= dims, "[", check.op(), "] ", name,
              " must have ", is_matrix ? "" : "at least ", dims, " dimensions, got shape ",
              made->sym_sizes());
  int64_t place = -dims;
  for (const c10::SymInt& size : last_sizes) {
    TORCH_CHECK(size == -1 || made->sym_size(place) == size, "[", check.op(), "] ", name,
                " must have dimension ", place, " of size ", size,
                " as the other gradients, got shape ", made->sym_sizes());
    ++place;
  }
}

// The gradients that forward has made must fit each other.
void check_all_made(const Checks& check, const Tensor* grads_input, const Tensor* grads_weight,
                    const Tensor* grads_bias, CrossEntropyMask wanted) {
  const bool has_weight = grads_weight != nullptr && grads_weight->dim() == 2;
  const c10::SymInt classes = has_weight ? grads_weight->sym_size(0) : c10::SymInt(-1);
  const c10::SymInt columns = has_weight ? grads_weight->sym_size(1) : c10::SymInt(-1);
  check_made(check, "grads_input", grads_input, wanted[0], {columns}, /*is_matrix=*/false);
  check_made(check, "grads_weight", grads_weight, wanted[1], {-1, -1}, /*is_matrix=*/true);
  check_made(check, "grads_bias", grads_bias, wanted[2], {classes}, /*is_matrix=*/true);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor* weight, const Tensor* bias, const Tensor* target,
                           const Tensor& statistics, const Tensor* grads_input,
                           const Tensor* grads_weight, const Tensor* grads_bias,
                           int64_t ignore_index, double label_smoothing,
                           std::optional<double> softcap, double z_loss, std::string_view reduction,
                           std::string_view gradients_in, std::optional<int64_t> chunk,
                           CrossEntropyMask wanted) {
  const CrossEntropyOptions options{ignore_index, label_smoothing, softcap, z_loss, reduction};
  const auto spec_of = [&](bool is_wanted, const Tensor* tensor) {
    return is_wanted ? like(*tensor) : absent(grad_output.scalar_type());
  };
  check.compute_dtype("grad_output", grad_output);
  if (in_forward(check, gradients_in, options)) {
    const auto dtype = grad_output.scalar_type();
    check.spec("grad_output", grad_output, {{}, dtype});
    check.spec("statistics", statistics, {{1}, dtype});
    check_all_made(check, grads_input, grads_weight, grads_bias, wanted);
    return {spec_of(wanted[0], grads_input), spec_of(wanted[1], grads_weight),
            spec_of(wanted[2], grads_bias)};
  }
  TORCH_CHECK(input != nullptr && weight != nullptr && target != nullptr, "[", check.op(),
              "] input, weight and target must be given where gradients_in is backward, got none");
  TORCH_CHECK(bias != nullptr || !wanted[2], "[", check.op(),
              "] bias must be given for its gradient, got none");
  const CrossEntropyOperands operands{*input, *weight, bias, *target};
  check_cross_entropy(check, operands, options, chunk);
  check.spec("grad_output", grad_output, cross_entropy_output(operands, options));
  check.spec("statistics", statistics, statistics_spec(operands, /*is_forward=*/false));
  return {spec_of(wanted[0], input), spec_of(wanted[1], weight), spec_of(wanted[2], bias)};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& grad_output, const Tensor* input, const Tensor* weight, const Tensor* bias,
    const Tensor* target, const Tensor& statistics, std::optional<Tensor> grads_input,
    std::optional<Tensor> grads_weight, std::optional<Tensor> grads_bias, int64_t ignore_index,
    double label_smoothing, std::optional<double> softcap, double z_loss,
    std::string_view reduction, std::string_view gradients_in, std::optional<int64_t> chunk,
    CrossEntropyMask wanted) {
  CrossEntropyGradients found;
  if (gradients_in == "forward") {
    const Tensor factor = gradient_factor(grad_output, statistics);
    std::optional<Tensor>* const made[] = {&grads_input, &grads_weight, &grads_bias};
    for (size_t i = 0; i < found.size(); ++i) {
      if (wanted[i]) found[i] = scaled_gradient(*std::move(*made[i]), factor);
      made[i]->reset();
    }
  } else {
    found = run(grad_output, {*input, *weight, bias, *target}, statistics,
                {ignore_index, label_smoothing, softcap, z_loss, reduction}, chunk, wanted);
  }
  for (Tensor& gradient : found) {
    if (gradient.defined()) continue;
    gradient = empty({0}, grad_output.scalar_type(), grad_output.device());
  }
  return {found[0], found[1], found[2]};
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(
    const Tensor& grad_output, const Tensor* input, const Tensor* weight, const Tensor* bias,
    const Tensor* target, const Tensor& statistics, const Tensor* grads_input,
    const Tensor* grads_weight, const Tensor* grads_bias, int64_t ignore_index,
    double label_smoothing, std::optional<double> softcap, double z_loss,
    std::string_view reduction, std::string_view gradients_in, std::optional<int64_t>,
    CrossEntropyMask wanted) {
  std::array<Tensor, 3> found;
  if (gradients_in == "forward") {
    const Tensor* const made[] = {grads_input, grads_weight, grads_bias};
    for (size_t i = 0; i < found.size(); ++i) {
      if (wanted[i]) found[i] = *made[i] * gradient_factor(grad_output, statistics);
    }
  } else {
    const CrossEntropyOptions options{ignore_index, label_smoothing, softcap, z_loss, reduction};
    const auto loss = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
      return std::get<0>(
          cross_entropy_decomposed({x, w, bias != nullptr ? &b : nullptr, *target}, options));
    };
    found = gradients(loss, grad_output, *input, *weight, bias != nullptr ? *bias : statistics);
  }
  const auto take = [&](size_t i) { return wanted[i] ? found[i] : Tensor(); };
  return {take(0), take(1), take(2)};
}

// Double backward has no logits to differentiate if forward made the gradients.
Tensor replay(const ReplayCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(call.slot("target").defined(),
                              "[LinearCrossEntropy] second derivatives must have "
                              "gradients_in=\"backward\", got \"forward\"");
  return {};
}

int64_t bits_of(const std::string& slot, int64_t width, int64_t element_bits) {
  if (slot == "input" || slot == "grads_input") return width < 0 ? -1 : width * element_bits;
  // The gradients of parameters do not depend on the rows.
  if (slot == "grads_weight" || slot == "grads_bias") return 0;
  return slot == "target" ? 64 : std::max<int64_t>(32, element_bits);
}

const Slot::When kInForward{"gradients_in", "forward"}, kInBackward{"gradients_in", "backward"};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "LinearCrossEntropy",
                    .summary = "the cross entropy of x W^T + b, by chunks of rows",
                    .parameters = {"weight", "bias"},
                    .attributes = {"in_features", "num_classes", "ignore_index", "label_smoothing",
                                   "softcap", "z_loss", "reduction", "gradients_in", "chunk"},
                    .extra_inputs = {"target"},
                    .extra_outputs = {"log_probs", "accuracy"},
                    .integers = {"target"},
                    .detached = {"log_probs", "accuracy"},
                    .slots = {{"input", {}, kInBackward},
                              {"weight", {}, kInBackward},
                              {"bias", {}, kInBackward},
                              {"target", {}, kInBackward},
                              {"statistics"},
                              {"grads_input", {"input"}, kInForward},
                              {"grads_weight", {"weight"}, kInForward},
                              {"grads_bias", {"bias"}, kInForward}},
                    .dtype = DTypeRule::Parameter,
                    .accumulates_output = true,
                    .width = [](const Attributes&, int64_t) { return int64_t{-1}; },
                    .slot_bits = bits_of},
    .forward = {.schema = "linear_cross_entropy(Tensor input, Tensor weight, Tensor? bias, "
                          "Tensor target, int ignore_index, float label_smoothing, "
                          "float? softcap, float z_loss, str reduction, str gradients_in, "
                          "int? chunk, bool save_statistics, bool save_grads_input, "
                          "bool save_grads_weight, bool save_grads_bias) -> (Tensor output, "
                          "Tensor log_probs, Tensor accuracy, Tensor statistics, "
                          "Tensor grads_input, Tensor grads_weight, Tensor grads_bias)",
                .shape = forward_shape,
                .any_strides = {"weight"},
                .products = {.list = {{"weight"}}, .rows = "input"},
                .bodies = {forward<cross_entropy_cpu>, forward<cross_entropy_cuda>,
                           forward_decomposed}},
    .backward = {.schema = "linear_cross_entropy_backward(Tensor grad_output, Tensor? input, "
                           "Tensor? weight, Tensor? bias, Tensor? target, Tensor statistics, "
                           "Tensor? grads_input, Tensor? grads_weight, Tensor? grads_bias, "
                           "int ignore_index, float label_smoothing, float? softcap, "
                           "float z_loss, str reduction, str gradients_in, int? chunk, "
                           "bool[3] output_mask) -> (Tensor grad_input, Tensor grad_weight, "
                           "Tensor grad_bias)",
                 .shape = backward_shape,
                 .any_strides = {"weight"},
                 .products = {.list = {{"weight"}}, .rows = "statistics", .rows_are_numbers = true},
                 .bodies = {backward<cross_entropy_backward_cpu>,
                            backward<cross_entropy_backward_cuda>, backward_decomposed},
                 .differentiable = false},
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::linear_cross_entropy
