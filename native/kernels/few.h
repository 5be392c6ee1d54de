// Training with few queries.
#pragma once
#include <stdint.h>

namespace regard {

// With at most this many queries, forward uses the decode pass even if backward follows, and backward has
// channels in the lanes.
constexpr int64_t kFewRows = 8;

}  // namespace regard
