#pragma once

#include <sstream>
#include <stdexcept>

namespace transformer_ops {

// An error in a plan or a rule. The layers that use torch convert it to their own error type.
class PlanError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw PlanError(text.str());
}

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

}  // namespace transformer_ops
