#include "wrappers/add_extra_input.h"

namespace transformer_ops {

void check_extra_input(const Checks& check, const Tensor& extra, const TensorSpec& sum) {
  check.compute_dtype("extra_input", extra);
  check.spec("extra_input", extra, sum);
}

std::optional<std::string> different_summands(const Match& match, int k, bool or_float32) {
  const int op = match.places[k];
  const DType main = match.analysis.dtypes()[op];
  const DType extra = match.analysis.extra_input_dtype(op, 0);
  if (main == DType::Unknown || extra == DType::Unknown) {
    return "the dtype of a summand is not known";
  }
  const bool widens = extra == DType::Float32 && promote(main, extra) == extra;
  if (main == extra || (or_float32 && widens)) return std::nullopt;
  return "the extra input is " + to_text(extra) + ", and what it is added to " + to_text(main);
}

}  // namespace transformer_ops
