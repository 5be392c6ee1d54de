// Transforms the scores of a panel between the two matrix products: softcap, bias, mask, softmax
// weights, dropout. A tile of scores, tile[R][2], is R keys with query rows in the lanes, and is
// transformed while it is in registers. Scores are in base 2 (multiplied by log2(e)).
#pragma once
#include "kernels/gemm.inl.h"
#include "kernels/math.inl.h"
#include "kernels/pack.inl.h"

namespace {

constexpr double kLog2E = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

// Returns the factor from q . k to a score in base 2, or to the argument of tanh_of with a softcap.
inline double score_factor(const Spec& spec) {
  return spec.softcap > 0 ? 2 * kLog2E * spec.scale / spec.softcap : kLog2E * spec.scale;
}

// Coordinates of the keys that a panel processes at a time. Lane t is query row `row + t *
// row_step` with position `position + t * row_step`; key c is key `key + c * key_step` of the call.
struct TileCoords {
  int64_t batch, head;
  int64_t row, row_step, position;
  int64_t key, key_step;
  int rows;
};

// Merges adjacent spans of a panel in keys [begin, end) and calls visit(first span, from, to,
// partial) for each group. `partial`: some lane may not attend to some key. Advances `cur` to the
// first span that ends after `begin`.
template <class Visit>
inline void visit_spans(const Panel& p, int64_t& cur, int64_t begin, int64_t end, uint32_t all, Visit visit) {
  while (cur < p.n_spans && p.spans[cur].end <= begin) ++cur;
  for (int64_t i = cur; i < p.n_spans && p.spans[i].begin < end;) {
    const Span* first = p.spans + i;
    const int64_t from = first->begin > begin ? first->begin : begin;
    int64_t to = from;
    bool partial = false;
    for (; i < p.n_spans && to < end && p.spans[i].begin <= to; ++i) {
      partial |= p.spans[i].lanes != all;
      to = p.spans[i].end < end ? p.spans[i].end : end;
    }
    visit(first, from, to, partial);
  }
}

inline int64_t clamp_index(int64_t i, int64_t count) { return i < 0 ? 0 : i < count ? i : count - 1; }

// Prefetches rows one after the other. Memory serves them faster in this order than in the order in
// which pack reads them, one line of each row.
template <class S>
void prefetch_rows(const S* first, int64_t row_stride, int rows, int64_t cols) {
  constexpr int64_t line = 64 / sizeof(S);
  for (int r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += line) __builtin_prefetch(first + r * row_stride + c);
}

// biases[key][lane] of a tensor. Lanes without a row get 0.
template <class V, class S>
void load_tensor_bias(const S* bias, const Strides& s, const TileCoords& at, int64_t n, Number<V>* biases) {
  const S* first = bias + at.batch * s.b + at.head * s.h + at.row * s.l + at.key * s.d;
  const int64_t row_stride = s.l * at.row_step, key_stride = s.d * at.key_step;
  const Scaled<V> unscaled{1};
  for (int64_t i = 0; i < n * kPanel<V> && at.rows < kPanel<V>; ++i) biases[i] = 0;
  if (row_stride == 0) return pack_broadcast<V>(first, key_stride, n, unscaled, biases);
  if (key_stride == 1) prefetch_rows(first, row_stride, at.rows, n);
  pack<V>(first, row_stride, key_stride, at.rows, n, unscaled, biases);
}

// biases[key][lane] = table[position - key]. The table's `count` columns begin at distance `low`.
// Distances beyond its ends use the first or last column.
template <class V>
void load_relative(const Number<V>* table, int64_t low, int64_t count, const TileCoords& at, int64_t n,
                   Number<V>* biases) {
  constexpr int P = kPanel<V>;
  for (int64_t c = 0; c < n; ++c, biases += P) {
    const int64_t first = at.position - (at.key + c * at.key_step) - low,
                  last = first + (P - 1) * at.row_step;
    if (at.row_step == 1 && first >= 0 && last < count)
      for (int r = 0; r < P; r += V::N) Lanes<V>::store(biases + r, Lanes<V>::load(table + first + r));
    else
      for (int t = 0; t < P; ++t) biases[t] = table[clamp_index(first + t * at.row_step, count)];
  }
}

// Lists the lanes that may attend to each key of [begin, end). `spans` is the span that contains
// `begin`.
inline void list_lanes(const Span* spans, int64_t begin, int64_t end, uint32_t* lanes) {
  for (int64_t key = begin; key < end; ++spans)
    for (const int64_t stop = spans->end < end ? spans->end : end; key < stop; ++key)
      lanes[key - begin] = spans->lanes;
}

// Turns tiles of products of queries and keys into scores: softcap, bias, mask. Backward also stores
// the softcap's derivatives.
template <class V, bool Slopes = false>
struct ScoreOptions {
  using Scalar = Number<V>;
  static constexpr int P = kPanel<V>;
  const Spec& spec;
  TileCoords at;
  Scalar slope = 0;                 // of ALiBi
  const Scalar* biases = nullptr;   // [key][P]; or null
  const uint32_t* lanes = nullptr;  // of each key; or null if all lanes may attend to all keys
  Scalar* cap_slopes = nullptr;     // [key][P]

  // Transforms the scores of keys [c, c + R).
  template <int R>
  REGARD_INLINE void operator()(int64_t c, V (&tile)[R][2]) const {
    if (spec.softcap > 0) cap(c, tile);
    if (spec.bias == kAlibi) add_alibi(c, tile);
    if (biases) {
      const Biased<V> put{static_cast<Scalar>(kLog2E)};
      each_vector(tile,
                  [&](int r, int i, V& x) { x = put(x, Lanes<V>::load(biases + vector_at(c + r, i))); });
    }
    if (lanes) {
      const V minus_inf = Lanes<V>::set(static_cast<Scalar>(-__builtin_inf()));
      each_vector(tile, [&](int r, int i, V& x) {
        x = select(Lanes<V>::mask(lanes[c + r], i * V::N), x, minus_inf);
      });
    }
  }

  static int64_t vector_at(int64_t c, int i) { return (2 * c + i) * V::N; }

  template <int R>
  REGARD_INLINE void cap(int64_t c, V (&tile)[R][2]) const {
    const V factor = Lanes<V>::set(static_cast<Scalar>(spec.softcap * kLog2E)), one = Lanes<V>::set(1);
    UNROLLED (r, R) tanh_of(tile[r]);
    each_vector(tile, [&](int r, int i, V& x) {
      if (Slopes) Lanes<V>::store(cap_slopes + vector_at(c + r, i), one - x * x);
      x = x * factor;
    });
  }

  // Adds -slope * |position - key|.
  template <int R>
  REGARD_INLINE void add_alibi(int64_t c, V (&tile)[R][2]) const {
    const V factor = Lanes<V>::set(static_cast<Scalar>(-slope * kLog2E));
    const V step = Lanes<V>::set(static_cast<Scalar>(at.row_step)),
            lowest = Lanes<V>::set(Biased<V>::kLowest);
    each_vector(tile, [&](int r, int i, V& x) {
      const int64_t base = at.position + i * V::N * at.row_step - (at.key + (c + r) * at.key_step);
      const V distance = abs(fma(Lanes<V>::iota(), step, Lanes<V>::set(static_cast<Scalar>(base))));
      x = max(lowest, fma_once(distance, factor, x));
    });
  }
};

// Returns whether load_options writes biases.
inline bool has_bias_block(const Spec& spec) { return spec.bias == kTensorBias || spec.bias == kRelative; }

// Loads what the options need for keys [begin, end) of a panel, whose spans begin with `spans`.
// Writes to biases[n][P] and lanes[n].
template <class V, class S, bool Slopes = false>
ScoreOptions<V, Slopes> load_options(const Spec& spec, const Call& call, const TileCoords& at,
                                     const Span* spans, bool partial, int64_t begin, int64_t end,
                                     Number<V>* biases, uint32_t* lanes) {
  const Number<V>* by_head = static_cast<const Number<V>*>(call.by_head);
  ScoreOptions<V, Slopes> options{spec, at};
  if (spec.bias == kAlibi) options.slope = by_head[at.head];
  if (spec.bias == kRelative)
    load_relative<V>(by_head + at.head * call.distances, call.distance_low, call.distances, at, end - begin,
                     biases);
  if (spec.bias == kTensorBias) {
    if (spec.bias_dtype == kFloat32)
      load_tensor_bias<V>(static_cast<const float*>(call.bias), spec.bias_stride, at, end - begin, biases);
    else
      load_tensor_bias<V>(static_cast<const S*>(call.bias), spec.bias_stride, at, end - begin, biases);
  }
  if (has_bias_block(spec)) options.biases = biases;
  if (!partial) return options;
  list_lanes(spans, begin, end, lanes);
  options.lanes = lanes;
  return options;
}

// Computes scores[n][P] of n keys and each lane's largest score. `depth` is the number of elements of a
// key. Independent of the dtype, which would multiply the code.
template <class O, class V>
void score_keys(const ScoreOptions<V>& options, const Number<O>* keys, int64_t ld, int64_t n,
                const Number<O>* queries, int64_t depth, Number<V>* scores, V (&lane_max)[2]) {
  const V factor = Lanes<V>::set(static_cast<Number<V>>(score_factor(options.spec)));  // of pairs
  V largest[2];
  largest[0] = largest[1] = Lanes<V>::set(static_cast<Number<V>>(-__builtin_inf()));
  multiply_rows<O>(keys, ld, n, queries, depth, scores, [&](int64_t c, auto& tile) {
    if (O::kTerms == 2) each_vector(tile, [&](int, int, V& x) { x = x * factor; });
    options(c, tile);
    each_vector(tile, [&](int, int i, V x) { largest[i] = max(x, largest[i]); });
    store_rows(scores + c * kPanel<V>, tile);
  });
  lane_max[0] = largest[0];
  lane_max[1] = largest[1];
}

// Replaces scores by exp(scores) and adds each lane's sum to its total. Even and odd keys have sums
// of their own, which halves the dependency chain. The first key is key `begin` of the task.
template <class V, class Exp>
inline void exponentiate_with(Number<V>* scores, int64_t begin, int64_t n, const Exp (&exp)[2],
                              Number<V>* total) {
  V sum[2][2];
  for (int i = 0; i < 2; ++i) sum[0][i] = sum[1][i] = Lanes<V>::zero();
  const auto step = [&](int64_t c, V(&partial)[2]) {
    UNROLLED (i, 2) {
      Number<V>* score = scores + (2 * c + i) * V::N;
      const V weight = exp[i](Lanes<V>::load(score));
      Lanes<V>::store(score, weight);
      partial[i] = partial[i] + weight;
    }
  };
  int64_t c = 0;
  if (begin & 1) step(c++, sum[1]);
  for (; c + 1 < n; c += 2) {
    step(c, sum[0]);
    step(c + 1, sum[1]);
  }
  if (c < n) step(c, sum[0]);
  for (int i = 0; i < 2; ++i)
    Lanes<V>::store(total + i * V::N, Lanes<V>::load(total + i * V::N) + (sum[0][i] + sum[1][i]));
}

// 2^(s - shift) for shifts of any size. Lanes with a large shift subtract before rounding.
template <class V>
struct LargeShiftExp2 {
  V shift;
  V operator()(V s) const {
    const auto large = less(Lanes<V>::set(Exp2<V>::kLargestShift), abs(shift));
    return select(large, exp2(s - shift), ShiftedExp2<V>(shift)(s));
  }
};

// Leaves weights as they are: for exponentiate_pairs_with, if they are already exponentiated.
template <class V>
struct SameWeight {
  V operator()(V weight) const { return weight; }
};

// Replaces a shift of -inf, which a lane has before its first key, by 0.
template <class V>
inline V finite_shift(V shift) {
  return keep(differs(shift, Lanes<V>::set(static_cast<Number<V>>(-__builtin_inf()))), shift);
}

// Initialises a head's softmax with its sink, or empty if there is none.
template <class V>
inline void start_softmax(const Call& call, int64_t head, V& shift, V& total) {
  using Scalar = Number<V>;
  shift = Lanes<V>::set(static_cast<Scalar>(-__builtin_inf()));
  total = Lanes<V>::zero();
  if (!call.sink) return;
  const V sink = Lanes<V>::set(static_cast<Scalar>(static_cast<const Scalar*>(call.sink)[head] * kLog2E));
  shift = ceil(sink);
  total = exp2(sink - finite_shift(shift));
}

// Calls use(power) with functors of the two vectors of a panel that return 2^(s - shift).
template <class V, class Use>
inline void with_power(const V (&shift)[2], Use use) {
  using Fast = ShiftedExp2<V>;
  if (Fast::fits(shift[0]) && Fast::fits(shift[1])) {
    const Fast power[2] = {Fast(shift[0]), Fast(shift[1])};
    use(power);
  } else {
    const LargeShiftExp2<V> power[2] = {{shift[0]}, {shift[1]}};
    use(power);
  }
}

// Replaces scores by 2^(scores - shift) and adds each lane's sum to its total.
template <class V>
void exponentiate(Number<V>* scores, int64_t begin, int64_t n, const V (&shift)[2], Number<V>* total) {
  with_power<V>(shift, [&](const auto& power) { exponentiate_with<V>(scores, begin, n, power, total); });
}

#ifdef REGARD_PAIRS
// Calls visit(word, even, odd) for the words that hold n keys, with the index of each key, or -1 for
// none. If `odd`, the first key is the odd one of its word.
template <class Visit>
REGARD_INLINE void visit_words(bool odd, int64_t n, Visit visit) {
  int64_t word = 0, key = odd;
  if (odd) visit(word++, -1, 0);
  for (; key + 1 < n; key += 2) visit(word++, key, key + 1);
  if (key < n) visit(word, key, -1);
}

// Turns scores[n][P] into weights, rounds them to words of two keys and adds each lane's sums of the
// exact and of the rounded weights to its totals.
template <class Power>
inline void exponentiate_pairs_with(const float* scores, bool odd, int64_t n, const Power (&power)[2],
                                    uint32_t* words, float* total, float* rounded_total) {
  constexpr int N = Floats::N;
  const Floats zero = Lanes<Floats>::zero();
  const Pairs ones = Lanes<Pairs>::set(0x3F803F80);
  Floats sum[2] = {zero, zero}, rounded[2] = {zero, zero};
  const auto weight = [&](int64_t key, int i) {
    return key < 0 ? zero : power[i](Lanes<Floats>::load(scores + (2 * key + i) * N));
  };
  visit_words(odd, n, [&](int64_t word, int64_t first, int64_t second) REGARD_ALWAYS {
    UNROLLED (i, 2) {
      const Floats x = weight(first, i), y = weight(second, i);
      const Pairs both = pair(x, y);
      sum[i] = sum[i] + (x + y);
      rounded[i] = fma(both, ones, rounded[i]);
      Lanes<Pairs>::store(words + (2 * word + i) * N, both);
    }
  });
  for (int i = 0; i < 2; ++i) {
    Lanes<Floats>::store(total + i * N, Lanes<Floats>::load(total + i * N) + sum[i]);
    Lanes<Floats>::store(rounded_total + i * N, Lanes<Floats>::load(rounded_total + i * N) + rounded[i]);
  }
}

// Rounds rows[n][P] to words of two keys.
inline void pair_keys(const float* rows, bool odd, int64_t n, uint32_t* words) {
  constexpr int N = Floats::N;
  const auto load = [&](int64_t key, int i) {
    return key < 0 ? Lanes<Floats>::zero() : Lanes<Floats>::load(rows + (2 * key + i) * N);
  };
  visit_words(odd, n, [&](int64_t word, int64_t first, int64_t second) REGARD_ALWAYS {
    UNROLLED (i, 2) Lanes<Pairs>::store(words + (2 * word + i) * N, pair(load(first, i), load(second, i)));
  });
}
#endif

inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Returns the two 32-bit words that seed the dropout of one query row.
inline uint64_t dropout_stream(const Spec& spec, const Call& call, int64_t b, int64_t h, int64_t row) {
  const DropoutOrigin& origin = call.origin;
  const int64_t head_index = origin.head + b * (origin.heads ? origin.heads : spec.Hq) + h;
  const uint64_t head_seed = mix(mix(call.seed + 0x9E3779B97F4A7C15u) + static_cast<uint64_t>(head_index));
  return mix(head_seed + static_cast<uint64_t>(origin.query + row));
}

// Computes the dropout words of a panel's lanes.
template <class V>
void dropout_streams(const Spec& spec, const Call& call, int64_t b, int64_t h, int64_t row, int64_t row_step,
                     uint32_t* low, uint32_t* high) {
  for (int t = 0; t < kPanel<V>; ++t) {
    const uint64_t stream = dropout_stream(spec, call, b, h, row + t * row_step);
    low[t] = static_cast<uint32_t>(stream);
    high[t] = static_cast<uint32_t>(stream >> 32);
  }
}

// Returns whether a weight is dropped. `key` includes the origin's.
inline bool dropped(uint64_t stream, int64_t key, uint32_t drop_below) {
  uint32_t x = static_cast<uint32_t>(key >> 1) * 0x9E3779B9u + static_cast<uint32_t>(stream);
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15 ^ static_cast<uint32_t>(stream >> 32)) * 0x846CA68Bu;
  x ^= x >> 16;
  return (key & 1 ? x >> 16 : x & 0xFFFF) < drop_below;
}

inline Words dropout_words(Words a, Words c, int64_t pair) {
  Words x = words(static_cast<uint32_t>(pair) * 0x9E3779B9u) + a;
  x = (x ^ shift_right(x, 16)) * words(0x7FEB352Du);
  x = (x ^ shift_right(x, 15) ^ c) * words(0x846CA68Bu);
  return x ^ shift_right(x, 16);
}

// Marks a dropped weight: zero, or, for backward, which needs the weight, a negative sign.
template <class V>
struct Zeroed {
  V operator()(typename Lanes<V>::Mask kept, V weight) const { return keep(kept, weight); }
};
template <class V>
struct Negated {
  V operator()(typename Lanes<V>::Mask kept, V weight) const {
    return select(kept, weight, Lanes<V>::zero() - weight);
  }
};

// Applies dropout to a tile of weights. `low` and `high` are the lanes' dropout words. Two
// neighbouring keys share one 32-bit random number. `key` is the first key, with the origin's; keys are
// `key_step` apart.
template <class V, template <class> class Mark>
void drop(const uint32_t* low, const uint32_t* high, int64_t key, int64_t key_step, uint32_t drop_below,
          int64_t n, Number<V>* weights) {
  const Words limit = words(drop_below - 1), half = words(0xFFFF);
  for (int r = 0; r < kPanel<V>; r += Words::N) {
    const Words a = load_words(low + r), b = load_words(high + r);
    int64_t pair = -1;
    Words x = a;
    for (int64_t c = 0; c < n; ++c) {
      const int64_t at = key + c * key_step;
      if (at >> 1 != pair) x = dropout_words(a, b, pair = at >> 1);
      const auto kept = greater(at & 1 ? shift_right(x, 16) : x & half, limit);
      for (int i = 0; i < Words::N / V::N; ++i) {
        Number<V>* w = weights + c * kPanel<V> + r + i * V::N;
        Lanes<V>::store(w, Mark<V>()(Lanes<V>::mask(kept, i), Lanes<V>::load(w)));
      }
    }
  }
}

}  // namespace
