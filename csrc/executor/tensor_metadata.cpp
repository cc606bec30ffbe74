#include "executor/tensor_metadata.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <sstream>

namespace transformer_ops {
namespace {

// Metadata except for the sizes as one number: dtype, device type, device index (a byte each),
// number of sizes; -1 for none.
constexpr int kByte = 8;
constexpr int64_t kMask = 255;
// the size of two packed rows, for which no memory is allocated
constexpr unsigned kUsualLooks = 12;

int64_t head_of(const std::optional<TensorMetadata>& metadata) {
  if (!metadata) return -1;
  return static_cast<int64_t>(metadata->dtype) |
         static_cast<int64_t>(metadata->device.type()) << kByte |
         (metadata->device.index() & kMask) << (2 * kByte) |
         static_cast<int64_t>(metadata->sizes.size()) << (3 * kByte);
}

[[noreturn]] void refuse(const std::string& step, const std::string& what, const char* field,
                         const std::string& wanted, const std::string& got) {
  TORCH_CHECK(false, "[", step, "] gradient of ", what, " must have ", field, " ", wanted, ", got ",
              got);
}

}  // namespace

bool is_real(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_meta() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool lacks_memory(const at::Tensor& tensor) {
  if (tensor.is_nested() || !is_real(tensor) || !tensor.has_storage()) return false;
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  return tensor.numel() > 0 && tensor.storage().nbytes() < needed;
}

std::string shape_text(c10::SymIntArrayRef sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i > 0 ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

std::string dtype_text(at::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

std::string fault_of(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "a nested tensor";
  if (tensor.is_quantized()) return "a quantized tensor";
  if (tensor.layout() != at::kStrided) return c10::str("a tensor of layout ", tensor.layout());
  return lacks_memory(tensor) ? "a tensor whose memory was freed" : "";
}

std::optional<TensorMetadata> metadata_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  return TensorMetadata{c10::SymDimVector(tensor.sym_sizes()), tensor.scalar_type(),
                        tensor.device()};
}

at::Tensor zeros_like(const TensorMetadata& metadata) {
  return at::zeros_symint(metadata.sizes,
                          at::TensorOptions(metadata.dtype).device(metadata.device));
}

c10::IValue pack(uint64_t id, const TensorMetadataList& metadata) {
  if (metadata.empty()) return static_cast<int64_t>(id);
  // The id comes first, then a head and sizes for each row.
  c10::SmallVector<c10::SymInt, kUsualLooks> packed{static_cast<int64_t>(id)};
  for (const auto& metadata : metadata) {
    packed.emplace_back(head_of(metadata));
    if (metadata) packed.append(metadata->sizes.begin(), metadata->sizes.end());
  }
  return c10::SymIntArrayRef(packed);
}

uint64_t unpack_id(const c10::IValue& packed) {
  // Compiled autograd may have made it symbolic.
  if (!packed.isList()) return packed.toInt();
  return packed.toListRef()[0].toSymInt().guard_int(__FILE__, __LINE__);
}

TensorMetadataList unpack_metadata(const c10::IValue& packed) {
  const auto values = packed.toSymIntVector();
  TensorMetadataList metadata;
  for (auto next = values.begin() + 1; next != values.end();) {
    const int64_t head = (next++)->expect_int();
    if (head < 0) {
      metadata.emplace_back();
      continue;
    }
    const int64_t count = head >> (3 * kByte);
    metadata.push_back(TensorMetadata{
        c10::SymDimVector(next, next + count), static_cast<at::ScalarType>(head & kMask),
        at::Device(static_cast<at::DeviceType>(head >> kByte & kMask),
                   static_cast<at::DeviceIndex>(head >> (2 * kByte)))});
    next += count;
  }
  return metadata;
}

at::Tensor fitted(const std::string& step, const std::function<std::string()>& what,
                  at::Tensor gradient, const TensorMetadata& metadata, bool keep_dtype) {
  const c10::SymIntArrayRef sizes = metadata.sizes;
  if (gradient.sym_sizes() != sizes) {
    if (!at::is_expandable_to(sizes, gradient.sym_sizes())) {
      refuse(step, what(), "shape", shape_text(sizes), shape_text(gradient.sym_sizes()));
    }
    gradient = at::sum_to(std::move(gradient), sizes);
  }
  if (gradient.scalar_type() != metadata.dtype && !keep_dtype) {
    if (gradient.is_complex() && !at::isComplexType(metadata.dtype)) {
      refuse(step, what(), "dtype", dtype_text(metadata.dtype), dtype_text(gradient.scalar_type()));
    }
    gradient = gradient.to(metadata.dtype);
  }
  if (gradient.device() != metadata.device) {
    if (gradient.dim() > 0) {
      refuse(step, what(), "device", metadata.device.str(), gradient.device().str());
    }
    gradient = gradient.to(metadata.device);
  }
  return gradient;
}

}  // namespace transformer_ops
