// Trains a feed-forward block in C++, without Python: builds a pipeline from op names, lets the
// fuser plan it, and prints the plan and the loss.
#include <torch/torch.h>
#include <transformer_ops/runtime/pipeline.h>

#include <cmath>
#include <iostream>

namespace tops = transformer_ops;

namespace {

constexpr int64_t kWidth = 32;
constexpr int64_t kHidden = 128;

tops::OpNode linear(int64_t in_features, int64_t out_features) {
  return tops::make_op("BasicLinear", {{"in_features", in_features},
                                       {"out_features", out_features},
                                       {"accumulate_into_main_grad", false}});
}

tops::OpNode bias(int64_t size) { return tops::make_op("Bias", {{"size", size}}); }

tops::Pipeline make_block() {
  return tops::Pipeline({
      tops::make_op("LayerNorm", {{"normalized_shape", std::vector<int64_t>{kWidth}},
                                  {"eps", 1e-5},
                                  {"zero_centered_gamma", false}}),
      linear(kWidth, kHidden),
      bias(kHidden),
      tops::make_op("GELU"),
      tops::make_op("Dropout", {{"p", 0.1}}),
      linear(kHidden, kWidth),
      bias(kWidth),
  });
}

// In the order that the pipeline names them.
std::vector<torch::Tensor> make_parameters() {
  std::vector<torch::Tensor> parameters = {
      torch::ones({kWidth}),                                       // 0.weight
      torch::zeros({kWidth}),                                      // 0.bias
      torch::randn({kHidden, kWidth}) / std::sqrt(1.0 * kWidth),   // 1.weight
      torch::zeros({kHidden}),                                     // 2.bias
      torch::randn({kWidth, kHidden}) / std::sqrt(1.0 * kHidden),  // 5.weight
      torch::zeros({kWidth}),                                      // 6.bias
  };
  for (torch::Tensor& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  tops::Pipeline block = make_block();
  const std::vector<torch::Tensor> parameters = make_parameters();
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(1e-2));
  const torch::Tensor input = torch::randn({64, kWidth});
  const torch::Tensor target = input.flip(-1);

  for (int step = 0; step <= 100; ++step) {
    const torch::Tensor output = block(input, parameters)[0];
    const torch::Tensor loss = torch::mse_loss(output, target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 25 == 0) std::cout << "step " << step << " loss " << loss.item<float>() << "\n";
  }
  std::cout << "\n" << to_text(block.last_plan()->plan);

  block.train(false);
  const torch::NoGradGuard no_grad;
  const torch::Tensor loss = torch::mse_loss(block(input, parameters)[0], target);
  std::cout << "\nevaluated: loss " << loss.item<float>() << "\n";
  return 0;
}
