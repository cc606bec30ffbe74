// AllGather, ReduceScatter and AllReduce along the rows of all ranks of a process group.
// ReduceGradient is placed before a product whose weight is split by rows.
//
//                   forward         backward
//   AllGather       gather          scatter of sums
//   ReduceScatter   scatter of sums gather
//   AllReduce       sum             passes through
//   ReduceGradient  passes through  sum
#include "wrappers/collective.h"
#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops::ops::collective {
namespace {

void gather(const Checks& check, const Tensor& input, int64_t group_size, std::string_view group,
            Tensor& output) {
  const Ranks ranks{group_size, group};
  start_gather(check, input, ranks, output);
  finish(check, ranks, output);
}

void scatter(const Checks& check, const Tensor& input, int64_t group_size, std::string_view group,
             Tensor& output) {
  const Ranks ranks{group_size, group};
  start_scatter(check, input, ranks, output);
  finish(check, ranks, output);
}

void reduce(const Checks& check, const Tensor& input, int64_t group_size, std::string_view group,
            Tensor& output) {
  const Ranks ranks{group_size, group};
  output.copy_(input);
  start_reduce(check, ranks, output);
  finish(check, ranks, output);
}

void copy(const Tensor& input, int64_t, std::string_view, Tensor& output) { output.copy_(input); }

using Sizes = TensorSpec (*)(const Checks&, const char*, const Tensor&, int64_t);

// `tensor`: the name of the argument in the schema.
TypedOp typed_op(const char* schema, const char* tensor, Sizes sizes, const Body& body,
                 const Decomposition& decomposition) {
  return {.schema = schema,
          .shape = [=](const Checks& check, const Tensor& input, int64_t group_size,
                       std::string_view) -> TensorSpecs {
            return {sizes(check, tensor, input, group_size)};
          },
          .bodies = {body, body, decomposition}};
}

TypedOp in_place(TypedOp op, const char* tensor) {
  op.overwrites = {tensor};
  return op;
}

const TypedOp kGather =
    typed_op("all_gather(Tensor input, int group_size, str group) -> Tensor output", "input",
             gathered, gather, gather_decomposed);

// A group of one rank needs no collective.
bool is_alone(const Attributes& attributes, bool) {
  return std::get<int64_t>(attributes.at("group_size")) == 1;
}

const std::vector<std::string> kAttributes = {"group_size", "group"};

[[maybe_unused]] const bool registered =
    register_op({
        .declaration = {.kind = "AllGather",
                        .summary = "the rows of all ranks",
                        .attributes = kAttributes,
                        // Only fused backward steps read it.
                        .slots = {{"input", {"input"}}},
                        .recompute_adds_input = true,
                        .inactive = is_alone},
        .forward = kGather,
        .backward = typed_op("all_gather_backward(Tensor grad_output, int group_size, str group) "
                             "-> Tensor grad_input",
                             "grad_output", scattered, scatter, scatter_decomposed),
        .recompute = recompute_by(kGather),
    }) &&
    register_op({
        .declaration = {.kind = "ReduceScatter",
                        .summary = "this rank's rows of the sum over all ranks",
                        .attributes = kAttributes,
                        .inactive = is_alone},
        .forward =
            typed_op("reduce_scatter(Tensor input, int group_size, str group) -> Tensor output",
                     "input", scattered, scatter, scatter_decomposed),
        .backward = typed_op("reduce_scatter_backward(Tensor grad_output, int group_size, "
                             "str group) -> Tensor grad_input",
                             "grad_output", gathered, gather, gather_decomposed),
    }) &&
    register_op({
        .declaration = {.kind = "AllReduce",
                        .summary = "the sum over all ranks; the gradient passes through unchanged",
                        .attributes = kAttributes,
                        .inactive = is_alone},
        .forward = in_place(
            typed_op("all_reduce(Tensor input, int group_size, str group) -> Tensor output",
                     "input", reduced, reduce, reduce_decomposed),
            "input"),
    }) &&
    register_op({
        .declaration = {.kind = "ReduceGradient",
                        .summary = "x; the gradient is summed over all ranks",
                        .attributes = kAttributes,
                        .hands_on = true,
                        .inactive = is_alone},
        .forward = in_place(
            typed_op("reduce_gradient(Tensor input, int group_size, str group) -> Tensor output",
                     "input", reduced, copy, reduce_gradient_decomposed),
            "input"),
        .backward = in_place(
            typed_op("reduce_gradient_backward(Tensor grad_output, int group_size, str group) "
                     "-> Tensor grad_input",
                     "grad_output", reduced, reduce, reduce_decomposed),
            "grad_output"),
    });

}  // namespace
}  // namespace transformer_ops::ops::collective
