// What steps of the host language return is checked when they return.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "executor/host.h"
#include "executor/program.h"
#include "executor/tensor_metadata.h"
#include "fuser/plan_key.h"

namespace transformer_ops {

// Shapes and dtypes of the outputs and slots of consecutive native ops, found by running these ops
// on the meta device. Several threads may use one object.
class NativeResults {
 public:
  // The sizes of tensors, one after another.
  struct Sizes {
    std::vector<std::vector<int64_t>> list;
    bool has_symbols = false;
  };

  // Null if an op of the step is not native, or a parameter is quantized.
  static std::shared_ptr<NativeResults> of(const Plan& plan, const Step& step);

  // The parameters of its ops, in order; some may be absent.
  std::vector<Value> parameters() const;

  struct Row {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool has_symbols;  // then only the number of sizes is known, because an argument has symbols
  };
  // By name, with the op numbers of the plan. Empty if the ops themselves refuse the tensors.
  // `arguments`: the main input and the extra inputs of each op; those from inside of the step, and
  // absent ones, are undefined.
  using Rows = std::map<Value, Row>;
  std::shared_ptr<const Rows> find(at::TensorList arguments, at::TensorList parameters);

 private:
  Rows run_on_meta(at::TensorList arguments, at::TensorList parameters, const Sizes& sizes);
  const Program& program_for(at::TensorList arguments, at::TensorList parameters);

  int first_ = 0;
  std::vector<OpNode> ops_;
  PlanKey key_;
  std::mutex mutex_;
  std::optional<Program> program_;  // for tensors of the last dtypes
  std::vector<TensorMeta> metas_;
  std::vector<int64_t> last_key_;
  std::shared_ptr<const Rows> last_;
};

// Throws c10::Error unless the step returned that many tensors.
void check_count(const std::string& step, size_t count, const Tensors& results);

// Checks the results of a forward step: memory, device, and the shapes and dtypes of the native ops
// that it covers. Under autocast, float32 results are rounded to the dtype that they must have.
// Throws c10::Error that names the method and what it returned.
void check_results(const Plan& plan, const Program::HostForward& call, at::TensorList arguments,
                   at::TensorList parameters, HostCall& host, Tensors& results);

}  // namespace transformer_ops
