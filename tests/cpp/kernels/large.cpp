// Ranges so large that results go past the caches, at every alignment, against small ranges.
#include <functional>

#include "kernel_test.h"
#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/dropout.h"
#include "kernels/glu.h"
#include "kernels/norm.h"

namespace transformer_ops::cpu {
namespace {

constexpr int64_t kLarge = int64_t{9} << 20;  // bytes: above the threshold

// Runs a kernel on all rows at once and on a few rows at a time; both outputs must be equal.
class LargeTest : public KernelTest {
 protected:
  const int64_t bytes = format(dtype).bytes;

  static char* at(char* p, int64_t elements, int64_t size) { return p + elements * size; }

  // Bytes that are numbers of about 1 in any dtype, on a vector's boundary plus `shift` elements.
  struct Memory {
    std::unique_ptr<char[]> memory;
    char* data;
  };
  Memory memory(int64_t n, int64_t shift) {
    Memory result{std::unique_ptr<char[]>(new char[(n + shift) * bytes + 64]), nullptr};
    const auto address = reinterpret_cast<uintptr_t>(result.memory.get());
    result.data = result.memory.get() + (64 - address % 64) % 64 + shift * bytes;
    return result;
  }
  Memory numbers(int64_t n, int64_t shift) {
    Memory result = memory(n, shift);
    const Array some = random(4099);
    for (int64_t i = 0; i < n; i += some.size()) {
      std::memcpy(result.data + i * bytes, const_cast<Array&>(some).data(),
                  std::min(some.size(), n - i) * bytes);
    }
    return result;
  }

  // run(x, y, first row, rows), where x has `in` and y has `out` elements a row.
  using Run = std::function<void(char*, char*, int64_t, int64_t)>;
  void expect_same(const char* what, int64_t in, int64_t out, const Run& run) {
    const int64_t rows = kLarge / (out * bytes) + 3, step = 8;
    for (int64_t shift : {0, 1}) {
      const Memory x = numbers(rows * in, shift), whole = memory(rows * out, shift);
      const Memory parts = memory(rows * out, 0);
      run(x.data, whole.data, 0, rows);
      for (int64_t row = 0; row < rows; row += step) {
        run(at(x.data, row * in, bytes), at(parts.data, row * out, bytes), row,
            std::min(step, rows - row));
      }
      EXPECT_EQ(std::memcmp(whole.data, parts.data, rows * out * bytes), 0)
          << what << " width " << out << " shift " << shift;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, LargeTest, testing::ValuesIn(cases()), case_name);

TEST_P(LargeTest, StreamedResultsAreTheSame) {
  Glu swiglu;
  swiglu.kind = GluKind::SwiGLU;
  for (int64_t h : {1024, 1001}) {
    Array gamma = random_acc(h), beta = random_acc(h), sums(acc, h), more_sums(acc, h);
    std::vector<uint8_t> mask(kLarge);
    Array statistics(acc, 1 << 16), more_statistics(acc, 1 << 16);
    expect_same("silu", h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(activation_forward)(Activation::SiLU, dtype, x, y, rows * h);
    });
    expect_same("silu backward", h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(activation_backward)(Activation::SiLU, dtype, x, x, y, rows * h);
    });
    expect_same("swiglu", 2 * h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(glu_forward)(swiglu, dtype, x, y, rows, h);
    });
    const Memory grad = numbers(kLarge / bytes, 0);
    expect_same("swiglu backward", 2 * h, 2 * h,
                [&](char* x, char* y, int64_t first, int64_t rows) {
                  on(glu_backward)(swiglu, dtype, at(grad.data, first * h, bytes), x, y, rows, h);
                });
    expect_same("relu", h, h, [&](char* x, char* y, int64_t first, int64_t rows) {
      on(relu_forward)(dtype, x, y, mask.data() + first * h / 8, rows * h);
      on(relu_backward)(dtype, y, mask.data() + first * h / 8, y, rows * h);
    });
    expect_same("dropout", h, h, [&](char* x, char* y, int64_t first, int64_t rows) {
      on(dropout_forward)(dtype, x, y, mask.data() + first * h / 8, 5, 0.3, first * h, rows * h);
      on(dropout_backward)(dtype, y, mask.data() + first * h / 8, y, 0.3, rows * h);
    });
    expect_same("bias", h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(bias_add)(dtype, x, beta.data(), y, rows, h);
      on(activation_bias_backward)(Activation::ReLU, dtype, y, x, y, sums.data(), rows, h);
    });
    expect_same("layer norm", h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(layer_norm_forward)(dtype, x, gamma.data(), beta.data(), 1e-5, y, statistics.data(),
                             more_statistics.data(), rows, h);
      on(layer_norm_backward)(dtype, y, x, statistics.data(), more_statistics.data(), gamma.data(),
                              y, sums.data(), more_sums.data(), rows, h);
    });
    expect_same("rms norm", h, h, [&](char* x, char* y, int64_t, int64_t rows) {
      on(rms_norm_forward)(dtype, x, gamma.data(), 1e-5, y, statistics.data(), rows, h);
      on(rms_norm_backward)(dtype, y, x, statistics.data(), gamma.data(), y, sums.data(), rows, h);
    });
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
