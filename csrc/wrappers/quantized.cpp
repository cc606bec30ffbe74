#include "wrappers/quantized.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/where.h>

#include "wrappers/encoded.h"

namespace transformer_ops {
namespace {

using kernel::Element;
using kernel::Format;
using kernel::ScaleRule;

c10::SymInt row_count(c10::SymIntArrayRef sizes) {
  c10::SymInt rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows = rows * sizes[i];
  return rows;
}
c10::SymInt width_of(c10::SymIntArrayRef sizes) { return sizes.empty() ? 1 : sizes.back(); }

c10::SymInt parts(const c10::SymInt& size, int64_t part) { return (size + (part - 1)) / part; }

std::string names() {
  std::string text;
  for (const Format& format : kernel::kFormats) {
    text += std::string(text.empty() ? "'" : ", '") + format.name + "'";
  }
  return text;
}

// Float64 rounds to odd, so that lost bits set the last bit.
Tensor to_float(const Tensor& input) {
  const Tensor nearest = input.to(at::kFloat);
  if (input.scalar_type() != at::kDouble) return nearest;
  const Tensor back = nearest.to(at::kDouble), bits = nearest.view(at::kInt);
  const Tensor odd = (bits - (back.abs() > input.abs()).to(at::kInt)).bitwise_or(1);
  return at::where((back == input).logical_or(input.isnan()), bits, odd).view(at::kFloat);
}

// Blocks as [down, block_rows, across, block_columns], padded with zeros.
struct Blocks {
  c10::SymInt rows, h, block_rows, block_columns, down, across;

  // `by_rows`: if the tensor is one block, each of its rows is one.
  Blocks(const Format& format, c10::SymIntArrayRef sizes, bool by_rows = false)
      : rows(row_count(sizes)),
        h(width_of(sizes)),
        block_rows(!format.per_tensor() ? c10::SymInt(format.block_rows)
                   : by_rows            ? c10::SymInt(1)
                                        : rows.max(1)),
        block_columns(format.per_tensor() ? h.max(1) : c10::SymInt(format.block_columns)),
        down((rows + block_rows - 1) / block_rows),
        across((h + block_columns - 1) / block_columns) {}

  Tensor split(const Tensor& tensor) const {
    const Tensor flat = tensor.reshape_symint({rows, h});
    const std::vector<c10::SymInt> pad = {0, across * block_columns - h, 0,
                                          down * block_rows - rows};
    return at::constant_pad_nd_symint(flat, pad).view_symint(
        {down, block_rows, across, block_columns});
  }
  Tensor join(const Tensor& blocks) const {
    return blocks.reshape_symint({down * block_rows, across * block_columns})
        .slice_symint(0, 0, rows)
        .slice_symint(1, 0, h);
  }
};

// Packs two codes into a byte.
Tensor pack(const Format& format, const Tensor& codes) {
  Tensor even = codes.slice_symint(1, 0, std::nullopt, 2);
  const Tensor odd = codes.slice_symint(1, 1, std::nullopt, 2);
  const std::vector<c10::SymInt> pad = {0, even.sym_size(1) - odd.sym_size(1)};
  Tensor next = at::constant_pad_nd_symint(odd, pad);
  if (format.element == Element::NF4) std::swap(even, next);
  return even.bitwise_or(next.bitwise_left_shift(4));
}
Tensor unpack(const Format& format, const Tensor& packed, const c10::SymInt& h) {
  Tensor even = packed.bitwise_and(15), odd = packed.bitwise_right_shift(4);
  if (format.element == Element::NF4) std::swap(even, odd);
  return at::stack({even, odd}, -1).flatten(-2).slice_symint(-1, 0, h);
}

Tensor bytes_of(const Tensor& tensor) { return tensor.reshape({1}).view(at::kByte); }

Tensor largest_of_blocks(const Tensor& split) {
  return at::amax(split.abs(), {1, 3}, /*keepdim=*/true);
}

// `of_tensor`: the inverse of the tensor's scale, if the format has one besides block scales.
Tensor decoding_scales(const Format& format, const Tensor& stored, const Tensor& of_tensor) {
  if (format.rule == ScaleRule::E8M0) return decoded_e8m0(stored);
  if (format.rule == ScaleRule::E4M3) return values_of_codes(Element::E4M3, stored) * of_tensor;
  return stored;
}

// Decodes in the accumulate dtype.
Tensor decode_blocks(const Format& format, const Tensor& codes, const Tensor& scales,
                     at::ScalarType dtype) {
  const auto accumulate = accumulate_dtype(dtype);
  return values_of_codes(format.element, codes).to(accumulate) * scales.to(accumulate);
}

// The codes for a given scale.
Tensor codes_by_scale(const Format& format, const Tensor& x, const Tensor& scale) {
  return encode_numbers(format.element, (x.abs() * scale).copysign(x));
}

Tensor decode_by_scale(const Format& format, const Tensor& codes, const Tensor& scale,
                       at::ScalarType dtype) {
  return decode_blocks(format, codes, scale.reciprocal(), dtype).to(dtype);
}

}  // namespace

const Format& format_of(const Checks& check, std::string_view name) {
  const Format* const found = kernel::find_format(name);
  TORCH_CHECK(found != nullptr, "[", check.op(), "] format must be one of ", names(), ", got '",
              name, "'");
  return *found;
}

at::ScalarType dtype_named(const Checks& check, std::string_view name) {
  for (const auto& [text, dtype] :
       {std::pair("float16", at::kHalf), std::pair("bfloat16", at::kBFloat16),
        std::pair("float32", at::kFloat), std::pair("float64", at::kDouble)}) {
    if (name == text) return dtype;
  }
  TORCH_CHECK(false, "[", check.op(),
              "] dtype must be 'float16', 'bfloat16', 'float32' or 'float64', got '", name, "'");
}

at::ScalarType operand_dtype_named(const Checks& check, const Format& format,
                                   std::string_view name) {
  if (!name.starts_with("float8")) return dtype_named(check, name);
  const std::string_view codes = format.element == Element::E4M3 ? "float8_e4m3fn" : "float8_e5m2";
  TORCH_CHECK(
      format.per_tensor() && name == codes, "[", check.op(),
      "] dtype must be that of a product, or of the codes of a format with one scale, got '", name,
      "' for '", format.name, "'");
  return codes_spec(format, {}).dtype;
}

TensorSpec codes_spec(const Format& format, c10::SymIntArrayRef sizes) {
  TensorSpec spec{c10::SymDimVector(sizes), at::kByte};
  if (format.element == Element::E4M3) spec.dtype = at::kFloat8_e4m3fn;
  if (format.element == Element::E5M2) spec.dtype = at::kFloat8_e5m2;
  if (format.element == Element::Int8) spec.dtype = at::kChar;
  if (format.bits == 4 && !sizes.empty()) spec.sizes.back() = parts(sizes.back(), 2);
  return spec;
}

TensorSpec scale_spec(const Format& format, c10::SymIntArrayRef sizes) {
  if (format.per_tensor()) return {{}, at::kFloat};
  const c10::SymInt across = parts(width_of(sizes), format.block_columns);
  const c10::SymInt down = parts(row_count(sizes), format.block_rows);
  if (format.has_tensor_scale()) return {{down * across + 4}, at::kByte};
  TensorSpec spec{{down, across}, format.rule == ScaleRule::E8M0 ? at::kByte : at::kFloat};
  if (format.block_rows == 1) {
    spec.sizes.assign(sizes.begin(), sizes.empty() ? sizes.end() : sizes.end() - 1);
    spec.sizes.push_back(across);
  }
  return spec;
}

const Format* find_block_format(const Tensor& codes, const Tensor& scale) {
  for (const Format& format : kernel::kFormats) {
    if (!format.has_block_powers()) continue;
    const TensorSpec spec = scale_spec(format, codes.sym_sizes());
    if (spec.dtype != scale.scalar_type()) continue;
    if (codes_spec(format, {}).dtype != codes.scalar_type()) continue;
    if (scale.sym_sizes().equals(spec.sizes)) return &format;
  }
  return nullptr;
}

std::tuple<Tensor, Tensor> quantize_decomposed(const Format& format, const Tensor& input,
                                               bool stochastic) {
  const auto sizes = input.sym_sizes();
  const TensorSpec codes = codes_spec(format, sizes), scale = scale_spec(format, sizes);
  const Blocks blocks(format, sizes);
  // The added zero gives a tensor without numbers an amax.
  const Tensor x = to_float(input), zero = at::zeros({1}, x.options());
  const Tensor of_tensor = at::amax(at::cat({x.abs().flatten(), zero}));
  const Tensor split = blocks.split(x);
  const Encoded encoded(format, split, largest_of_blocks(split), of_tensor, stochastic);
  Tensor code = blocks.join(encoded.codes);
  if (format.bits == 4) code = pack(format, code);
  if (codes.dtype != at::kByte) code = code.contiguous().view(codes.dtype);
  Tensor stored = encoded.stored;
  if (format.has_tensor_scale()) {
    stored = at::cat({stored.flatten(), bytes_of(encoded.tensor_scale.reciprocal())});
  }
  return {code.reshape_symint(codes.sizes), stored.reshape_symint(scale.sizes)};
}

Tensor dequantize_decomposed(const Format& format, const Tensor& codes, const Tensor& scale,
                             c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  const Blocks blocks(format, sizes);
  Tensor bytes = codes.contiguous().view(at::kByte).reshape_symint(
      {blocks.rows, format.bits == 4 ? parts(blocks.h, 2) : blocks.h});
  if (format.bits == 4) bytes = unpack(format, bytes, blocks.h);
  Tensor stored = scale, of_tensor;
  if (format.has_tensor_scale()) {
    const auto count = scale.sym_size(0) - 4;
    // The clone gives the bytes memory of their own, because a view as float needs alignment.
    of_tensor = scale.slice_symint(0, count).clone().view(at::kFloat);
    stored = scale.slice_symint(0, 0, count);
  }
  Tensor scales = decoding_scales(format, stored, of_tensor);
  if (!format.per_tensor()) scales = scales.reshape_symint({blocks.down, 1, blocks.across, 1});
  const Tensor values = decode_blocks(format, blocks.split(bytes), scales, dtype);
  return blocks.join(values).to(dtype).reshape_symint(sizes);
}

Tensor round_bands_decomposed(const Format& format, const Tensor& rows,
                              c10::function_ref<Tensor(const Tensor&)> of_groups,
                              at::ScalarType dtype, bool stochastic) {
  const Blocks blocks(format, rows.sym_sizes(), /*by_rows=*/true);
  const Tensor split = blocks.split(to_float(rows)), amax = largest_of_blocks(split);
  Tensor of_group, decoded;
  if (format.per_tensor() || format.has_tensor_scale()) {
    // The added zero gives rows without numbers an amax.
    const Tensor of_band = at::amax(at::constant_pad_nd(amax.flatten(1), {0, 1}), 1);
    of_group = of_groups(of_band).reshape({-1, 1, 1, 1});
  }
  const Encoded encoded(format, split, amax, of_group, stochastic);
  if (format.has_tensor_scale()) decoded = encoded.tensor_scale.reciprocal();
  const Tensor scales = decoding_scales(format, encoded.stored, decoded);
  return blocks.join(decode_blocks(format, encoded.codes, scales, dtype)).to(dtype);
}

std::tuple<Tensor, Tensor> values_decomposed(const Format& format, const Tensor& input,
                                             at::ScalarType dtype, bool stochastic) {
  auto [codes, stored] = quantize_decomposed(format, input, stochastic);
  const Tensor one = at::ones({}, input.options().dtype(at::kFloat));
  Tensor scale = stored;
  if (format.has_tensor_scale()) {
    const auto count = stored.sym_size(0) - 4;
    // The clone gives the bytes memory of their own, because a view as float needs alignment.
    scale = stored.slice_symint(0, count).clone().view(at::kFloat).reshape({});
    stored = at::cat({stored.slice_symint(0, 0, count), bytes_of(one)});
  } else {
    stored = one;
  }
  if (is_codes(dtype)) return {codes, scale};
  return {dequantize_decomposed(format, codes, stored, input.sym_sizes(), dtype), scale};
}

std::tuple<Tensor, Tensor> round_by_scale_decomposed(const Format& format, const Tensor& input,
                                                     const Tensor& scale, at::ScalarType dtype,
                                                     bool decodes) {
  const Tensor x = to_float(input), zero = at::zeros({1}, x.options());
  const Tensor codes = codes_by_scale(format, x, scale);
  const Tensor amax = at::amax(at::cat({x.abs().flatten(), zero}));
  if (is_codes(dtype)) return {codes.contiguous().view(dtype), amax};
  if (decodes) return {decode_by_scale(format, codes, scale, dtype), amax};
  return {values_of_codes(format.element, codes).to(dtype), amax};
}

std::tuple<Tensor, Tensor> round_rows_by_scale_decomposed(const Format& format, const Tensor& rows,
                                                          const Tensor& scales,
                                                          at::ScalarType dtype) {
  const Tensor x = to_float(rows);
  // The added column gives rows without numbers an amax.
  const Tensor amax = at::amax(at::constant_pad_nd(x.abs(), {0, 1}), 1);
  const Tensor codes = codes_by_scale(format, x, scales);
  return {decode_by_scale(format, codes, scales, dtype), amax};
}

}  // namespace transformer_ops
