// Linear attention, shared by forward and backward. One task is one key head; it processes chunks
// of C = 32 tokens in sequence. The products q . k of token pairs within a chunk are computed in
// tiles of 6 tokens x P tokens; tokens of earlier chunks act through the state S (D, Dv). Matrices
// are stored as slices[column / P][row][P], padded with zeros.
#pragma once
#include "kernels/arena.inl.h"
#include "kernels/gemm.inl.h"
#include "kernels/math.inl.h"
#include "kernels/pack.inl.h"

namespace {

template <class V>
inline Number<V> dot(const Number<V>* a, const Number<V>* b, int64_t n) {
  V sum = Lanes<V>::zero();
  int64_t i = 0;
  for (; i + V::N <= n; i += V::N) sum = fma(Lanes<V>::load(a + i), Lanes<V>::load(b + i), sum);
  Number<V> total = lane_sum(sum);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// Scales n elements in place. n is a multiple of V::N.
template <class V>
inline void scale(Number<V>* x, int64_t n, Number<V> factor) {
  for (int64_t i = 0; i < n; i += V::N) Lanes<V>::store(x + i, Lanes<V>::load(x + i) * Lanes<V>::set(factor));
}

// x += y * factor. n is a multiple of V::N.
template <class V>
inline void add_scaled(Number<V>* x, const Number<V>* y, int64_t n, Number<V> factor) {
  for (int64_t i = 0; i < n; i += V::N)
    Lanes<V>::store(x + i, fma(Lanes<V>::load(y + i), Lanes<V>::set(factor), Lanes<V>::load(x + i)));
}

// Functions that load, store and clear n tokens in the caller's layout and dtype, from element
// `start` of the tensor on. All other code works in the compute type and is compiled once for it.
template <class V>
struct TokenAccess {
  using T = Number<V>;
  void (*load)(const void* base, const Strides&, int64_t start, int64_t n, int64_t width, int64_t ld,
               T* rows);
  // Stores slices of kLinearChunk rows, times a factor.
  void (*store)(const T* slices, T factor, int64_t n, int64_t width, void* base, const Strides&,
                int64_t start);
  void (*clear)(void* base, const Strides&, int64_t start, int64_t n, int64_t width);
};

template <class V, class S>
void load_tokens(const void* base, const Strides& s, int64_t start, int64_t n, int64_t width, int64_t ld,
                 Number<V>* rows) {
  copy_rows<V>(static_cast<const S*>(base) + start, s.l, s.d, n, width, ld, rows);
}

template <class V, class S>
void store_tokens(const Number<V>* slices, Number<V> factor, int64_t n, int64_t width, void* base,
                  const Strides& s, int64_t start) {
  unpack_slices<V>(slices, kLinearChunk, n, width, factor, static_cast<S*>(base) + start, s.l, s.d);
}

template <class V, class S>
void clear_tokens(void* base, const Strides& s, int64_t start, int64_t n, int64_t width) {
  S* row = static_cast<S*>(base) + start;
  for (int64_t l = 0; l < n; ++l, row += s.l)
    for (int64_t c = 0; c < width; ++c) from_float(row + c * s.d, Number<V>(0));
}

template <class V, class S>
constexpr TokenAccess<V> kTokenAccess = {load_tokens<V, S>, store_tokens<V, S>, clear_tokens<V, S>};

// State that forward and backward share: the task, the current chunk and its decay.
template <class V>
struct LinearChunk {
  using T = Number<V>;
  static constexpr int P = kPanel<V>;
  static constexpr int64_t C = kLinearChunk;
  static constexpr T kMinNormal = sizeof(T) == 4 ? static_cast<T>(__FLT_MIN__) : static_cast<T>(__DBL_MIN__);

  const LinearTask& task;
  const TokenAccess<V>& access;
  const LinearSpec& spec;
  const LinearCall& call;
  const int64_t D, Dv, Dp, Vp;  // Dp, Vp: D and Dv rounded up to whole slices
  const int64_t head;           // index of the key head over all samples
  const int64_t group, tokens;
  int64_t begin = 0, n = 0;  // the chunk: tokens [begin, begin + n)

  // Decay factors, all 1 without decay:
  //   token_decay[i]    of token i
  //   pair_decay[i][j]  from token j to token i
  //   state_decay[i]    from the state before the chunk to token i
  //   decay_to_end[j]   from token j to the end of the chunk
  //   chunk_decay       from the state before the chunk to its end
  T *token_decay, *pair_decay, *state_decay, *decay_to_end, *beta, *ones;
  T chunk_decay = 1;

  LinearChunk(const LinearTask& t, const TokenAccess<V>& a, Arena& arena)
      : task(t), access(a), spec(*t.spec), call(*t.call), D(spec.D), Dv(spec.Dv), Dp(round_up(D, P)),
        Vp(round_up(Dv, P)), head(t.batch * spec.Hkv + t.kv_head), group(spec.Hkv ? spec.Hq / spec.Hkv : 0),
        tokens(call.lengths ? call.lengths[t.batch] : spec.L) {
    token_decay = arena.take<T>(C);
    pair_decay = arena.take<T>(C * C);
    state_decay = arena.take<T>(C);
    decay_to_end = arena.take<T>(C);
    beta = arena.take<T>(C);
    ones = arena.take<T>(C < D ? D : C);
  }

  void start() {
    for (int64_t i = 0; i < (C < D ? D : C); ++i) ones[i] = 1;
    for (int64_t i = 0; i < C; ++i) state_decay[i] = decay_to_end[i] = 1;
  }

  static const T* scalars(const void* base, int64_t offset) { return static_cast<const T*>(base) + offset; }
  static T* scalars(void* base, int64_t offset) { return static_cast<T*>(base) + offset; }

  // Returns the element index of token l of head h.
  int64_t index(const Strides& s, int64_t h, int64_t l) const { return task.batch * s.b + h * s.h + l * s.l; }

  void load(const void* base, const Strides& s, int64_t h, int64_t width, int64_t ld, T* rows) const {
    access.load(base, s, index(s, h, begin), n, width, ld, rows);
  }
  void store(const T* slices, T factor, int64_t width, void* base, const Strides& s, int64_t h) const {
    access.store(slices, factor, n, width, base, s, index(s, h, begin));
  }
  // Zeros the rows of the padding tokens.
  void clear(void* base, const Strides& s, int64_t h, int64_t width) const {
    access.clear(base, s, index(s, h, tokens), spec.L - tokens, width);
  }

  void to_slices(const T* rows, int64_t ld, int64_t width, const T* factor, T* slices) const {
    pack_slices<V>(rows, ld, 1, static_cast<int>(n), width, factor, C, slices);
  }

  void to_panels(const T* rows, int64_t ld, int64_t width, T* panels) const {
    for (int64_t j = 0; j < n; j += P)
      pack<V>(rows + j * ld, ld, 1, static_cast<int>(n - j < P ? n - j : P), width, Scaled<V>{1},
              panels + j * width);
  }

  void set_chunk(int64_t token) {
    begin = token;
    n = tokens - begin < C ? tokens - begin : C;
    if (call.log_decay) load_decay(scalars(call.log_decay, head * spec.L + begin));
    if (call.beta)
      for (int64_t i = 0; i < n; ++i) beta[i] = scalars(call.beta, head * spec.L + begin)[i];
  }

  // Computes the decay factors of the chunk. Row i of pair_decay is row i - 1 times the decay of
  // token i. There are no quotients, so nothing overflows and no result depends on later tokens.
  // Denormal factors become 0.
  void load_decay(const T* log_decay) {
    for (int64_t i = 0; i < C; ++i) token_decay[i] = i < n ? log_decay[i] : 0;
    for (int64_t i = 0; i < C; i += V::N)
      Lanes<V>::store(token_decay + i, decay_factor(Lanes<V>::load(token_decay + i)));
    T remaining = 1;
    for (int64_t i = 0; i < n; ++i) {
      state_decay[i] = remaining *= token_decay[i];
      T* row = pair_decay + i * C;
      for (int64_t j = 0; j < C; j += V::N) {
        const V x = i ? Lanes<V>::load(row - C + j) * Lanes<V>::set(token_decay[i]) : Lanes<V>::zero();
        Lanes<V>::store(row + j, keep(not_less(x, Lanes<V>::set(kMinNormal)), x));
      }
      row[i] = 1;
    }
    for (int64_t j = 0; j < n; ++j) decay_to_end[j] = pair_decay[(n - 1) * C + j];
    chunk_decay = remaining;
  }

  static V decay_factor(V x) {
    constexpr T log2e = static_cast<T>(1.44269504088896340736), limit = 2 - Exp2<V>::kLowest;
    const V zero = Lanes<V>::zero(), z = x * Lanes<V>::set(log2e);
    return exp2<V>(zero - max(Lanes<V>::set(-limit), zero - z));
  }

  void scale_rows(T* rows, int64_t ld, const T* factor) const {
    for (int64_t i = 0; i < n; ++i) scale<V>(rows + i * ld, ld, factor[i]);
  }

  // products[i][j] = rows_i . panel_j for j <= i, times decay[i][j] if given. Some elements above
  // the diagonal are written too, because tiles are computed whole. They are not used.
  void score(const T* rows, int64_t ld, int64_t width, const T* panels, const T* decay, T* products) const {
    for (int64_t j = 0; j < n; j += P)
      visit_tiles(n - j, [&](auto count, int64_t t) {
        V sum[count.value][2];
        multiply<V, count.value, true>(rows + (j + t) * ld, ld, panels + j * width, width, sum);
        for (int r = 0; r < count.value; ++r)
          for (int i = 0; i < 2; ++i) {
            const int64_t to = (j + t + r) * C + j + i * V::N;
            const V x = sum[r][i];
            Lanes<V>::store(products + to, decay ? x * Lanes<V>::load(decay + to) : x);
          }
      });
  }

  // Computes 1 / (sum of each row's weights), or 0 if the sum is 0.
  void compute_inverse_sums(const T* queries, const T* z, const T* weights, T* inverse_sums) const {
    for (int64_t i = 0; i < n; ++i) {
      const T total = state_decay[i] * dot<V>(queries + i * Dp, z, D) + dot<V>(weights + i * C, ones, i + 1);
      inverse_sums[i] = total == 0 ? 0 : 1 / total;
    }
  }

  // sum_r += weights[t + r][j] * slice[j] over j <= t + r, or j < t + r if Strict.
  template <int R, bool Strict>
  static REGARD_INLINE void add_lower(const T* weights, const T* slice, int64_t t, V (&sum)[R][2]) {
    multiply_add<V, R, true>(weights + t * C, C, slice, t, sum);
    UNROLLED (j, R) {
      const V b0 = Lanes<V>::load(slice + (t + j) * P), b1 = Lanes<V>::load(slice + (t + j) * P + V::N);
#pragma GCC unroll 6
      for (int r = j + Strict; r < R; ++r) {
        const V x = Lanes<V>::set(weights[(t + r) * C + t + j]);
        sum[r][0] = fma(x, b0, sum[r][0]);
        sum[r][1] = fma(x, b1, sum[r][1]);
      }
    }
  }
};

template <class V, int R>
REGARD_INLINE void scale_tile(const Number<V>* factor, V (&sum)[R][2]) {
  UNROLLED (r, R) {
    const V x = Lanes<V>::set(factor[r]);
    sum[r][0] = sum[r][0] * x;
    sum[r][1] = sum[r][1] * x;
  }
}

template <class V, int R>
REGARD_INLINE void store_tile(const V (&sum)[R][2], Number<V>* target) {
  UNROLLED (r, R) {
    Lanes<V>::store(target + r * kPanel<V>, sum[r][0]);
    Lanes<V>::store(target + r * kPanel<V> + V::N, sum[r][1]);
  }
}

template <class V, int R>
REGARD_INLINE void load_tile(const Number<V>* source, V (&sum)[R][2]) {
  UNROLLED (r, R) {
    sum[r][0] = Lanes<V>::load(source + r * kPanel<V>);
    sum[r][1] = Lanes<V>::load(source + r * kPanel<V> + V::N);
  }
}

// target = factor * before + left^T * right. target and before are slices of `rows` rows, left is
// [n][ld], right slices of kLinearChunk rows.
template <class V>
void add_outer(const Number<V>* left, int64_t ld, int64_t rows, const Number<V>* right, int64_t columns,
               int64_t n, Number<V> factor, const Number<V>* before, Number<V>* target) {
  constexpr int P = kPanel<V>;
  for (int64_t c = 0; c < columns; c += P)
    visit_tiles(rows, [&](auto count, int64_t r) {
      V sum[count.value][2], old[count.value][2];
      const int64_t to = c * rows + r * P;
      multiply<V, count.value, false>(left + r, ld, right + c * kLinearChunk, n, sum);
      load_tile<V, count.value>(before + to, old);
      for (int i = 0; i < count.value; ++i)
        for (int h = 0; h < 2; ++h) sum[i][h] = fma(old[i][h], Lanes<V>::set(factor), sum[i][h]);
      store_tile<V, count.value>(sum, target + to);
    });
}

template <class V, class S, template <class> class Pass>
void run_linear(const LinearTask& task) {
  Arena arena{static_cast<char*>(task.scratch)};
  Pass<V>(task, kTokenAccess<V, S>, arena).run();
}

template <class V, template <class> class Pass>
int64_t linear_bytes(const LinearSpec& spec) {
  const LinearCall call{};
  const LinearGradients grads{};
  const LinearTask task{&spec, &call, &grads, 0, 0, nullptr, nullptr, nullptr};
  constexpr uintptr_t dummy_base = 64;
  Arena arena{reinterpret_cast<char*>(dummy_base)};
  const Pass<V> pass(task, kTokenAccess<V, Number<V>>, arena);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(arena.free) - dummy_base);
}

template <class V, class S, template <class> class Pass>
constexpr LinearKernels linear_kernels() {
  return {linear_bytes<V, Pass>, run_linear<V, S, Pass>};
}

}  // namespace
