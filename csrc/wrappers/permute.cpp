#include "wrappers/permute.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/permute.h"
#include "wrappers/cpu.h"
#include "wrappers/linear.h"

namespace transformer_ops {
namespace {

int64_t copies_of(const Tensor& positions) { return positions.size(-1); }

// For each position, the number of the copy that it receives; the number of copies if it receives
// none.
Tensor copy_at(const Tensor& positions) {
  const Tensor flat = positions.reshape({-1}).to(at::kLong);
  const c10::SymInt count = flat.sym_size(0);
  const Tensor place = at::where(flat < 0, at::Scalar(count), flat);
  const Tensor number = at::arange(at::Scalar(count), flat.options());
  const Tensor nothing = at::full_symint({count + 1}, at::Scalar(count), flat.options());
  return nothing.scatter(0, place, number).narrow_symint(0, 0, count);
}

// Adds a row of zeros at the end, which an index that is one too large reads.
Tensor with_zero(const Tensor& rows) {
  c10::SymDimVector sizes(rows.sym_sizes());
  sizes[0] = 1;
  return at::cat({rows, at::zeros_symint(sizes, rows.options())});
}

}  // namespace

void check_positions(const Checks& check, const Tensor& positions, c10::SymIntArrayRef rows) {
  TORCH_CHECK(positions.scalar_type() == at::kInt, "[", check.op(),
              "] positions must have dtype Int, got ", positions.scalar_type());
  TORCH_CHECK(
      positions.dim() >= 1 && positions.sym_sizes().slice(0, positions.dim() - 1).equals(rows), "[",
      check.op(), "] positions must have leading dimensions ", rows, ", got shape ",
      positions.sym_sizes());
}

Places::Places(const Checks& check, const Tensor& positions) : copies_(positions.numel(), -1) {
  const auto* const at = positions.const_data_ptr<int32_t>();
  const auto count = static_cast<int32_t>(copies_.size());
  for (int32_t copy = 0; copy < count; ++copy) {
    const int32_t place = at[copy];
    if (place == -1) continue;
    TORCH_CHECK(place >= 0 && place < count, "[", check.op(), "] positions must lie in [-1, ",
                count, "), got ", place);
    TORCH_CHECK(copies_[place] < 0, "[", check.op(), "] positions must differ, got ", place,
                " twice");
    copies_[place] = copy;
  }
}

TensorSpec spread_output(const Tensor& input, const Tensor& positions) {
  return {{positions.sym_numel(), input.sym_size(-1)}, input.scalar_type()};
}

void spread_rows_cpu(const Tensor& input, const Places& places, int64_t copies,
                     const Tensor& output) {
  copy_rows_cpu(as_matrix(input), places, copies, /*first=*/0, output);
}

void copy_rows_cpu(const Tensor& input, const Places& places, int64_t copies, int64_t first,
                   const Tensor& output) {
  const cpu::Rows in{input, input.size(1)}, out{output, input.size(1)};
  const size_t bytes = static_cast<size_t>(in.width) * input.element_size();
  if (bytes == 0) return;
  cpu::parallel(out.count(), in.width, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t copy = places.copy_at(first + row);
      if (copy < 0) {
        std::memset(out.write(row), 0, bytes);
      } else {
        std::memcpy(out.write(row), in.read(copy / copies), bytes);
      }
    }
  });
}

Tensor spread_rows_decomposed(const Tensor& input, const Tensor& positions) {
  const Tensor copy = copy_at(positions);
  // The row of a copy; the added row if there is none.
  const int64_t copies = std::max<int64_t>(1, copies_of(positions));
  const Tensor row = at::div(copy, at::Scalar(copies), "floor");
  return with_zero(as_matrix(input)).index_select(0, row);
}

TensorSpec gathered_output(const Checks& check, const char* name, const Tensor& input,
                           const Tensor& positions) {
  check.compute_dtype(name, input);
  TORCH_CHECK(positions.dim() >= 1, "[", check.op(),
              "] positions must have at least 1 dimension, got 0");
  TORCH_CHECK(input.dim() == 2 && input.sym_size(0) == positions.sym_numel(), "[", check.op(), "] ",
              name, " must have a row for each position, shape [", positions.sym_numel(),
              ", *], got ", input.sym_sizes());
  c10::SymDimVector sizes(positions.sym_sizes());
  sizes.back() = input.sym_size(1);
  return {sizes, input.scalar_type()};
}

void sum_rows_cpu(const Checks& check, const Tensor& input, const Tensor& positions,
                  const Tensor& output) {
  const Places checked(check, positions);
  const int64_t copies = copies_of(positions);
  const cpu::Rows in{input, input.size(1)}, out{output, input.size(1)};
  const auto* const at = positions.const_data_ptr<int32_t>();
  cpu::parallel(out.count(), copies * in.width, 1, [&](int64_t begin, int64_t end) {
    cpu::sum_rows_at(cpu::kernel_dtype(input), in.read(0), at + begin * copies, copies,
                     out.write(begin), end - begin, in.width);
  });
}

Tensor sum_rows_decomposed(const Tensor& input, const Tensor& positions) {
  const Tensor flat = positions.reshape({-1}).to(at::kLong);
  const Tensor place = at::where(flat < 0, at::Scalar(flat.sym_size(0)), flat);
  c10::SymDimVector sizes(positions.sym_sizes());
  sizes.push_back(input.sym_size(1));
  const Tensor rows = with_zero(to_accumulate(input)).index_select(0, place);
  return rows.reshape_symint(sizes).sum(-2).to(input.scalar_type());
}

void take_values_cpu(const Checks& check, const Tensor& values, const Tensor& positions,
                     const Tensor& output) {
  const Places checked(check, positions);
  const auto* const at = positions.const_data_ptr<int32_t>();
  const size_t bytes = values.element_size();
  const auto* const from = static_cast<const char*>(values.const_data_ptr());
  auto* const to = static_cast<char*>(output.mutable_data_ptr());
  for (int64_t i = 0; i < positions.numel(); ++i) {
    if (at[i] >= 0) {
      std::memcpy(to + i * bytes, from + at[i] * bytes, bytes);
    } else {
      std::memset(to + i * bytes, 0, bytes);
    }
  }
}

Tensor take_values_decomposed(const Tensor& values, const Tensor& positions) {
  const Tensor flat = positions.reshape({-1}).to(at::kLong);
  const Tensor place = at::where(flat < 0, at::Scalar(flat.sym_size(0)), flat);
  return with_zero(values).index_select(0, place).reshape_symint(positions.sym_sizes());
}

TensorSpecs dispatch_outputs(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                             const Tensor& probs, int64_t num_experts, int64_t first_expert,
                             int64_t local_experts) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check.compute_dtype("probs", probs);
  TORCH_CHECK(num_experts >= 1, "[", check.op(), "] num_experts must be at least 1, got ",
              num_experts);
  TORCH_CHECK(first_expert >= 0 && local_experts >= 1 && local_experts <= num_experts &&
                  first_expert <= num_experts - local_experts,
              "[", check.op(), "] first_expert and local_experts must lie within the ", num_experts,
              " experts, got ", first_expert, " and ", local_experts);
  TORCH_CHECK(at::isIntegralType(expert_ids.scalar_type(), /*includeBool=*/false), "[", check.op(),
              "] expert_ids must hold integers, got ", expert_ids.scalar_type());
  const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
  const auto ids = expert_ids.sym_sizes();
  TORCH_CHECK(!ids.empty() && ids.slice(0, ids.size() - 1).equals(rows), "[", check.op(),
              "] expert_ids must have leading dimensions ", rows, ", got shape ", ids);
  check.same_sizes("probs", probs, expert_ids);
  const c10::SymInt places = expert_ids.sym_numel();
  return {{{places, input.sym_size(-1)}, input.scalar_type()},
          {{local_experts}, at::kLong},
          {{places}, probs.scalar_type()},
          {c10::SymDimVector(ids), at::kInt}};
}

Dispatched dispatch_decomposed(const Tensor& input, const Tensor& expert_ids, const Tensor& probs,
                               int64_t, int64_t first_expert, int64_t local_experts) {
  const auto [positions, splits] =
      sort_by_group_decomposed(expert_ids, {first_expert, local_experts});
  const Tensor permuted =
      spread_rows_decomposed(probs.unsqueeze(-1), positions.unsqueeze(-1)).squeeze(-1);
  return {spread_rows_decomposed(input, positions), splits, permuted, positions};
}

void sort_by_group_cpu(const Checks& check, const Tensor& ids, int64_t known, GroupRange groups,
                       const Tensor& splits, const Tensor& positions) {
  const Tensor wide = ids.to(at::kLong);
  const auto* const id = wide.const_data_ptr<int64_t>();
  const int64_t count = wide.numel();
  TORCH_CHECK(count <= std::numeric_limits<int32_t>::max(), "[", check.op(),
              "] expert_ids must be fewer than 2^31, got ", count);
  const auto is_in = [groups](int64_t id) {
    return id >= groups.first && id < groups.first + groups.count;
  };
  std::vector<int64_t> next(groups.count + 1, 0);  // the first position of each group
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(id[i] >= -1 && id[i] < known, "[", check.op(), "] expert_ids must lie in [-1, ",
                known, "), got ", id[i]);
    if (is_in(id[i])) ++next[id[i] - groups.first + 1];
  }
  auto* const sizes = splits.mutable_data_ptr<int64_t>();
  for (int64_t group = 0; group < groups.count; ++group) {
    sizes[group] = next[group + 1];
    next[group + 1] += next[group];
  }
  auto* const place = positions.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    place[i] = is_in(id[i]) ? static_cast<int32_t>(next[id[i] - groups.first]++) : -1;
  }
}

Sorted sort_by_group_decomposed(const Tensor& ids, GroupRange groups) {
  const Tensor flat = ids.reshape({-1}).to(at::kLong) - groups.first;
  const c10::SymInt count = flat.sym_size(0);
  const Tensor group = at::arange(groups.count, flat.options());
  const Tensor splits = (flat.unsqueeze(-1) == group).sum(0);
  const Tensor is_out = (flat < 0).logical_or(flat >= groups.count);
  const Tensor key = at::where(is_out, groups.count, flat);
  const Tensor order = at::argsort(key, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor number = at::arange(at::Scalar(count), flat.options());
  const Tensor place = at::zeros_like(flat).scatter(0, order, number);
  const Tensor positions = at::where(is_out, -1, place).to(at::kInt);
  return {positions.reshape_symint(ids.sym_sizes()), splits};
}

}  // namespace transformer_ops
