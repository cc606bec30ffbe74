// RoPE: rotates pairs of numbers in each head by the angle of the row (Su et al. 2021).
#include "kernels/rope.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/cpu.h"

namespace transformer_ops::ops::rope {
namespace {

using OptionalInt = std::optional<int64_t>;

void check_tables(const Checks& check, const Tensor& input, const Tensor& cos, const Tensor& sin,
                  int64_t rotary_dim) {
  check.compute_dtype("cos", cos);
  check.has_rows("cos", cos);
  check.spec("sin", sin, like(cos));
  const c10::SymInt width = cos.sym_size(-1);
  TORCH_CHECK(width == rotary_dim || 2 * width == rotary_dim, "[", check.op(),
              "] cos must have last dimension ", rotary_dim, " or ", rotary_dim / 2, ", got shape ",
              cos.sym_sizes());
  const c10::SymIntArrayRef rows = input.sym_sizes().slice(0, input.dim() - 1);
  c10::SymIntArrayRef table = cos.sym_sizes().slice(0, cos.dim() - 1);
  while (!table.empty() && (table.front() == 1 || table.size() > rows.size())) {
    TORCH_CHECK(table.front() == 1, "[", check.op(), "] cos must have a row for each of ", rows,
                ", or for each of the last of them, got shape ", cos.sym_sizes());
    table = table.slice(1);
  }
  TORCH_CHECK(table.equals(rows.slice(rows.size() - table.size())), "[", check.op(),
              "] cos must have a row for each of ", rows,
              ", or for each of the last of them, got shape ", cos.sym_sizes());
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& cos,
                          const Tensor& sin, int64_t head_dim, OptionalInt num_heads, bool by_head,
                          bool, OptionalInt rotary_dim) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const int64_t rotated = rotary_dim.value_or(head_dim);
  TORCH_CHECK(rotated >= 2 && rotated % 2 == 0 && rotated <= head_dim, "[", check.op(),
              "] rotary_dim must be even and lie in [2, ", head_dim, "], got ", rotated);
  const c10::SymInt width = input.sym_size(-1);
  if (num_heads) {
    TORCH_CHECK(width >= *num_heads * head_dim, "[", check.op(),
                "] input must have a last dimension of at least ", *num_heads * head_dim, " (",
                *num_heads, " heads), got shape ", input.sym_sizes());
  } else {
    TORCH_CHECK(width % head_dim == 0, "[", check.op(),
                "] input must have a last dimension that is a multiple of ", head_dim,
                ", got shape ", input.sym_sizes());
  }
  if (by_head && num_heads) {
    TORCH_CHECK(*num_heads % 3 == 0, "[", check.op(),
                "] num_heads must be a multiple of 3 with by_head, got ", *num_heads);
  } else if (by_head) {
    TORCH_CHECK(width % (3 * head_dim) == 0, "[", check.op(),
                "] input must have a last dimension that is a multiple of ", 3 * head_dim,
                " with by_head, got shape ", input.sym_sizes());
  }
  check_tables(check, input, cos, sin, rotated);
  return {like(input)};
}

template <bool transposed>
void rotate_cpu(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t head_dim,
                OptionalInt num_heads, bool by_head, bool interleaved, OptionalInt rotary_dim,
                Tensor& output) {
  const cpu::Rows x{input, input.size(-1)}, y{output, x.width};
  const Tensor cosines = cpu::to_accumulate(cos, input), sines = cpu::to_accumulate(sin, input);
  const int64_t rotated = rotary_dim.value_or(head_dim), width = cos.size(-1);
  const cpu::Rope rope{.cos = cosines.const_data_ptr(),
                       .sin = sines.const_data_ptr(),
                       .table_rows = std::max<int64_t>(cos.numel() / width, 1),
                       .by_pair = width != rotated,
                       .heads = num_heads.value_or(x.width / head_dim),
                       .head_dim = head_dim,
                       .rotary_dim = rotated,
                       .interleaved = interleaved,
                       .by_head = by_head,
                       .transposed = transposed};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::rope(cpu::kernel_dtype(input), x.read(begin), rope, y.write(begin), begin, end - begin,
              x.width);
  });
}

// A table with a number for each number of a head, which broadcasts over heads.
Tensor whole_table(const Tensor& table, const Tensor& input, int64_t rotated, bool interleaved) {
  Tensor whole = table.to(accumulate_dtype(input.scalar_type()));
  if (whole.sym_size(-1) != rotated) {
    whole = interleaved ? whole.repeat_interleave(2, -1) : at::cat({whole, whole}, -1);
  }
  return whole.unsqueeze(-2);
}

// (a, b) becomes (-b, a), or (b, -a) if transposed.
Tensor quarter_turn(const Tensor& x, bool interleaved, bool transposed) {
  const auto turn = [&](const Tensor& a, const Tensor& b) {
    return transposed ? std::pair(b, -a) : std::pair(-b, a);
  };
  if (interleaved) {
    const Tensor pairs = x.unflatten(-1, {-1, 2});
    const auto [first, second] = turn(pairs.select(-1, 0), pairs.select(-1, 1));
    return at::stack({first, second}, -1).flatten(-2);
  }
  const auto halves = x.chunk(2, -1);
  const auto [first, second] = turn(halves[0], halves[1]);
  return at::cat({first, second}, -1);
}

template <bool transposed>
Tensor rotate_decomposed(const Tensor& input, const Tensor& cos, const Tensor& sin,
                         int64_t head_dim, OptionalInt num_heads, bool by_head, bool interleaved,
                         OptionalInt rotary_dim) {
  const int64_t rotated = rotary_dim.value_or(head_dim);
  const Tensor x = to_accumulate(input);
  const c10::SymInt width = input.sym_size(-1);
  const c10::SymInt heads = num_heads ? c10::SymInt(*num_heads) : width / head_dim;
  const Tensor in_heads =
      x.slice_symint(-1, 0, heads * head_dim).unflatten_symint(-1, {heads, head_dim});
  const auto rotate = [&](const Tensor& of_heads, const Tensor& c, const Tensor& s) {
    const Tensor part = of_heads.slice(-1, 0, rotated);
    // Backward multiplies by the sines before the turn.
    const Tensor turned = transposed ? quarter_turn(part * s, interleaved, true)
                                     : quarter_turn(part, interleaved, false) * s;
    return at::cat({part * c + turned, of_heads.slice(-1, rotated)}, -1);
  };
  const Tensor c = whole_table(cos, input, rotated, interleaved);
  const Tensor s = whole_table(sin, input, rotated, interleaved);
  Tensor result;
  if (by_head) {
    // [..., heads, query | key | value, head_dim]
    const Tensor parts = in_heads.unflatten(-2, {-1, 3});
    const Tensor turned = rotate(parts.slice(-2, 0, 2), c.unsqueeze(-2), s.unsqueeze(-2));
    result = at::cat({turned, parts.slice(-2, 2)}, -2).flatten(-3);
  } else {
    result = rotate(in_heads, c, s).flatten(-2);
  }
  const Tensor rest = x.slice_symint(-1, heads * head_dim);
  return at::cat({result, rest}, -1).to(input.scalar_type());
}

const TypedOp kForward = {
    .schema =
        "rope(Tensor input, Tensor cos, Tensor sin, int head_dim, int? num_heads, "
        "bool by_head, bool interleaved, int? rotary_dim) -> Tensor output",
    .shape = forward_shape,
    .overwrites = {"input"},
    .bodies = {rotate_cpu<false>, rotate_decomposed<false>, rotate_decomposed<false>}};

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& cos,
                           const Tensor& sin, int64_t head_dim, OptionalInt num_heads, bool by_head,
                           bool interleaved, OptionalInt rotary_dim) {
  return forward_shape(check, grad_output, cos, sin, head_dim, num_heads, by_head, interleaved,
                       rotary_dim);
}

// The tables belong to the caller, who has them once for all layers.
int64_t no_bits(const std::string&, int64_t, int64_t) { return 0; }

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "RoPE",
                    .summary = "each head of x, rotated by the angles of its row",
                    .attributes = {"head_dim", "num_heads", "by_head", "interleaved", "rotary_dim"},
                    .extra_inputs = {"cos", "sin"},
                    .constants = {"cos", "sin"},
                    .slots = {{"cos"}, {"sin"}},
                    .slot_bits = no_bits},
    .forward = kForward,
    .backward = {.schema = "rope_backward(Tensor grad_output, Tensor cos, Tensor sin, "
                           "int head_dim, int? num_heads, bool by_head, bool interleaved, "
                           "int? rotary_dim) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {"grad_output"},
                 .bodies = {rotate_cpu<true>, rotate_decomposed<true>, rotate_decomposed<true>}},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::rope
