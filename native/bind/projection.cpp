// Binds the linear layer with few rows.
#include "bind/fields.h"
#include "passes/passes.h"

using namespace nb::literals;

namespace regard {

void bind_projection(nb::module_& m) {
  m.def(
      "project",
      [](int64_t dtype, int64_t rows, int64_t depth, int64_t width, int64_t x, int64_t x_row,
         int64_t x_column, int64_t weight, int64_t weight_row, int64_t bias, int64_t out) {
        Projection p{};
        set(p.dtype, dtype), set(p.x, x), set(p.weight, weight), set(p.bias, bias), set(p.out, out);
        p.rows = rows, p.depth = depth, p.width = width;
        p.x_row = x_row, p.x_column = x_column, p.weight_row = weight_row;
        nb::gil_scoped_release release;
        project(p);
      },
      "dtype"_a, "rows"_a, "depth"_a, "width"_a, "x"_a, "x_row"_a, "x_column"_a, "weight"_a, "weight_row"_a,
      "bias"_a, "out"_a);
}

}  // namespace regard
