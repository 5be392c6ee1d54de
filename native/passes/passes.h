// The passes. Each divides a call into tasks and runs them on PyTorch's threads. `code` is the mask program.
#pragma once
#include <tuple>
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

struct Cost;  // mask/spans.h
using Ints = std::vector<int64_t>;

Outcome forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt);

Outcome backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code,
                 Interrupt interrupt);

// Returns whether the call has so few query rows that it is divided along the keys, by `decode`.
bool decodes(const Spec& spec);
Outcome decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt);

// Computes facts about the attention weights. The call has no values (Dv = 0) and no output.
Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code,
                 Interrupt interrupt);

Outcome linear_forward(const LinearSpec& spec, const LinearCall& call, Interrupt interrupt);
Outcome linear_backward(const LinearSpec& spec, const LinearCall& call, const LinearGradients& grads,
                        Interrupt interrupt);

// Reads memory once with up to `threads` threads, to measure its bandwidth. A block is an address and
// a number of bytes.
using Block = std::tuple<int64_t, int64_t>;
void read_once(const std::vector<Block>& blocks, int threads);

// A linear layer with few rows. It takes milliseconds, so it cannot be interrupted.
void project(const Projection& projection);

// Counts the pairs that the mask allows, in the panels that forward processes.
Outcome count_pairs(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt, Cost& cost);

// How forward divides a call.
struct TaskPlan {
  int64_t tasks;
  int64_t scratch_bytes;  // per thread
  int threads;
};
Outcome plan_tasks(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt, TaskPlan& plan);
Outcome plan_decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt,
                    TaskPlan& plan);

}  // namespace regard
