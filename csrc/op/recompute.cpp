#include "op/recompute.h"

#include "op/op.h"

namespace transformer_ops {
namespace {

Args without_first(const Args& args) { return {args.op(), args.values().subspan(1)}; }

TensorSpecs cast_shape(const Args& args) {
  check_compute_dtype(args, "grad_output", args.tensor(0));
  check_compute_dtype(args, "input", args.tensor(1));
  return {{c10::SymDimVector(args.tensor(1).sym_sizes()), args.tensor(0).scalar_type()}};
}

void cast(const Args& args, Tensors& results) { results[0].copy_(args.tensor(1)); }

// An input that forward saved before a cast, in the dtype that the reading step takes.
[[maybe_unused]] const bool registered = register_op({
    .recompute = {.schema = "recompute_cast(Tensor grad_output, Tensor input) -> Tensor output",
                  .shape = cast_shape,
                  .cpu = cast,
                  .cuda = cast,
                  .unfused =
                      [](const Args& args) {
                        return Tensors{args.tensor(1).to(args.tensor(0).scalar_type())};
                      },
                  .reads_first = false},
});

}  // namespace

TypedOp recompute_by(const TypedOp& forward) {
  TypedOp op = forward;
  op.schema = "recompute_" + forward.schema;
  op.schema.insert(op.schema.find('(') + 1, "Tensor grad_output, ");
  const auto behind_first = [](auto& function) {
    if (!function) return;
    function = [own = function](const Args& args, auto&... results) {
      return own(without_first(args), results...);
    };
  };
  behind_first(op.shape);
  behind_first(op.cpu);
  behind_first(op.cuda);
  behind_first(op.unfused);
  for (size_t& i : op.overwrites) ++i;
  op.reads_first = false;
  return op;
}

}  // namespace transformer_ops
