// Kernel wrappers, shape rules and decompositions are plain functions of the schema's arguments:
//   void rms_norm_cpu(const Tensor& input, const Tensor& weight, double eps,
//                     bool zero_centered_gamma, Tensor& output, Tensor& rstd);
// A function that needs the op's name or main_grad takes `const Checks&` or `const Call&` first.
// The classes here hold such a function, and register_typed_op compares it with the schema.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "op/checks.h"
#include "op/parameter.h"

namespace transformer_ops {

struct Schema;

// The buffer that takes the gradient of a weight instead of a result.
struct MainGrad {
  Tensor buffer = {};    // undefined if there is none
  bool adds = false;     // adds to the buffer's contents instead of overwriting them
  Tensors buffers = {};  // one buffer for each tensor of a listed weight
};

// What a kernel wrapper may need besides its arguments.
class Call : public Checks {
 public:
  explicit Call(const char* op, MainGrad main_grad = {}, OperandScales scales = {},
                bool takes_codes = false)
      : Checks(op, takes_codes, std::move(scales)), main_grad_(std::move(main_grad)) {}

  const MainGrad& main_grad() const { return main_grad_; }

 private:
  MainGrad main_grad_;
};

// The arguments of one call of a typed op, in schema order.
using Values = std::span<c10::IValue>;

// The results of one call. A result that is a list is in `lists`, at its own position. `lists` is
// empty if no result is a list.
struct Results {
  Tensors tensors = {};
  std::vector<Tensors> lists = {};
};

// ---- a signature as registration sees it

struct CppParameter {
  const char* name;         // as C++ spells it
  const char* schema;       // the schema types that it accepts; null if it is no argument
  const char* result = "";  // the schema type of the result that it receives
};

struct CppSignature {
  static constexpr int kAny = -1;

  const CppParameter* parameters;  // the last one has no name
  const char* returned;            // "std::tuple" for any tuple of tensors and lists of them
  int results;                     // the number of returned results, or of parameters to fill
  const bool* lists = nullptr;     // for each result of a tuple: is it a list?
};

template <typename P>
constexpr bool is_context = std::is_same_v<P, const Checks&> || std::is_same_v<P, const Call&>;
template <typename P>
constexpr bool is_list_result = std::is_same_v<P, Tensors&>;
template <typename P>
constexpr bool is_result = std::is_same_v<P, Tensor&> || is_list_result<P>;

template <typename P>
constexpr size_t argument_count() {
  if constexpr (is_context<P> || is_result<P>) {
    return 0;
  } else if constexpr (requires { BodyParameter<P>::kCount; }) {
    return BodyParameter<P>::kCount;
  } else {
    return 1;
  }
}

template <typename P>
constexpr CppParameter cpp_parameter() {
  if constexpr (std::is_same_v<P, const Checks&>) {
    return {"const Checks&", nullptr};
  } else if constexpr (std::is_same_v<P, const Call&>) {
    return {"const Call&", nullptr};
  } else if constexpr (is_list_result<P>) {
    return {"Tensors&", nullptr, "Tensor[]"};
  } else if constexpr (is_result<P>) {
    return {"Tensor&", nullptr, "Tensor"};
  } else {
    return {BodyParameter<P>::kName, BodyParameter<P>::kSchema};
  }
}

// All results one after another, with the tensors of lists in their order.
template <typename R>
struct Returned;
template <>
struct Returned<void> {
  static constexpr char kName[] = "void";
};
template <>
struct Returned<TensorSpecs> {
  static constexpr char kName[] = "TensorSpecs";
  static constexpr int kResults = CppSignature::kAny;
};
template <>
struct Returned<Tensors> {
  static constexpr char kName[] = "Tensors";
  static constexpr int kResults = CppSignature::kAny;
  static Tensors list(Tensors results) { return results; }
};
template <>
struct Returned<Tensor> {
  static constexpr char kName[] = "Tensor";
  static constexpr int kResults = 1;
  static Tensors list(Tensor result) {
    Tensors results;
    results.push_back(std::move(result));
    return results;
  }
};
template <typename... T>
struct Returned<std::tuple<T...>> {
  static_assert(((std::is_same_v<T, Tensor> || std::is_same_v<T, Tensors>)&&...),
                "results are tensors, or lists of them");
  static constexpr char kName[] = "std::tuple";
  static constexpr int kResults = sizeof...(T);
  static constexpr bool kLists[] = {std::is_same_v<T, Tensors>...};
  static Tensors list(std::tuple<T...> found) {
    Tensors results;
    results.reserve(sizeof...(T));
    std::apply([&](auto&... result) { (add(results, result), ...); }, found);
    return results;
  }

 private:
  static void add(Tensors& results, Tensor& result) { results.push_back(std::move(result)); }
  static void add(Tensors& results, Tensors& list) {
    results.insert(results.end(), std::make_move_iterator(list.begin()),
                   std::make_move_iterator(list.end()));
  }
};

// ---- calls

template <typename Function>
struct Callable : Callable<decltype(&Function::operator())> {};
template <typename Class, typename R, typename... P>
struct Callable<R (Class::*)(P...) const> : Callable<R (*)(P...)> {};
template <typename R, typename... P>
struct Callable<R (*)(P...)> {
  using Result = R;

  static constexpr bool kFills = std::is_void_v<R>;

  static constexpr CppParameter kParameters[] = {cpp_parameter<P>()..., {nullptr, nullptr}};
  static constexpr int results() {
    if constexpr (kFills) {
      return (0 + ... + is_result<P>);
    } else {
      return Returned<R>::kResults;
    }
  }
  static constexpr const bool* lists() {
    if constexpr (requires { Returned<R>::kLists; }) {
      return Returned<R>::kLists;
    } else {
      return nullptr;
    }
  }
  static constexpr CppSignature kSignature = {kParameters, Returned<R>::kName, results(), lists()};

  template <typename Function, typename Context>
  [[gnu::always_inline]] static R call(const Function& function, const Context& context,
                                       Values values, Results* results) {
    return unpack(function, context, values, results, std::index_sequence_for<P...>());
  }

 private:
  // For each parameter, the index of its argument, or of its result among the results.
  static constexpr auto kPlaces = [] {
    std::array<size_t, sizeof...(P)> places = {};
    constexpr size_t counts[] = {argument_count<P>()..., 0};
    constexpr bool fills[] = {is_result<P>..., false};
    size_t argument = 0, result = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      places[i] = fills[i] ? result++ : argument;
      argument += counts[i];
    }
    return places;
  }();

  template <typename Function, typename Context, size_t... I>
  [[gnu::always_inline]] static R unpack(const Function& function, const Context& context,
                                         Values values, Results* results,
                                         std::index_sequence<I...>) {
    return function(get<P, kPlaces[I]>(context, values, results)...);
  }

  template <typename Parameter, size_t place, typename Context>
  [[gnu::always_inline]] static decltype(auto) get(const Context& context, Values values,
                                                   Results* results) {
    if constexpr (is_context<Parameter>) {
      return (context);
    } else if constexpr (is_list_result<Parameter>) {
      return (results->lists[place]);
    } else if constexpr (is_result<Parameter>) {
      return (results->tensors[place]);
    } else {
      return BodyParameter<Parameter>::get(values[place]);
    }
  }
};

// The common base of the three classes below.
class TypedFunction {
 public:
  TypedFunction() = default;
  explicit operator bool() const { return target_ != nullptr; }

  // Raises if the function does not match the schema. `text` is the schema, and `field` names the
  // function in the error. A decomposition may omit results.
  void check(const Schema& schema, const std::string& text, const char* field,
             bool may_leave_out = false) const;
  // Skips a first tensor argument, which the function does not see.
  void skip_first() { ++skipped_; }
  // Drops the last result, a tensor: the function gets an undefined tensor for it.
  void drop_last_result() { drops_last_ = true; }

 protected:
  template <typename Function>
  void hold(Function function) {
    target_ = std::make_shared<const Function>(std::move(function));
    signature_ = &Callable<Function>::kSignature;
  }

  const void* target() const { return target_.get(); }
  Values seen(Values values) const { return values.subspan(skipped_); }

  std::shared_ptr<const void> target_;
  const CppSignature* signature_ = nullptr;  // null if the frame made the function for its schema
  size_t skipped_ = 0;
  bool drops_last_ = false;
};

template <typename Function>
concept PlainFunction = !std::is_base_of_v<TypedFunction, Function>;

// Checks the arguments ([op] what RULE, got VALUE), then returns the results' sizes and dtypes.
// Sizes may be symbolic.
class ShapeRule : public TypedFunction {
 public:
  using FromValues = std::function<TensorSpecs(const Checks&, Values)>;

  ShapeRule() = default;
  // Wraps a function that the frame made for its schema.
  static ShapeRule of_values(FromValues function) {
    ShapeRule rule;
    rule.run_ = [](const void* target, const Checks& check, Values values) {
      return (*static_cast<const FromValues*>(target))(check, values);
    };
    rule.target_ = std::make_shared<const FromValues>(std::move(function));
    return rule;
  }
  template <PlainFunction Function>
  ShapeRule(Function function) : run_(&run<Function>) {
    static_assert(std::is_same_v<typename Callable<Function>::Result, TensorSpecs>);
    hold(std::move(function));
  }

  TensorSpecs operator()(const Checks& check, Values values) const {
    TensorSpecs specs = run_(target(), check, seen(values));
    if (drops_last_) specs.pop_back();
    return specs;
  }

 private:
  template <typename Function>
  static TensorSpecs run(const void* target, const Checks& check, Values values) {
    return Callable<Function>::call(*static_cast<const Function*>(target), check, values, nullptr);
  }

  TensorSpecs (*run_)(const void*, const Checks&, Values) = nullptr;
};

// Computes the same as the op in plain differentiable ATen calls. Results that only backward uses
// may be omitted.
class Decomposition : public TypedFunction {
 public:
  using FromValues = std::function<Tensors(const Checks&, Values)>;

  Decomposition() = default;
  // Wraps a function that the frame made for its schema.
  static Decomposition of_values(FromValues function) {
    Decomposition decomposition;
    decomposition.run_ = [](const void* target, const Checks& check, Values values) {
      return (*static_cast<const FromValues*>(target))(check, values);
    };
    decomposition.target_ = std::make_shared<const FromValues>(std::move(function));
    return decomposition;
  }
  template <PlainFunction Function>
  Decomposition(Function function) : run_(&run<Function>) {
    static_assert(!Callable<Function>::kFills, "a decomposition returns its results");
    hold(std::move(function));
  }

  Tensors operator()(const Checks& check, Values values) const {
    Tensors results = run_(target(), check, seen(values));
    if (drops_last_) results.pop_back();
    return results;
  }

 private:
  template <typename Function>
  static Tensors run(const void* target, const Checks& check, Values values) {
    using Target = Callable<Function>;
    return Returned<typename Target::Result>::list(
        Target::call(*static_cast<const Function*>(target), check, values, nullptr));
  }

  Tensors (*run_)(const void*, const Checks&, Values) = nullptr;
};

// Fills results that the frame allocated, or returns new ones, one after another.
class Body : public TypedFunction {
 public:
  using FromValues = std::function<void(const Call&, Values, Results&)>;

  Body() = default;
  // Wraps a function that the frame made for its schema, and that fills its results.
  static Body of_values(FromValues function) {
    Body body;
    body.run_ = [](const void* target, const Call& call, Values values, Results& results) {
      (*static_cast<const FromValues*>(target))(call, values, results);
    };
    body.target_ = std::make_shared<const FromValues>(std::move(function));
    return body;
  }
  template <PlainFunction Function>
  Body(Function function) : run_(&run<Function>), fills_(Callable<Function>::kFills) {
    hold(std::move(function));
  }

  bool fills() const { return fills_; }
  void operator()(const Call& call, Values values, Results& results) const {
    if (drops_last_ && fills_) results.tensors.emplace_back();
    run_(target(), call, seen(values), results);
    if (drops_last_) results.tensors.pop_back();
  }

 private:
  template <typename Function>
  static void run(const void* target, const Call& call, Values values, Results& results) {
    using Target = Callable<Function>;
    const auto& function = *static_cast<const Function*>(target);
    if constexpr (Target::kFills) {
      Target::call(function, call, values, &results);
    } else {
      results.tensors =
          Returned<typename Target::Result>::list(Target::call(function, call, values, nullptr));
    }
  }

  void (*run_)(const void*, const Call&, Values, Results&) = nullptr;
  bool fills_ = true;
};

}  // namespace transformer_ops
