// Sets the last rows to zero, where only the device knows how many.
#include <algorithm>

#include "kernels/cuda/device.h"
#include "kernels/gemm.h"

namespace transformer_ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void zero_rows_kernel(uint4* words, const int64_t* first, int64_t count,
                                 int64_t row_words) {
  const int64_t step = int64_t{gridDim.x} * kThreads, end = count * row_words;
  int64_t i = *first * row_words + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i < end; i += step) store_word(words + i, {0, 0, 0, 0});
}

namespace entry {

void zero_rows_from(Stream stream, void* rows, const int64_t* first, int64_t count,
                    int64_t row_bytes) {
  const int64_t words = row_bytes / 16;
  const int64_t blocks =
      std::min<int64_t>(ceil_div(count * words, kThreads), 8 * multiprocessors());
  launch(stream, {blocks, kThreads}, zero_rows_kernel, static_cast<uint4*>(rows), first, count,
         words);
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(zero_rows_from, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
