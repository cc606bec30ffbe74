#include "op/buffer.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorOptions.h>
#include <pthread.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace transformer_ops {
namespace {

// Smaller blocks come from malloc, which caches them itself. Measured on three elementwise ops,
// forward and backward: as fast as malloc up to 256 KiB, 0.9 of its time at 512 KiB, half of it
// from 1 MiB on.
constexpr size_t kSmallest = size_t{64} << 10;

// A quarter of the memory is enough for what one step reuses. The page cache and other processes
// lose that much if this process stops while it holds it.
size_t first_limit() {
  const char* const text = std::getenv("TRANSFORMER_OPS_POOL_LIMIT");
  if (text == nullptr) return memory::system_memory().total / 4;
  size_t limit = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, limit);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end,
                    "[memory] TRANSFORMER_OPS_POOL_LIMIT must be a number of bytes, got '", text,
                    "'");
  return limit;
}

thread_local at::Tensor result_buffer;

memory::Pool* make_pool() {
  // It is never deleted, because tensors may be freed after every static object.
  static memory::Pool* made = nullptr;
  made = new memory::Pool(first_limit());
  pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
  return made;
}

void give_back(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  pool().free(data);
}

// Allocates a small block with torch's alignment. malloc caches blocks of recent sizes for each
// thread; posix_memalign() searches, splits and merges instead (0.2 us against 0.05 us).
void* allocate_small(size_t bytes) {
  auto* const block = static_cast<char*>(std::malloc(bytes + c10::gAlignment));
  if (block == nullptr) return nullptr;
  const size_t beyond = reinterpret_cast<uintptr_t>(block) % c10::gAlignment;
  char* const data = block + (c10::gAlignment - beyond);
  std::memcpy(data - sizeof(void*), &block, sizeof(void*));
  return data;
}

void give_back_small(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  void* block = nullptr;
  std::memcpy(&block, static_cast<char*>(data) - sizeof(void*), sizeof(void*));
  std::free(block);
}
// There is room for the block's address before the data, because malloc aligns at least that much.
static_assert(alignof(std::max_align_t) >= sizeof(void*) &&
              c10::gAlignment % alignof(std::max_align_t) == 0);

// An allocator, because a storage without one cannot be resized.
class PooledAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0 || pool().limit() == 0) return c10::GetCPUAllocator()->allocate(bytes);
    const bool is_small = bytes < kSmallest;
    void* const data = is_small ? allocate_small(bytes) : pool().allocate(bytes);
    if (data == nullptr) fail(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, is_small ? &give_back_small : &give_back, at::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  [[noreturn]] static void fail(size_t bytes) {
    c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "[memory] tensor must fit into memory, got ", bytes,
                     " bytes with ", pool().stats().in_use_bytes,
                     " bytes in use by results of transformer_ops");
  }
};

}  // namespace

memory::Pool& pool() {
  static memory::Pool* const pool = make_pool();
  return *pool;
}

at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  // It is never deleted either, because storages refer to it.
  static auto* const allocator = new PooledAllocator;
  static constexpr c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_generic(sizes, allocator, keys, dtype, std::nullopt));
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  if (device.is_cpu()) return empty_cpu(sizes, dtype);
  const c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, c10::kStrided, device));
  return at::Tensor(at::detail::empty_generic(sizes, c10::GetAllocator(device.type()), keys, dtype,
                                              std::nullopt));
}

at::Tensor memory_for(const at::Tensor& gradient, bool wanted, const at::Tensor& input) {
  return wanted ? gradient : empty(input.sizes(), gradient.scalar_type(), input.device());
}

bool is_last_reference(const at::Tensor& tensor) {
  if (tensor.use_count() != 1 || tensor.storage().use_count() != 1) return false;
  const auto deleter = tensor.storage().data_ptr().get_deleter();
  if (tensor.is_cpu()) return deleter == &give_back;
  return deleter == c10::GetAllocator(tensor.device().type())->raw_deleter();
}

void write_next_result_into(at::Tensor buffer) { result_buffer = std::move(buffer); }

at::Tensor take_result_buffer(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  if (!result_buffer.defined()) return {};
  const at::Tensor found = std::move(result_buffer);
  const bool fits = found.sizes() == sizes && found.scalar_type() == dtype &&
                    found.device() == device && found.is_contiguous();
  return fits ? found : at::Tensor();
}

at::Tensor contiguous(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  return empty(tensor.sizes(), tensor.scalar_type(), tensor.device()).copy_(tensor);
}

}  // namespace transformer_ops
