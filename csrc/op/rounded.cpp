#include "op/rounded.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>

#include "fuser/schema.h"
#include "op/decomposition.h"
#include "op/row_rounding.h"
#include "op/rows.h"

namespace transformer_ops {
namespace {

// The bytes that a thread reads and writes before it rounds: they still fit in its cache then.
constexpr int64_t kBytesAtOnce = 256 << 10;

bool is_given(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// The dimensions before that of a row, which all tensors of a call share.
using RowSizes = at::IntArrayRef;

bool has_rows(const Tensor& tensor, RowSizes sizes) {
  const auto leading = static_cast<int64_t>(sizes.size());
  return tensor.dim() >= leading && tensor.sizes().slice(0, leading) == sizes;
}

// The tensors of a call as matrices, of which a band of rows is taken at a time.
class Bands {
 public:
  explicit Bands(RowSizes sizes) : sizes_(sizes.begin(), sizes.end()) {}

  void add(size_t place, const Tensor& tensor) {
    at::DimVector sizes = {c10::multiply_integers(sizes_)};
    sizes.append(tensor.sizes().begin() + std::ssize(sizes_), tensor.sizes().end());
    places_.emplace_back(place, tensor.view(sizes));
  }

  template <typename Value>
  void put(int64_t first, int64_t count, std::vector<Value>& values) const {
    for (const auto& [place, tensor] : places_) values[place] = tensor.narrow(0, first, count);
  }

 private:
  at::DimVector sizes_;
  std::vector<std::pair<size_t, Tensor>> places_;
};

// Results that are a single number: each band gives one, and the largest is the result.
class Numbers {
 public:
  Numbers(const Tensors& results, size_t first, int64_t count) {
    for (size_t i = first; i < results.size(); ++i) {
      if (results[i].dim() == 0) places_.emplace_back(i, at::empty({count}, results[i].options()));
    }
  }

  void put(int64_t index, Tensors& results) const {
    for (const auto& [place, numbers] : places_) results[place] = numbers.select(0, index);
  }
  void join(const Tensors& results) const {
    for (const auto& [place, numbers] : places_) results[place].copy_(at::amax(numbers));
  }

 private:
  std::vector<std::pair<size_t, Tensor>> places_;
};

class RoundedOp {
 public:
  RoundedOp(TypedOp op, const RowRounding& rounding) : op_(std::move(op)), rounding_(rounding) {
    const Schema schema = parse_schema(op_.schema);
    name_ = schema.name;
    arguments_ = schema.arguments.size();
    results_ = schema.results.size();
    TORCH_CHECK(
        std::ranges::all_of(schema.results, [](auto& field) { return field.type == "Tensor"; }),
        "[", name_, "] by_rows must be of an op that gives tensors, got one that gives lists");
    for (const Schema::Field& added : rounding_.arguments) {
      TORCH_CHECK(!schema.has_argument(added.name), "[", name_,
                  "] by_rows must be of an op without an argument '", added.name, "', got one");
    }
    for (const std::string& name : op_.by_rows) {
      const auto field = std::ranges::find(schema.arguments, name, &Schema::Field::name);
      const bool is_tensor =
          field != schema.arguments.end() && (field->type == "Tensor" || field->type == "Tensor?");
      TORCH_CHECK(is_tensor, "[", name_, "] by_rows must name tensor arguments, got '", name, "'");
      by_rows_.push_back(static_cast<size_t>(field - schema.arguments.begin()));
    }
  }

  std::string schema() const {
    Schema schema = parse_schema(op_.schema);
    schema.name += rounding_.suffix;
    std::ranges::copy(rounding_.arguments, std::back_inserter(schema.arguments));
    const std::string first = schema.results[0].name;
    for (const std::string& name : rounding_.results) {
      schema.results.push_back({"Tensor", first + "_" + name});
    }
    return to_text(schema);
  }

  TensorSpecs shape(const Checks& check, Values values) const {
    rounding_.check(check, added(values));
    TensorSpecs specs = op_.shape(check, own(values));
    specs.append(rounding_.shape(specs[0], added(values)));
    return specs;
  }

  Tensors decomposition(const Checks& check, Values values) const {
    Tensors found =
        call_decomposition(name_, c10::ArrayRef<c10::IValue>(values.data(), arguments_));
    // A decomposition may omit results that only backward uses.
    found.resize(results_);
    Tensors rounded = rounding_.decomposition(check, found[0], added(values));
    found[0] = std::move(rounded[0]);
    std::move(rounded.begin() + 1, rounded.end(), std::back_inserter(found));
    return found;
  }

  // Runs a band of rows at a time if the tensors are made of rows, else all rows at once.
  void run_cpu(const Call& call, Values values, Results& results) const {
    const auto run_part = [&](Values arguments, Results& part) {
      run(op_.bodies.cpu, &Bodies::cpu, call, arguments, added(values), part);
    };
    const RowSizes sizes = row_sizes(values, results.tensors);
    const int64_t rows = c10::multiply_integers(sizes);
    const int64_t step = rows_at_once(values, results.tensors, sizes);
    if (step >= rows) return run_part(own(values), results);
    Bands read(sizes), written(sizes);
    for (const size_t place : by_rows_) {
      if (is_given(values[place])) read.add(place, values[place].toTensor());
    }
    for_rows(results.tensors, [&](size_t i) { written.add(i, results.tensors[i]); });
    const int64_t bands = (rows + step - 1) / step;
    const Numbers numbers(results.tensors, results_, bands);
    const auto run_bands = [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      std::vector<c10::IValue> arguments(own(values).begin(), own(values).end());
      Results part = results;
      for (int64_t band = begin; band < end; ++band) {
        const int64_t first = band * step, count = std::min(step, rows - first);
        read.put(first, count, arguments);
        written.put(first, count, part.tensors);
        numbers.put(band, part.tensors);
        run_part(arguments, part);
      }
    };
    cpu::parallel(bands, step * results.tensors[0].numel() / rows, 1, run_bands);
    numbers.join(results.tensors);
  }

  void run_cuda(const Call& call, Values values, Results& results) const {
    run(op_.bodies.cuda, &Bodies::cuda, call, own(values), added(values), results);
  }

 private:
  Values own(Values values) const { return values.first(arguments_); }
  Values added(Values values) const { return values.subspan(arguments_); }

  // Calls f(i) for the results that are made of rows. Results that are not wanted have no elements.
  template <typename Function>
  void for_rows(const Tensors& results, const Function& f) const {
    for (size_t i = 0; i < results.size(); ++i) {
      const bool is_number = i >= results_ && results[i].dim() == 0;
      if (!is_number && results[i].numel() > 0) f(i);
    }
  }

  // Calls f(tensor) for all tensors that are made of rows.
  template <typename Function>
  void for_tensors(Values values, const Tensors& results, const Function& f) const {
    for (const size_t place : by_rows_) {
      if (is_given(values[place])) f(values[place].toTensor());
    }
    for_rows(results, [&](size_t i) { f(results[i]); });
  }

  RowSizes row_sizes(Values values, const Tensors& results) const {
    int64_t leading = std::max<int64_t>(results[0].dim() - 1, 0);
    for_tensors(values, results,
                [&](const Tensor& tensor) { leading = std::min(leading, tensor.dim()); });
    return results[0].sizes().slice(0, leading);
  }

  // The rows of a band, a multiple of those of a block. It is all rows if one of the tensors is not
  // made of rows, as a bit mask is not.
  int64_t rows_at_once(Values values, const Tensors& results, RowSizes sizes) const {
    const int64_t rows = c10::multiply_integers(sizes);
    int64_t bytes = 0;
    bool fits = rows > 0;
    for_tensors(values, results, [&](const Tensor& tensor) {
      fits = fits && has_rows(tensor, sizes);
      bytes += static_cast<int64_t>(tensor.nbytes());
    });
    if (!fits) return rows;
    const int64_t block = rounding_.rows_of_block(added(values));
    const int64_t fitting = kBytesAtOnce / std::max<int64_t>(bytes / rows, 1);
    return std::max<int64_t>(fitting / block, 1) * block;
  }

  // Runs the op, then rounds its first result in place.
  void run(const Body& body, Body Bodies::*on_device, const Call& call, Values arguments,
           Values added, Results& results) const {
    const auto first = results.tensors.begin(),
               beside = first + std::ssize(results.tensors) - std::ssize(rounding_.results);
    Results found{Tensors(first, beside)};
    body(call, arguments, found);
    if (!body.fills()) {
      for (size_t i = 0; i < found.tensors.size(); ++i) results.tensors[i].copy_(found.tensors[i]);
    }
    rounding_.run(on_device, call, results.tensors[0], added, {beside, results.tensors.end()});
  }

  const TypedOp op_;
  const RowRounding& rounding_;
  std::string name_;
  size_t arguments_, results_;  // the numbers of the op's arguments and results
  std::vector<size_t> by_rows_;
};

TypedOp rounded_op(const TypedOp& op, const RowRounding& rounding) {
  const auto rounded = std::make_shared<const RoundedOp>(op, rounding);
  TypedOp made{.schema = rounded->schema(),
               .shape = ShapeRule::of_values([rounded](const Checks& check, Values values) {
                 return rounded->shape(check, values);
               }),
               .overwrites = op.overwrites,
               .any_strides = op.any_strides,
               .reads_first = op.reads_first,
               .differentiable = false};
  made.bodies.decomposition =
      Decomposition::of_values([rounded](const Checks& check, Values values) {
        return rounded->decomposition(check, values);
      });
  if (op.bodies.cpu) {
    made.bodies.cpu = Body::of_values([rounded](const Call& call, Values values, Results& results) {
      rounded->run_cpu(call, values, results);
    });
  }
  if (op.bodies.cuda) {
    made.bodies.cuda =
        Body::of_values([rounded](const Call& call, Values values, Results& results) {
          rounded->run_cuda(call, values, results);
        });
  }
  return made;
}

}  // namespace

std::optional<TypedOp> rounded_by(const TypedOp& op, std::string_view suffix) {
  const auto& rows = row_roundings();
  const auto row = std::ranges::find(rows, suffix, &RowRounding::suffix);
  if (op.by_rows.empty() || row == rows.end()) return std::nullopt;
  return rounded_op(op, *row);
}

void check_by_rows(const TypedOp& op) {
  if (op.by_rows.empty()) return;
  for (const RowRounding& rounding : row_roundings()) RoundedOp(op, rounding);
}

}  // namespace transformer_ops
