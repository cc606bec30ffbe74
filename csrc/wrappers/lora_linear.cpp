#include "wrappers/lora_linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <numeric>

#include "wrappers/linear.h"
#include "wrappers/packed_linear.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

// Adapters of another dtype than the product take this many rows at a time in theirs.
constexpr int64_t kRows = 512;

std::string numbered(const char* list, size_t i) { return list + std::to_string(i); }

// out = left right, or out += left right.
void multiply(const Tensor& out, const Tensor& left, const Tensor& right, bool adds) {
  if (out.is_cpu()) return multiply_cpu(out, left, right, adds ? 1 : 0);
  Tensor sum = out;
  adds ? at::addmm_out(sum, sum, left, right) : at::mm_out(sum, left, right);
}

// Unlike to(), it takes memory that the next call reuses.
Tensor as_dtype(const Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  const Tensor found = empty(x.sizes(), dtype, x.device());
  return found.copy_(x);
}

// The same where `out` has another dtype; the sum rounds once.
void add_product(const Tensor& out, const Tensor& left, const Tensor& right) {
  const Tensor sum = as_dtype(out, left.scalar_type());
  multiply(sum, left, right, /*adds=*/true);
  if (!sum.is_same(out)) out.copy_(sum);
}

// All matrices A as one.
Tensor whole_of(const Tensors& a) {
  const Tensor whole = joined(a);
  return whole.defined() ? whole : at::cat(a);
}

struct Place {
  size_t i;        // of the adapter
  int64_t column;  // the first column of its weight's output
  int64_t columns;
  int64_t first;  // the first row of its A among all
  int64_t rank;
};

template <typename Function>
void for_each(const Adapters& adapters, at::IntArrayRef columns, const Function& function) {
  int64_t first = 0;
  for (size_t i = 0; i < adapters.a.size(); ++i) {
    const int64_t weight = adapters.of[i], rank = adapters.a[i].size(0);
    const auto before = columns.slice(0, weight);
    function(Place{i, std::accumulate(before.begin(), before.end(), int64_t{0}), columns[weight],
                   first, rank});
    first += rank;
  }
}

// Calls function(first, count) for all rows at once, or for some at a time where they are cast. It
// is called for no rows, too.
template <typename Function>
void for_each_band(int64_t rows, bool casts, const Function& function) {
  const int64_t unit = casts ? kRows : std::max<int64_t>(1, rows);
  int64_t first = 0;
  do {
    function(first, std::min(unit, rows - first));
    first += unit;
  } while (first < rows);
}

void add_part(const Tensor& output, const Tensor& hidden, const Adapters& adapters,
              at::IntArrayRef columns) {
  for_each(adapters, columns, [&](const Place& at) {
    add_product(columns_of(output, at.column, at.columns), columns_of(hidden, at.first, at.rank),
                transposed(adapters.b[at.i]));
  });
}

void scale_columns(const Tensor& hidden, const Adapters& adapters, at::IntArrayRef columns) {
  for_each(adapters, columns, [&](const Place& at) {
    const double scale = adapters.scales[at.i];
    if (scale != 1) columns_of(hidden, at.first, at.rank).mul_(scale);
  });
}

}  // namespace

int64_t Adapters::rank() const {
  return std::accumulate(a.begin(), a.end(), int64_t{0},
                         [](int64_t sum, const Tensor& each) { return sum + each.size(0); });
}

c10::SymInt check_adapters(const Checks& check, const Adapters& adapters,
                           const c10::SymInt& columns_of_input, at::IntArrayRef columns) {
  const auto& [a, b, of, scales] = adapters;
  const size_t count = a.size();
  TORCH_CHECK(count > 0 && b.size() == count && of.size() == count && scales.size() == count, "[",
              check.op(), "] lora_a, lora_b, adapted and scaling must have one entry an adapter, ",
              "got ", count, ", ", b.size(), ", ", of.size(), " and ", scales.size());
  c10::SymInt ranks = 0;
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(of[i] >= 0 && of[i] < std::ssize(columns), "[", check.op(),
                "] adapted must be in [0, ", columns.size(), "), got ", of[i]);
    const std::string name = numbered("lora_a", i);
    TORCH_CHECK(a[i].dim() == 2 && a[i].sym_size(0) > 0, "[", check.op(), "] ", name,
                " must have shape [rank, ", columns_of_input, "] with a rank of at least 1, got ",
                a[i].sym_sizes());
    check.compute_dtype(name.c_str(), a[i]);
    const c10::SymInt rank = a[i].sym_size(0);
    check.spec(name.c_str(), a[i], {{rank, columns_of_input}, a[0].scalar_type()});
    check.spec(numbered("lora_b", i).c_str(), b[i], {{columns[of[i]], rank}, a[0].scalar_type()});
    ranks += rank;
  }
  return ranks;
}

Tensor add_adapters(const Tensor& output, const Tensor& x, const Adapters& adapters,
                    at::IntArrayRef columns) {
  const auto dtype = adapters.a[0].scalar_type();
  const Tensor a = transposed(whole_of(adapters.a));
  const Tensor hidden = empty({x.size(0), adapters.rank()}, dtype, x.device());
  for_each_band(x.size(0), x.scalar_type() != dtype, [&](int64_t first, int64_t count) {
    const Tensor part = rows_of(hidden, first, count);
    multiply(part, as_dtype(rows_of(x, first, count), dtype), a, /*adds=*/false);
    scale_columns(part, adapters, columns);
    add_part(rows_of(output, first, count), part, adapters, columns);
  });
  return hidden;
}

void add_hidden(const Tensor& output, const Tensor& hidden, const Adapters& adapters,
                at::IntArrayRef columns) {
  const bool casts = output.scalar_type() != hidden.scalar_type();
  for_each_band(hidden.size(0), casts, [&](int64_t first, int64_t count) {
    add_part(rows_of(output, first, count), rows_of(hidden, first, count), adapters, columns);
  });
}

std::tuple<Tensors, Tensors> adapters_backward(const Tensor& grad, const Tensor& x,
                                               const Tensor& hidden, const Adapters& adapters,
                                               at::IntArrayRef columns, const Tensor& grad_x) {
  const auto dtype = adapters.a[0].scalar_type();
  const auto device = grad.device();
  const int64_t rank = adapters.rank();
  const bool wants_a = x.defined(), wants_b = hidden.defined(), wants_x = grad_x.defined();
  const Tensor a = wants_x ? whole_of(adapters.a) : Tensor();
  const Tensor grad_a = wants_a ? empty({rank, x.size(1)}, dtype, device) : Tensor();
  Tensors all_a, all_b;
  for (const Tensor& b : adapters.b) {
    if (wants_b) all_b.push_back(empty(b.sizes(), dtype, device));
  }
  for_each_band(grad.size(0), grad.scalar_type() != dtype, [&](int64_t first, int64_t count) {
    const bool adds = first > 0;
    const Tensor rows = rows_of(grad, first, count);
    const Tensor of_hidden = empty({count, rank}, dtype, device);
    for_each(adapters, columns, [&](const Place& at) {
      const Tensor part = as_dtype(columns_of(rows, at.column, at.columns), dtype);
      if (wants_a || wants_x) {
        multiply(columns_of(of_hidden, at.first, at.rank), part, adapters.b[at.i], /*adds=*/false);
      }
      if (!wants_b) return;
      const Tensor h = columns_of(rows_of(hidden, first, count), at.first, at.rank);
      multiply(all_b[at.i], transposed(part), h, adds);
    });
    scale_columns(of_hidden, adapters, columns);
    if (wants_a) {
      multiply(grad_a, transposed(of_hidden), as_dtype(rows_of(x, first, count), dtype), adds);
    }
    if (wants_x) add_product(rows_of(grad_x, first, count), of_hidden, a);
  });
  if (wants_a) {
    std::vector<int64_t> ranks;
    for (const Tensor& each : adapters.a) ranks.push_back(each.size(0));
    all_a = runs_of(grad_a, ranks);
  }
  return {std::move(all_a), std::move(all_b)};
}

}  // namespace transformer_ops
