#pragma once

#include <string>
#include <vector>

#include "fuser/plan.h"

namespace transformer_ops {

// Makes ops round their results, if only products read these, and read them rounded:
//   x1, s0.rstd = rms_norm(x0, ...)
//   t1.rounded_input = quantize_dequantize(x1, "mx e4m3", "bfloat16")
// becomes
//   x1, s0.rstd, t0.unused = rms_norm.rounded(x0, ..., "mx e4m3", "")
// and a gradient that is rounded by rows and by columns becomes
//   g2, t1.rounded_grad_output_columns =
//       swiglu_backward.rounded(g3, s2.input, 0, "mx e4m3", "mx e4m3 32x1")
// Under delayed scaling the scale is known before the tensor:
//   t1.rounded_input, t1.rounded_input_scale, st1.fp8_amax =
//       quantize_values_scaled(x1, st1.fp8_scale, 0, "e4m3", "bfloat16")
// becomes
//   x1, s0.rstd, t1.rounded_input_scale, st1.fp8_amax =
//       rms_norm.rounded_by(x0, ..., st1.fp8_scale, 0, "e4m3", true)
// `dtypes`: those of the main tensor at each boundary. Formats whose scale follows from the whole
// tensor, numbers rounded in another dtype, and products of groups do not change.
void round_results(Plan& plan, const std::vector<DType>& dtypes);

// The suffixes of ops that round their first result, by block scales or by a known scale
// (op/row_rounding.h has their arguments and results).
inline constexpr const char* kRounded = ".rounded";
inline constexpr const char* kRoundedBy = ".rounded_by";

// Properties of typed ops that plans call.
struct TargetTraits {
  bool rounds = false;      // <target>.rounded and <target>.rounded_by exist
  bool reads_first = true;  // false: the first argument only ties the op to backward
};
void set_traits(const std::string& target, TargetTraits traits);

}  // namespace transformer_ops
