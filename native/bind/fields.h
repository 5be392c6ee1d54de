// Binds plain structs as Python classes whose constructors take the fields as keywords: Spec(B=2, Hq=8, ...).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "types.h"

namespace nb = nanobind;

namespace regard {

using FourInts = std::array<int64_t, 4>;

// A Python sequence, as an argument. nanobind's own conversion to std::vector is noexcept: a failed
// allocation in it would end the process. A function that takes a Sequence converts it in its body, where
// exceptions are caught.
template <class T>
using Sequence = nb::typed<nb::sequence, T>;

template <class T>
std::vector<T> to_vector(const Sequence<T>& items) {
  std::vector<T> values;
  values.reserve(nb::len(items));
  for (nb::handle item : items) values.push_back(nb::cast<T>(item));
  return values;
}

template <class T>
constexpr bool kFourNumbers = std::is_same_v<T, Strides> || std::is_same_v<T, DropoutOrigin>;

// The constructor argument's type for a field of type T: an integer for a pointer or an enum, four integers
// for strides, origins and arrays, a sequence for a vector, otherwise T.
template <class T>
struct ArgumentOf {
  static constexpr bool kIsInt =
      std::is_pointer_v<T> || std::is_enum_v<T> || (std::is_integral_v<T> && sizeof(T) > 1);
  using Type = std::conditional_t<kFourNumbers<T> || std::is_array_v<T>, FourInts,
                                  std::conditional_t<kIsInt, int64_t, T>>;
};
template <class T>
struct ArgumentOf<std::vector<T>> {
  using Type = Sequence<T>;
};
template <class T>
using Argument = typename ArgumentOf<T>::Type;

template <class T>
void set(std::vector<T>& field, const Sequence<T>& items) {
  field = to_vector(items);
}

template <class T>
void set(T& field, Argument<T> value) {
  if constexpr (std::is_pointer_v<T>)
    field = reinterpret_cast<T>(static_cast<uintptr_t>(value));
  else if constexpr (kFourNumbers<T>)
    field = {value[0], value[1], value[2], value[3]};
  else if constexpr (std::is_array_v<T>)
    std::copy(value.begin(), value.end(), field);
  else
    field = static_cast<T>(std::move(value));
}

template <class Member>
struct MemberType;
template <class T, class Struct>
struct MemberType<T Struct::*> {
  using Type = T;
};
template <auto Member>
using MemberArgument = Argument<typename MemberType<decltype(Member)>::Type>;

// A field of a struct, as an argument of its Python constructor. An optional argument defaults to
// 0, null or empty.
template <auto Member, bool Optional>
struct Field {
  const char* name;
  auto argument() const {
    if constexpr (Optional && std::is_base_of_v<nb::object, MemberArgument<Member>>)
      return nb::arg(name) = nb::make_tuple();
    else if constexpr (Optional)
      return nb::arg(name) = MemberArgument<Member>{};
    else
      return nb::arg(name);
  }
};

template <class Struct, auto... Members, bool... Optional>
void bind_struct(nb::module_& m, const char* name, Field<Members, Optional>... fields) {
  nb::class_<Struct>(m, name).def(
      "__init__",
      [](Struct* self, MemberArgument<Members>... values) {
        new (self) Struct{};
        (set(self->*Members, std::move(values)), ...);
      },
      nb::kw_only(), fields.argument()...);
}

// The optional tensors and numbers of a call, as Python fills them in. The pointers to q, k, v and to the
// results are set later, by each method of Attention.
struct Operands : Call {
  std::vector<MaskTensor> tensors;
};

void bind_structs(nb::module_& m);
void bind_projection(nb::module_& m);

}  // namespace regard
