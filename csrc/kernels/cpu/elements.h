// Maps the elements of a format to the code that is compiled for them.
#pragma once

#include "dtype.h"
#include "kernels/encoding.h"

namespace transformer_ops::cpu {
namespace {

template <class F>
void with_element(kernel::Element element, F f) {
  using namespace encoding;
  switch (element) {
    case kernel::Element::E4M3:
      return f(Tag<E4M3>());
    case kernel::Element::E5M2:
      return f(Tag<E5M2>());
    case kernel::Element::E2M1:
      return f(Tag<E2M1>());
    case kernel::Element::NF4:
      return f(Tag<NF4>());
    case kernel::Element::Int8:
      return f(Tag<Int8>());
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
