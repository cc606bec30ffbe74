#include "op/row_rounding.h"

#include <ATen/ops/clone.h>

#include <algorithm>
#include <array>

#include "fuser/dtype.h"
#include "fuser/quantize.h"
#include "fuser/recipe.h"
#include "fuser/round_results.h"
#include "op/dtype.h"

namespace transformer_ops {
namespace {

// The kernel wrappers of the ops that round. They are looked up once.
const Bodies& round_bodies() {
  static const Bodies& bodies = find_typed_op(kRoundCall)->bodies;
  return bodies;
}
const Bodies& round_scaled_bodies() {
  static const Bodies& bodies = find_typed_op(std::string(kRoundValues) + kScaled)->bodies;
  return bodies;
}

// The dtype of `x` as an argument of those ops. The texts are made once, because each one in an
// argument allocates.
const c10::IValue& dtype_of(const Tensor& x) {
  static const std::vector<c10::IValue> names = [] {
    std::vector<c10::IValue> names;
    for (int i = 0; i <= static_cast<int>(DType::Float64); ++i) {
      names.emplace_back(to_text(static_cast<DType>(i)));
    }
    return names;
  }();
  return names[static_cast<size_t>(to_dtype(x.scalar_type()))];
}

// ---- by block scales

struct Formats {
  const c10::IValue &rows, &columns;

  explicit Formats(Values added) : rows(added[0]), columns(added[1]) {}
  bool has_columns() const { return !columns.toStringView().empty(); }
};

void check_blocks(const Checks& check, const c10::IValue& format) {
  TORCH_CHECK(NumberFormat::find(format.toStringView()).rows_of_block() > 0, "[", check.op(),
              "] format must be one whose scales are those of blocks, got '", format.toStringView(),
              "'");
}

void check_formats(const Checks& check, Values added) {
  const Formats formats(added);
  check_blocks(check, formats.rows);
  if (formats.has_columns()) check_blocks(check, formats.columns);
}

TensorSpecs columns_shape(const TensorSpec& first, Values added) {
  return {Formats(added).has_columns() ? first : absent(first.dtype)};
}

Tensors blocks_decomposition(const Checks& check, const Tensor& x, Values added) {
  const Formats formats(added);
  const auto round = [&](const c10::IValue& format) {
    std::array<c10::IValue, 3> values = {x, format, dtype_of(x)};
    return round_bodies().decomposition(check, values)[0];
  };
  return {round(formats.rows), formats.has_columns() ? round(formats.columns) : x.new_empty({0})};
}

int64_t rows_of_blocks(Values added) {
  const Formats formats(added);
  const int64_t rows = NumberFormat::find(formats.rows.toStringView()).rows_of_block();
  if (!formats.has_columns()) return rows;
  return std::max(rows, NumberFormat::find(formats.columns.toStringView()).rows_of_block());
}

void round_blocks(Body Bodies::*on_device, const Call& call, const Tensor& x, Values added,
                  const Tensors& results) {
  const Formats formats(added);
  const auto round_to = [&](const c10::IValue& format, const Tensor& to) {
    std::array<c10::IValue, 3> values = {x, format, dtype_of(x)};
    Results rounded{{to}};
    (round_bodies().*on_device)(call, values, rounded);
  };
  if (formats.has_columns()) round_to(formats.columns, results[0]);
  round_to(formats.rows, x);
}

// ---- by one scale for the whole tensor

struct Scale {
  const c10::IValue &scale, &position, &format;
  bool with_amax;

  explicit Scale(Values added)
      : scale(added[0]), position(added[1]), format(added[2]), with_amax(added[3].toBool()) {}

  std::array<c10::IValue, 5> arguments(const Tensor& x) const {
    return {x, scale, position, format, dtype_of(x)};
  }
};

void check_scale(const Checks& check, Values added) {
  const Scale scale(added);
  check.spec("fp8_scale", scale.scale.toTensor(), {{kScalePositions}, at::kFloat});
  const int64_t position = scale.position.toInt();
  TORCH_CHECK(position >= 0 && position < kScalePositions, "[", check.op(),
              "] fp8_position must be 0, 1 or 2, got ", position);
  TORCH_CHECK(NumberFormat::find(scale.format.toStringView()).has_one_scale(), "[", check.op(),
              "] format must have one scale for a tensor, got '", scale.format.toStringView(), "'");
}

TensorSpecs numbers_shape(const TensorSpec&, Values added) {
  const TensorSpec number = {{}, at::kFloat};
  return {number, Scale(added).with_amax ? number : absent(at::kFloat)};
}

Tensors scaled_decomposition(const Checks& check, const Tensor& x, Values added) {
  const Scale scale(added);
  std::array values = scale.arguments(x);
  Tensors found = round_scaled_bodies().decomposition(check, values);
  if (!scale.with_amax) found.back() = found.back().new_empty({0});
  return found;
}

int64_t one_row(Values) { return 1; }

void round_by_scale(Body Bodies::*on_device, const Call& call, const Tensor& x, Values added,
                    const Tensors& results) {
  // The CPU's kernel wrapper reads the elements before it writes them.
  const Tensor exact = on_device == &Bodies::cpu ? x : x.clone();
  const Scale scale(added);
  std::array values = scale.arguments(exact);
  Results rounded{{x, results[0], scale.with_amax ? results[1] : Tensor()}};
  (round_scaled_bodies().*on_device)(call, values, rounded);
}

}  // namespace

const std::vector<RowRounding>& row_roundings() {
  static const std::vector<RowRounding> rows = {
      {.suffix = kRounded,
       .arguments = {{"str", "format"}, {"str", "column_format"}},
       .results = {"columns"},
       .check = check_formats,
       .shape = columns_shape,
       .decomposition = blocks_decomposition,
       .rows_of_block = rows_of_blocks,
       .run = round_blocks},
      {.suffix = kRoundedBy,
       .arguments = {{"Tensor", "fp8_scale"},
                     {"int", "fp8_position"},
                     {"str", "format"},
                     {"bool", "with_amax"}},
       .results = {"decodes", "amax"},
       .check = check_scale,
       .shape = numbers_shape,
       .decomposition = scaled_decomposition,
       .rows_of_block = one_row,
       .run = round_by_scale},
  };
  return rows;
}

}  // namespace transformer_ops
