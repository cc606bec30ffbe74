// Scaled dot product attention over rows of queries, keys and values side by side.
#pragma once

#include <optional>

#include "op/typed_op.h"

namespace transformer_ops {

struct Attention {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  // The query, the key and the value of each head are next to each other, instead of all queries,
  // all keys and all values.
  bool by_head;
  bool causal;
  double p;  // of dropout; 0 unless training
  std::optional<double> scale;
  // A row that the mask lets read nothing gives NaN, as a plain softmax does, instead of zeros.
  bool nan_rows;
  // [heads]: the score of a key that every row reads besides, whose value is 0 (gpt-oss); or null.
  const Tensor* sinks = nullptr;

  int64_t query_width() const { return heads * head_dim; }
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
};

// Its arguments begin with the sinks. With those each row reads something, and nan_rows is false.
template <>
struct BodyParameter<const Attention&> {
  static constexpr char kSchema[] = "Tensor?, int, int, int, bool, bool, float, float?, bool, bool",
                        kName[] = "const Attention&";
  static constexpr size_t kCount = 10;
  static Attention get(c10::IValue& sinks);
};

// Checks the input and the mask, which may be null.
void check_attention(const Checks& check, const Tensor& input, const Tensor* mask,
                     const Attention& attention);
// The output, log(sum(exp(scores))), with that of the sink, for each row and head, and, if numbers
// are dropped, a seed and where its numbers begin.
TensorSpecs attention_outputs(const Tensor& input, const Attention& attention);

std::tuple<Tensor, Tensor, Tensor> attention_cpu(const Tensor& input, const Tensor* mask,
                                                 const Attention& attention);
std::tuple<Tensor, Tensor, Tensor> attention_cuda(const Tensor& input, const Tensor* mask,
                                                  const Attention& attention);
// Plain ATen. With a seed, it drops what the forward with this seed has dropped; only on CPU.
Tensor attention_decomposed(const Tensor& input, const Tensor* mask, const Attention& attention,
                            const Tensor& seed = {});

// Whether the gradients of the input and of sinks are wanted. Others are absent, as are those of
// sinks that are null.
using AttentionMask = std::array<bool, 2>;
using AttentionFunction =
    c10::function_ref<Tensor(const Tensor& input, const Attention& attention)>;
// The gradients of a function in plain ATen.
std::tuple<Tensor, Tensor> attention_gradients(AttentionFunction function,
                                               const Tensor& grad_output, const Tensor& input,
                                               const Attention& attention, AttentionMask wanted);

// Without log_sum_exp, the input is not exactly that of forward, and the output and the statistics
// are computed again.
std::tuple<Tensor, Tensor> attention_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                  const Tensor& output, const Tensor* log_sum_exp,
                                                  const Tensor& seed, const Tensor* mask,
                                                  const Attention& attention, AttentionMask wanted);
std::tuple<Tensor, Tensor> attention_backward_cuda(const Tensor& grad_output, const Tensor& input,
                                                   const Tensor& output, const Tensor* log_sum_exp,
                                                   const Tensor& seed, const Tensor* mask,
                                                   const Attention& attention,
                                                   AttentionMask wanted);

}  // namespace transformer_ops
