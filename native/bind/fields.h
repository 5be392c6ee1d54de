// Plain structs as Python classes that are made of named fields: Spec(B=2, Hq=8, ...).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "types.h"

namespace nb = nanobind;

namespace regard {

using Four = std::array<int64_t, 4>;

// What Python gives for a field of type T: an integer for an address or an enumeration, four of them for
// strides, else a T.
template <class T>
using Given = std::conditional_t<
    std::is_same_v<T, Strides> || std::is_array_v<T>, Four,
    std::conditional_t<std::is_pointer_v<T> || std::is_enum_v<T> || (std::is_integral_v<T> && sizeof(T) > 1),
                       int64_t, T>>;

template <class T>
void set(T& field, Given<T> value) {
  if constexpr (std::is_pointer_v<T>)
    field = reinterpret_cast<T>(static_cast<uintptr_t>(value));
  else if constexpr (std::is_same_v<T, Strides>)
    field = {value[0], value[1], value[2], value[3]};
  else if constexpr (std::is_array_v<T>)
    std::copy(value.begin(), value.end(), field);
  else
    field = static_cast<T>(std::move(value));
}

template <class Member>
struct Target;
template <class T, class Struct>
struct Target<T Struct::*> {
  using Type = T;
};
template <auto Member>
using Value = Given<typename Target<decltype(Member)>::Type>;

// An optional field that is left out is 0, null or empty.
template <auto Member, bool Optional>
struct Field {
  const char* name;
  auto argument() const {
    if constexpr (Optional)
      return nb::arg(name) = Value<Member>{};
    else
      return nb::arg(name);
  }
};

template <class Struct, auto... Members, bool... Optional>
void bind_struct(nb::module_& m, const char* name, Field<Members, Optional>... fields) {
  nb::class_<Struct>(m, name).def(
      "__init__",
      [](Struct* self, Value<Members>... values) {
        new (self) Struct{};
        (set(self->*Members, std::move(values)), ...);
      },
      nb::kw_only(), fields.argument()...);
}

// What a call has besides q, k, v and their results; those are still to be set.
struct Operands : Call {
  std::vector<MaskTensor> tensors;
};

void bind_structs(nb::module_& m);

}  // namespace regard
