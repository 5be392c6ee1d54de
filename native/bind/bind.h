// What the doors between Python and the core share.
#pragma once
#include <nanobind/nanobind.h>

#include <new>

#include "machine/work.h"

namespace nb = nanobind;

namespace regard {

inline bool signal_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

template <class Work>
void run(Work work) {
  Outcome outcome;
  {
    nb::gil_scoped_release release;
    outcome = work();
  }
  if (outcome == Outcome::kInterrupted) throw nb::python_error();
  if (outcome == Outcome::kOutOfMemory) throw std::bad_alloc();
  if (outcome == Outcome::kWrongPage) throw nb::index_error("a page that does not exist");
}

void bind_linear(nb::module_& m);

}  // namespace regard
