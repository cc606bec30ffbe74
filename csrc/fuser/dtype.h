#pragma once

#include <optional>
#include <string>

namespace transformer_ops {

// The dtypes that plans distinguish. Unknown is what a Python op returns, or any other dtype.
enum class DType : unsigned char { Unknown, Float16, BFloat16, Float32, Float64 };

std::string to_text(DType dtype);
DType parse_dtype(const std::string& text);

// The result dtype of an addition.
DType promote(DType a, DType b);

}  // namespace transformer_ops
