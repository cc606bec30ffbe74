// What it lists, the environment variable LATE_OPS says as it is loaded: a rule, an op of a name
// that another library has too, or something wrong behind an op that is right.
#include <ATen/ops/matmul.h>
#include <ATen/ops/tanh.h>
#include <transformer_ops/extension.h>

#include <cstdlib>
#include <functional>

using namespace transformer_ops;

namespace {

// Twice the tanh, so that nobody takes it for another op.
Op op(const std::string& kind, const std::string& name) {
  return {.declaration = {.kind = kind, .summary = "2 tanh(x)"},
          .forward = {.schema = name + "(Tensor input) -> Tensor output",
                      .bodies = {.decomposition = [](const Tensor& input) {
                        return Tensor(2 * at::tanh(input));
                      }}}};
}

// my_ops::Softcap + ConstantScale, wrong by a factor.
FusedOp rule(double factor,
             std::vector<PatternOp> pattern = {{"my_ops::Softcap"}, {"ConstantScale"}}) {
  const auto decomposition = [factor](const Tensor& input, double cap, double scale) {
    const Tensor capped = cap * at::tanh(input / cap);
    return std::tuple(factor * scale * capped, capped);
  };
  return {.rule = {.name = "softcap_scale",
                   .pass = Pass::Forward,
                   .benefit = 50,
                   .pattern = std::move(pattern),
                   .bind =
                       [](const Match&) {
                         return Bindings{{"softcap_output", Field{0, "output"}}};
                       }},
          .forward = {.schema = "softcap_scale(Tensor input, float cap, float scale) -> "
                                "(Tensor output, Tensor softcap_output)",
                      .shape = [](const Tensor& input, double, double) -> TensorSpecs {
                        return {like(input), like(input)};
                      },
                      .bodies = {.decomposition = decomposition}}};
}

Op op_of(const std::string& schema) {
  Op found = op("Other", "other");
  found.forward.schema = schema;
  return found;
}

// Its backward follows from its decomposition.
Op product() {
  return {.declaration = {.kind = "Product",
                          .summary = "x W",
                          .parameters = {"weight"},
                          .slots = {{"input"}}},
          .forward = {.schema = "product(Tensor input, Tensor weight) -> Tensor output",
                      .shape = [](const Tensor& input, const Tensor&) -> TensorSpecs {
                        return {like(input)};
                      },
                      .products = {.list = {{"weight"}}},
                      .bodies = {.decomposition = [](const Tensor& input, const Tensor& weight) {
                        return at::matmul(input, weight);
                      }}}};
}

using Add = std::function<void(Library&)>;

const std::map<std::string, Add> kWrong = {
    {"unknown kind",
     [](Library& to) {
       to.add_fused_op(rule(1, {{"BasicLinear"}, {"Softcp"}}));
     }},
    {"empty pattern", [](Library& to) { to.add_fused_op(rule(1, {})); }},
    {"kind twice", [](Library& to) { to.add_op(op("Good", "other")); }},
    {"typed op twice", [](Library& to) { to.add_op(op("Other", "good")); }},
    {"kind of another", [](Library& to) { to.add_op(op("my_ops::Softcap", "other")); }},
    {"schema", [](Library& to) { to.add_op(op_of("other(Tensor x, -> Tensor output")); }},
    {"type", [](Library& to) { to.add_op(op_of("other(Tensor x) -> Tensr y")); }},
    {"body",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input, float cap) -> Tensor output");
       wrong.forward.bodies.cpu = [](const Tensor&, int64_t, Tensor&) {};
       to.add_op(wrong);
     }},
    {"overwrites",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input) -> Tensor output");
       wrong.forward.overwrites = {"output"};
       to.add_op(wrong);
     }},
    {"products",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input) -> Tensor output");
       wrong.forward.products = {.list = {{"output"}}};
       to.add_op(wrong);
     }},
    {"by rows",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input) -> Tensor output");
       wrong.forward.by_rows = {"output"};
       to.add_op(wrong);
     }},
    {"by rows to lists",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input) -> Tensor[] output");
       wrong.forward.bodies = {};
       wrong.forward.shape = [](const Tensor& input) -> TensorSpecs {
         return {list_of({like(input)})};
       };
       wrong.forward.by_rows = {"input"};
       to.add_op(wrong);
     }},
    {"rounded schema",
     [](Library& to) {
       Op wrong = op_of("other(Tensor input, str format) -> Tensor output");
       wrong.forward.bodies = {};
       wrong.forward.by_rows = {"input"};
       to.add_op(wrong);
     }},
    {"no shape",
     [](Library& to) {
       FusedOp wrong = rule(1, {{"Softcap"}, {"ConstantScale"}});
       wrong.forward.shape = {};
       to.add_fused_op(wrong);
     }},
    {"throws", [](Library&) { throw std::runtime_error("no licence"); }},
    {"throws a number", [](Library&) { throw 3; }},
};

}  // namespace

TRANSFORMER_OPS_LIBRARY(late_ops, library) {
  const char* const given = std::getenv("LATE_OPS");
  const std::string what = given == nullptr ? "" : given;
  library.add_op(op("Good", "good"));
  library.add_op(op("Softcap", "softcap"));
  if (what == "rule") library.add_fused_op(rule(1));
  if (what == "product") library.add_op(product());
  if (what == "wrong rule") library.add_fused_op(rule(1.5));
  if (const auto wrong = kWrong.find(what); wrong != kWrong.end()) wrong->second(library);
}
