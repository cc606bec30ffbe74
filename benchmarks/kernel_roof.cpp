// How far each CPU kernel is from its roof: the time of a copy that moves as many bytes.
//
//   kernel_roof [T=8192] [h=2048] [rounds=25] [name part]
//
// Buffers are warm, rounds are interleaved with the copy, and times are the best of all rounds, for
// one thread and for two. A ratio of 1 means that the kernel does nothing but move memory. Built
// with TRANSFORMER_OPS_TESTS; TRANSFORMER_OPS_ISA chooses the instruction set.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/convert.h"
#include "kernels/dropout.h"
#include "kernels/glu.h"
#include "kernels/norm.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

using namespace transformer_ops::cpu;

// Runs a function of (part, parts) on n threads that wait between runs.
class Team {
 public:
  explicit Team(int n) : n_(n), barrier_(n) {
    for (int i = 1; i < n; ++i) {
      threads_.emplace_back([this, i] {
        for (;;) {
          barrier_.arrive_and_wait();
          if (job_ == nullptr) return;
          (*job_)(i, n_);
          barrier_.arrive_and_wait();
        }
      });
    }
  }
  ~Team() {
    job_ = nullptr;
    barrier_.arrive_and_wait();
    for (auto& thread : threads_) thread.join();
  }
  // Milliseconds.
  double run(const std::function<void(int, int)>& job) {
    job_ = &job;
    const auto start = std::chrono::steady_clock::now();
    barrier_.arrive_and_wait();
    job(0, n_);
    barrier_.arrive_and_wait();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  }

 private:
  int n_;
  std::barrier<> barrier_;
  std::vector<std::thread> threads_;
  const std::function<void(int, int)>* job_ = nullptr;
};

double best(const std::vector<double>& times) { return *std::ranges::min_element(times); }

// Past the caches where the machine can, which moves the fewest bytes.
void copy(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  for (int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

char* warm_buffer(int64_t bytes, int fill) {
  auto* p = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
  std::memset(p, fill, static_cast<size_t>(bytes));
  return p;
}

struct Row {
  std::string name;
  double moved;                                // elements of T x h that must be read or written
  std::function<void(int64_t, int64_t)> rows;  // works on the rows [begin, end)
};

void measure(DType dtype, const char* dtype_name, int64_t tokens, int64_t h, int rounds,
             const std::string& filter) {
  const int64_t size = dtype == DType::Float32 ? 4 : 2, n = tokens * h;
  // Values of about 1, without subnormal numbers.
  const auto numbers = [&](int64_t count, uint32_t seed) {
    char* p = warm_buffer(count * size, 0);
    std::vector<float> values(65536);
    for (float& v : values) {
      seed = seed * 1664525u + 1013904223u;
      v = static_cast<float>(seed >> 8) * 0x1p-22f - 2.0f;
    }
    for (int64_t i = 0; i < count; i += 65536) {
      convert_from_acc(dtype, values.data(), p + i * size, std::min<int64_t>(65536, count - i));
    }
    return p;
  };
  char *x = numbers(2 * n, 1), *g = numbers(n, 2), *y = warm_buffer(2 * n * size, 1);
  auto* mask = reinterpret_cast<uint8_t*>(warm_buffer(n / 8 + 8, 0x5a));
  std::vector<float> gamma(h, 1.5f), beta(h, 0.5f), mean(tokens, 0.1f), rstd(tokens, 0.9f);
  const auto at = [&](char* p, int64_t row, int64_t width) { return p + row * width * size; };
  const auto sums = [&] { return std::vector<float>(h); };
  Glu swiglu;
  swiglu.kind = GluKind::SwiGLU;

  std::vector<Row> table;
  const std::pair<const char*, Activation> activations[] = {{"gelu", Activation::GELU},
                                                            {"silu", Activation::SiLU}};
  for (const auto& [name, a] : activations) {
    table.push_back({std::string(name) + " fwd", 2, [=](int64_t b, int64_t e) {
                       activation_forward(a, dtype, at(x, b, h), at(y, b, h), (e - b) * h);
                     }});
    table.push_back({std::string(name) + " bwd", 3, [=](int64_t b, int64_t e) {
                       activation_backward(a, dtype, at(g, b, h), at(x, b, h), at(y, b, h),
                                           (e - b) * h);
                     }});
  }
  const double bit = 1.0 / (8.0 * static_cast<double>(size));
  table.push_back({"relu fwd", 2 + bit, [=](int64_t b, int64_t e) {
                     relu_forward(dtype, at(x, b, h), at(y, b, h), mask + b * h / 8, (e - b) * h);
                   }});
  table.push_back({"relu bwd", 2 + bit, [=](int64_t b, int64_t e) {
                     relu_backward(dtype, at(g, b, h), mask + b * h / 8, at(y, b, h), (e - b) * h);
                   }});
  table.push_back({"dropout fwd", 2 + bit, [=](int64_t b, int64_t e) {
                     dropout_forward(dtype, at(x, b, h), at(y, b, h), mask + b * h / 8, 7, 0.1,
                                     b * h, (e - b) * h);
                   }});
  table.push_back({"dropout bwd", 2 + bit, [=](int64_t b, int64_t e) {
                     dropout_backward(dtype, at(g, b, h), mask + b * h / 8, at(y, b, h), 0.1,
                                      (e - b) * h);
                   }});
  // h/2 outputs a row, so that T x h is the input, as in docs/measurements.md.
  table.push_back({"swiglu fwd", 1.5, [=](int64_t b, int64_t e) {
                     glu_forward(swiglu, dtype, at(x, b, h), at(y, b, h / 2), e - b, h / 2);
                   }});
  table.push_back({"swiglu bwd", 2.5, [=](int64_t b, int64_t e) {
                     glu_backward(swiglu, dtype, at(g, b, h / 2), at(x, b, h), at(y, b, h), e - b,
                                  h / 2);
                   }});
  table.push_back({"rms_norm fwd", 2, [&, x, y](int64_t b, int64_t e) {
                     rms_norm_forward(dtype, at(x, b, h), gamma.data(), 1e-5, at(y, b, h),
                                      rstd.data() + b, e - b, h);
                   }});
  table.push_back({"rms_norm bwd", 3, [&, x, y](int64_t b, int64_t e) {
                     auto sum = sums();
                     rms_norm_backward(dtype, at(g, b, h), at(x, b, h), rstd.data() + b,
                                       gamma.data(), at(y, b, h), sum.data(), e - b, h);
                   }});
  table.push_back({"layer_norm fwd", 2, [&, x, y](int64_t b, int64_t e) {
                     layer_norm_forward(dtype, at(x, b, h), gamma.data(), beta.data(), 1e-5,
                                        at(y, b, h), mean.data() + b, rstd.data() + b, e - b, h);
                   }});
  table.push_back({"layer_norm bwd", 3, [&, x, y](int64_t b, int64_t e) {
                     auto sum1 = sums(), sum2 = sums();
                     layer_norm_backward(dtype, at(g, b, h), at(x, b, h), mean.data() + b,
                                         rstd.data() + b, gamma.data(), at(y, b, h), sum1.data(),
                                         sum2.data(), e - b, h);
                   }});
  table.push_back({"bias_add", 2, [&, x, y](int64_t b, int64_t e) {
                     bias_add(dtype, at(x, b, h), beta.data(), at(y, b, h), e - b, h);
                   }});
  table.push_back({"gelu_bias bwd", 3, [&, x, y](int64_t b, int64_t e) {
                     auto sum = sums();
                     activation_bias_backward(Activation::GELU, dtype, at(g, b, h), at(x, b, h),
                                              at(y, b, h), sum.data(), e - b, h);
                   }});

  Team one(1), two(2);
  for (const Row& row : table) {
    if (row.name.find(filter) == std::string::npos) continue;
    std::vector<double> times[2], copies[2];
    for (int round = 0; round < rounds; ++round) {
      for (int i = 0; i < 2; ++i) {
        Team& team = i == 0 ? one : two;
        const auto part = [&](auto f) {
          return [=](int index, int count) {
            f(tokens * index / count, tokens * (index + 1) / count);
          };
        };
        times[i].push_back(team.run(part(row.rows)));
        copies[i].push_back(team.run(part([&](int64_t b, int64_t e) {
          copy(y + b * h * size, x + b * h * size, (e - b) * h * size);
        })));
      }
    }
    std::printf("%-4s %-15s", dtype_name, row.name.c_str());
    for (int i = 0; i < 2; ++i) {
      const double time = best(times[i]), roof = best(copies[i]) * row.moved / 2;
      std::printf("  %d thread%s %7.3f ms, roof %6.3f, ratio %5.2f", i + 1, i == 0 ? " " : "s",
                  time, roof, time / roof);
    }
    std::printf("\n");
  }
  for (void* p : {static_cast<void*>(x), static_cast<void*>(g), static_cast<void*>(y),
                  static_cast<void*>(mask)}) {
    std::free(p);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const int64_t tokens = number(1, 8192), h = number(2, 2048);
  const auto rounds = static_cast<int>(number(3, 25));
  std::printf("%s, %ld x %ld\n", processor().kernels, static_cast<long>(tokens),
              static_cast<long>(h));
  measure(DType::Float32, "fp32", tokens, h, rounds, argc > 4 ? argv[4] : "");
  measure(DType::BFloat16, "bf16", tokens, h, rounds, argc > 4 ? argv[4] : "");
}
