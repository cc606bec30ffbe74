#include "quantization/delayed_scaling.h"

namespace transformer_ops::delayed_scaling {

void check_position(const char* op, int64_t position) {
  TORCH_CHECK(position >= 0 && position < kPositions, "[", op, "] position must be 0, 1 or 2, got ",
              position);
}

void check_row(const char* op, const char* name, const Tensor& buffer) {
  TORCH_CHECK((buffer.dim() == 1 || buffer.dim() == 2) && buffer.size(0) == kPositions &&
                  buffer.scalar_type() == at::kFloat && buffer.is_contiguous(),
              "[", op, "] ", name, " must hold ", kPositions, " rows in float32, got ",
              buffer.scalar_type(), " of shape ", buffer.sizes());
}

bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

void take_larger(std::atomic_ref<float> best, float found) {
  float known = best.load(std::memory_order_relaxed);
  while (is_larger(found, known) &&
         !best.compare_exchange_weak(known, found, std::memory_order_relaxed)) {
  }
}

}  // namespace transformer_ops::delayed_scaling
