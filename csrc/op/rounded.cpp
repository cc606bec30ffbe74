#include "op/rounded.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>

#include "fuser/quantize.h"
#include "fuser/recipe.h"
#include "fuser/schema.h"
#include "op/dtype.h"
#include "op/rows.h"
#include "op/unfused.h"

namespace transformer_ops {
namespace {

// What a thread reads and writes before it rounds: so much stays in its cache.
constexpr int64_t kBytesAtOnce = 256 << 10;

const TypedOp& rounding_op() {
  static const TypedOp& op = *find_typed_op(kRoundCall);
  return op;
}

std::vector<c10::IValue> rounding(const Tensor& x, const c10::IValue& format) {
  return {x, format, to_text(to_dtype(x.scalar_type()))};
}

// The two arguments that <op>_rounded adds.
constexpr const char* kAdded[] = {"format", "column_format"};
struct Formats {
  const c10::IValue &first, &columns;

  explicit Formats(Values added) : first(added[0]), columns(added[1]) {}
  bool has_columns() const { return !columns.toStringView().empty(); }
};

void check_format(const Checks& check, const c10::IValue& format) {
  TORCH_CHECK(rows_of_block(format.toStringView()) > 0, "[", check.op(),
              "] format must be one whose scales are those of blocks, got '", format.toStringView(),
              "'");
}

bool is_given(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// The dimensions before that of a row, which all tensors of a call share.
using RowSizes = at::IntArrayRef;

bool has_rows(const Tensor& tensor, RowSizes sizes) {
  const auto leading = static_cast<int64_t>(sizes.size());
  return tensor.dim() >= leading && tensor.sizes().slice(0, leading) == sizes;
}

// Those tensors as matrices, and the places that some of their rows take.
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

class Rounded {
 public:
  explicit Rounded(TypedOp op) : op_(std::move(op)) {
    const Schema schema = parse_schema(op_.schema);
    name_ = schema.name;
    arguments_ = schema.arguments.size();
    results_ = schema.results.size();
    TORCH_CHECK(
        std::ranges::all_of(schema.results, [](auto& field) { return field.type == "Tensor"; }),
        "[", name_, "] by_rows must be of an op that gives tensors, got one that gives lists");
    for (const char* const added : kAdded) {
      TORCH_CHECK(!schema.has_argument(added), "[", name_,
                  "] by_rows must be of an op without an argument '", added, "', got one");
    }
    for (const std::string& name : op_.by_rows) {
      const auto field = std::ranges::find(schema.arguments, name, &Schema::Field::name);
      const bool is_tensor =
          field != schema.arguments.end() && (field->type == "Tensor" || field->type == "Tensor?");
      TORCH_CHECK(is_tensor, "[", name_, "] by_rows must name tensor arguments, got '", name, "'");
      by_rows_.push_back(static_cast<size_t>(field - schema.arguments.begin()));
    }
  }

  TensorSpecs shape(const Checks& check, Values values) const {
    const Formats formats = formats_of(values);
    check_format(check, formats.first);
    if (formats.has_columns()) check_format(check, formats.columns);
    TensorSpecs specs = op_.shape(check, own(values));
    specs.push_back(formats.has_columns() ? specs[0] : absent(specs[0].dtype));
    return specs;
  }

  Tensors meaning(const Checks& check, Values values) const {
    const Formats formats = formats_of(values);
    const auto round = [&](const Tensor& x, const c10::IValue& format) {
      std::vector<c10::IValue> arguments = rounding(x, format);
      return rounding_op().bodies.unfused(check, arguments)[0];
    };
    Tensors found = call_unfused(name_, c10::ArrayRef<c10::IValue>(values.data(), arguments_));
    // Of results that only serve backward, a meaning may leave out some.
    found.resize(results_);
    found.push_back(formats.has_columns() ? round(found[0], formats.columns)
                                          : found[0].new_empty({0}));
    found[0] = round(found[0], formats.first);
    return found;
  }

  // A few rows after another where the tensors are made of rows, else all at once.
  void run_cpu(const Call& call, Values values, Results& results) const {
    const Formats formats = formats_of(values);
    const auto run_part = [&](Values arguments, Results& part) {
      run(op_.bodies.cpu, &Bodies::cpu, call, arguments, formats, part);
    };
    const RowSizes sizes = row_sizes(values, results.tensors);
    const int64_t rows = c10::multiply_integers(sizes);
    const int64_t step = rows_at_once(values, results.tensors, sizes, formats);
    if (step >= rows) return run_part(own(values), results);
    Bands read(sizes), written(sizes);
    for (const size_t place : by_rows_) {
      if (is_given(values[place])) read.add(place, values[place].toTensor());
    }
    for (size_t i = 0; i < results.tensors.size(); ++i) {
      if (results.tensors[i].numel() > 0) written.add(i, results.tensors[i]);
    }
    const auto run_bands = [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      std::vector<c10::IValue> arguments(own(values).begin(), own(values).end());
      Results part = results;
      for (int64_t first = begin * step; first < std::min(end * step, rows); first += step) {
        const int64_t count = std::min(step, rows - first);
        read.put(first, count, arguments);
        written.put(first, count, part.tensors);
        run_part(arguments, part);
      }
    };
    cpu::parallel((rows + step - 1) / step, step * results.tensors[0].numel() / rows, 1, run_bands);
  }

  void run_cuda(const Call& call, Values values, Results& results) const {
    run(op_.bodies.cuda, &Bodies::cuda, call, own(values), formats_of(values), results);
  }

 private:
  Values own(Values values) const { return values.first(arguments_); }
  Formats formats_of(Values values) const { return Formats(values.subspan(arguments_)); }

  // f(tensor) of those that are made of rows. Results that nobody wants have no elements.
  template <typename Function>
  void for_tensors(Values values, const Tensors& results, const Function& f) const {
    for (const size_t place : by_rows_) {
      if (is_given(values[place])) f(values[place].toTensor());
    }
    for (const Tensor& result : results) {
      if (result.numel() > 0) f(result);
    }
  }

  RowSizes row_sizes(Values values, const Tensors& results) const {
    int64_t leading = std::max<int64_t>(results[0].dim() - 1, 0);
    for_tensors(values, results,
                [&](const Tensor& tensor) { leading = std::min(leading, tensor.dim()); });
    return results[0].sizes().slice(0, leading);
  }

  // A multiple of the rows of a block; all where one of the tensors is not made of rows, as a mask
  // of bits is.
  int64_t rows_at_once(Values values, const Tensors& results, RowSizes sizes,
                       const Formats& formats) const {
    const int64_t rows = c10::multiply_integers(sizes);
    int64_t bytes = 0;
    bool fits = rows > 0;
    for_tensors(values, results, [&](const Tensor& tensor) {
      fits = fits && has_rows(tensor, sizes);
      bytes += static_cast<int64_t>(tensor.nbytes());
    });
    if (!fits) return rows;
    int64_t block = rows_of_block(formats.first.toStringView());
    if (formats.has_columns()) {
      block = std::max(block, rows_of_block(formats.columns.toStringView()));
    }
    const int64_t fitting = kBytesAtOnce / std::max<int64_t>(bytes / rows, 1);
    return std::max<int64_t>(fitting / block, 1) * block;
  }

  // The op, and then its first result in place of itself.
  void run(const Body& body, Body Bodies::*on_device, const Call& call, Values arguments,
           const Formats& formats, Results& results) const {
    const Body& round = rounding_op().bodies.*on_device;
    Results found{Tensors(results.tensors.begin(), results.tensors.end() - 1)};
    body(call, arguments, found);
    if (!body.fills()) {
      for (size_t i = 0; i < found.tensors.size(); ++i) results.tensors[i].copy_(found.tensors[i]);
    }
    const Tensor& x = results.tensors[0];
    const auto round_to = [&](const c10::IValue& format, const Tensor& to) {
      std::vector<c10::IValue> values = rounding(x, format);
      Results rounded{{to}};
      round(call, values, rounded);
    };
    if (formats.has_columns()) round_to(formats.columns, results.tensors.back());
    round_to(formats.first, x);
  }

  const TypedOp op_;
  std::string name_;
  size_t arguments_, results_;  // how many it has
  std::vector<size_t> by_rows_;
};

std::string schema_of(const TypedOp& op) {
  std::string schema = op.schema;
  const Schema parsed = parse_schema(schema);
  schema.replace(0, schema.find('('), rounded_name(parsed.name));
  const size_t arrow = schema.rfind(") ->");
  std::string results = schema.substr(arrow + 5);
  if (results.starts_with('(')) results = results.substr(1, results.size() - 2);
  return schema.substr(0, arrow) + ", str " + kAdded[0] + ", str " + kAdded[1] + ") -> (" +
         results + ", Tensor " + parsed.results[0].name + "_columns)";
}

}  // namespace

std::string rounded_name(const std::string& name) { return name + "_rounded"; }

TypedOp rounded_by(const TypedOp& op) {
  const auto rounded = std::make_shared<const Rounded>(op);
  TypedOp made{.schema = schema_of(op),
               .shape = ShapeRule::of_values([rounded](const Checks& check, Values values) {
                 return rounded->shape(check, values);
               }),
               .overwrites = op.overwrites,
               .any_strides = op.any_strides,
               .reads_first = op.reads_first,
               .differentiable = false};
  made.bodies.unfused = Meaning::of_values(
      [rounded](const Checks& check, Values values) { return rounded->meaning(check, values); });
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

}  // namespace transformer_ops
