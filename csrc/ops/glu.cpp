// Gated linear units: y = act(a) * b, with a and b the halves of the last dimension, or blocks of
// glu_interleave_size elements that alternate along it.
#include "bodies/glu.h"
#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const GluRow& row, const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  return {glu_output(args, "input", like(args.tensor(0)), read_glu(row, args, 1))};
}

TensorSpecs backward_shape(const GluRow& row, const Args& args) {
  const TensorSpec input = like(args.tensor(1));
  check_compute_dtype(args, "input", args.tensor(1));
  check_spec(args, "grad_output", args.tensor(0),
             glu_output(args, "input", input, read_glu(row, args, 2)));
  return {input};
}

TypedOp make_forward(const GluRow& row) {
  return {.schema = row.name + "(Tensor input" + schema_of_attributes(row) + ") -> Tensor output",
          .shape = [&row](const Args& args) { return forward_shape(row, args); },
          .cpu =
              [&row](const Args& args, Tensors& results) {
                glu_forward_cpu(read_glu(row, args, 1), args.tensor(0), results[0]);
              },
          .cuda =
              [&row](const Args& args, Tensors& results) {
                glu_forward_cuda(read_glu(row, args, 1), args.tensor(0), results[0]);
              },
          .unfused =
              [&row](const Args& args) {
                return Tensors{glu_unfused(row, args.tensor(0), read_glu(row, args, 1))};
              }};
}

TypedOp make_backward(const GluRow& row) {
  return {
      .schema = row.name + "_backward(Tensor grad_output, Tensor input" +
                schema_of_attributes(row) + ") -> Tensor grad_input",
      .shape = [&row](const Args& args) { return backward_shape(row, args); },
      .overwrites = {1},
      .cpu =
          [&row](const Args& args, Tensors& results) {
            glu_backward_cpu(read_glu(row, args, 2), args.tensor(0), args.tensor(1), results[0]);
          },
      .cuda =
          [&row](const Args& args, Tensors& results) {
            glu_backward_cuda(read_glu(row, args, 2), args.tensor(0), args.tensor(1), results[0]);
          }};
}

bool register_glus() {
  for (const GluRow& row : glus()) {
    register_op({.declaration = {.kind = row.kind,
                                 .summary = row.formula,
                                 .attributes = row.attributes,
                                 .slots = {{"input"}},
                                 .dtype = DTypeRule::Autocast,
                                 .width = [](const Attributes&,
                                             int64_t width) { return width < 0 ? -1 : width / 2; }},
                 .forward = make_forward(row),
                 .backward = make_backward(row),
                 .recompute = recompute_by(make_forward(row))});
  }
  return true;
}

[[maybe_unused]] const bool registered = register_glus();

}  // namespace
}  // namespace transformer_ops
