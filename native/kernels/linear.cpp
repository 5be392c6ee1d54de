// Linear attention, forward. Chunks of 32 tokens in sequence; in each chunk first all query heads,
// then the state. Products run in register tiles of 6 tokens x P columns:
//   out = (state_decay * q S + tril(q k^T * pair_decay) v) * inverse_sums
//   S = chunk_decay * S + (decay_to_end * k)^T v
#include "kernels/linear.inl.h"

namespace {

template <class V>
struct LinearForward : LinearChunk<V> {
  using Base = LinearChunk<V>;
  using T = Number<V>;
  using Base::head, Base::group, Base::tokens, Base::begin, Base::n, Base::scalars;
  using Base::P, Base::C, Base::task, Base::spec, Base::call, Base::D, Base::Dv, Base::Dp, Base::Vp;
  using Base::pair_decay, Base::state_decay, Base::decay_to_end, Base::chunk_decay, Base::beta, Base::ones;

  T *state, *sum;                  // S in slices of D rows; z (Dp)
  T *keys, *key_panels, *queries;  // [C][Dp], [C / P][D][P], [C][Dp]
  T *rows, *values, *result;       // values [C][Vp]; slices of values (delta rule: beta * errors); outputs
  T *weights, *inverse_sums;       // [C][C]; (C)

  LinearForward(const LinearTask& t, const TokenAccess<V>& a, Arena& arena) : Base(t, a, arena) {
    state = arena.take<T>(D * Vp);
    sum = arena.take<T>(Dp);
    keys = arena.take<T>(C * Dp);
    key_panels = arena.take<T>(C * D);
    queries = arena.take<T>(C * Dp);
    rows = arena.take<T>(C * Vp);
    values = arena.take<T>(C * Vp);
    result = arena.take<T>(C * Vp);
    weights = arena.take<T>(C * C);
    inverse_sums = arena.take<T>(C);
  }

  void load_state() {
    for (int64_t i = 0; D != Dp && i < C * Dp; ++i) keys[i] = queries[i] = 0;
    if (call.S)
      pack_slices<V>(scalars(call.S, head * D * Dv), Dv, 1, static_cast<int>(D), Dv, ones, D, state);
    else
      for (int64_t i = 0; i < D * Vp; ++i) state[i] = 0;
    for (int64_t i = 0; i < Dp; ++i) sum[i] = call.z && i < D ? scalars(call.z, head * D)[i] : 0;
  }

  void write_state(void* S_to, void* z_to, int64_t index) const {
    unpack_slices<V>(state, D, D, Dv, T(1), scalars(S_to, index * D * Dv), Dv, 1);
    for (int64_t i = 0; z_to && i < D; ++i) scalars(z_to, index * D)[i] = sum[i];
  }

  void load_chunk() {
    this->load(call.k, spec.k, task.kv_head, D, Dp, keys);
    this->to_panels(keys, Dp, D, key_panels);
    this->load(call.v, spec.v, task.kv_head, Dv, Vp, rows);
    this->to_slices(rows, Vp, Dv, ones, values);
  }

  // The delta rule: replaces each value by beta times its error. The error is the value minus what
  // the token's key, used as a query, reads from the state and from the earlier tokens of the
  // chunk.
  void replace_values() {
    this->score(keys, Dp, D, key_panels, call.log_decay ? pair_decay : nullptr, weights);
    for (int64_t c = 0; c < Vp; c += P)
      visit_tiles(n, [&](auto count, int64_t t) {
        T* value_tile = values + c * C + t * P;
        V retrieved[count.value][2];
        multiply<V, count.value, true>(keys + t * Dp, Dp, state + c * D, D, retrieved);
        scale_tile<V, count.value>(state_decay + t, retrieved);
        multiply_add<V, count.value, true>(weights + t * C, C, values + c * C, t, retrieved);
        for (int r = 0; r < count.value; ++r)
          for (int h = 0; h < 2; ++h) {
            const V error = Lanes<V>::load(value_tile + r * P + h * V::N) - retrieved[r][h];
            const V value = error * Lanes<V>::set(beta[t + r]);
            Lanes<V>::store(result + c * C + (t + r) * P + h * V::N, error);
            Lanes<V>::store(value_tile + r * P + h * V::N, value);
            for (int i = r + 1; i < count.value; ++i)
              retrieved[i][h] = fma(Lanes<V>::set(weights[(t + i) * C + t + r]), value, retrieved[i][h]);
          }
      });
    if (call.errors)
      unpack_slices<V>(result, C, n, Dv, T(1), scalars(call.errors, (head * spec.L + begin) * Dv), Dv, 1);
  }

  void attend(int64_t h) {
    this->load(call.q, spec.q, h, D, Dp, queries);
    scale<V>(queries, n * Dp, static_cast<T>(spec.scale));
    this->score(queries, Dp, D, key_panels, call.log_decay ? pair_decay : nullptr, weights);
    if (spec.normalize) this->compute_inverse_sums(queries, sum, weights, inverse_sums);
    for (int64_t c = 0; c < Vp; c += P)
      visit_tiles(n, [&](auto count, int64_t t) {
        V output[count.value][2];
        multiply<V, count.value, true>(queries + t * Dp, Dp, state + c * D, D, output);
        if (call.log_decay) scale_tile<V, count.value>(state_decay + t, output);
        Base::template add_lower<count.value, false>(weights, values + c * C, t, output);
        if (spec.normalize) scale_tile<V, count.value>(inverse_sums + t, output);
        store_tile<V, count.value>(output, result + c * C + t * P);
      });
    this->store(result, 1, Dv, call.out, spec.out, h);
  }

  void update_state() {
    if (call.log_decay) this->scale_rows(keys, Dp, decay_to_end);
    add_outer<V>(keys, Dp, D, values, Vp, n, chunk_decay, state, state);
    if (!spec.normalize) return;
    scale<V>(sum, Dp, chunk_decay);
    for (int64_t i = 0; i < n; ++i) add_scaled<V>(sum, keys + i * Dp, Dp, 1);
  }

  // sums = x^T S for `Count` vectors of columns.
  template <int Count>
  void multiply_state_columns(const T* x, const T* S, T* sums) const {
    V total[Count];
    for (int i = 0; i < Count; ++i) total[i] = Lanes<V>::zero();
    for (int64_t d = 0; d < D; ++d)
      UNROLLED (i, Count)
        total[i] = fma(Lanes<V>::set(x[d]), Lanes<V>::load(S + d * Dv + i * V::N), total[i]);
    for (int i = 0; i < Count; ++i) Lanes<V>::store(sums + i * V::N, total[i]);
  }

  void multiply_state(const T* x, const T* S, T* sums) const {
    int64_t c = 0;
    for (; c + 4 * V::N <= Dv; c += 4 * V::N) multiply_state_columns<4>(x, S + c, sums + c);
    for (; c + V::N <= Dv; c += V::N) multiply_state_columns<1>(x, S + c, sums + c);
    for (; c < Dv; ++c) {
      sums[c] = 0;
      for (int64_t d = 0; d < D; ++d) sums[c] += x[d] * S[d * Dv + c];
    }
  }

  // S_end = chunk_decay * S + k u^T, in the caller's memory.
  void update_state_by_one(const T* S, T* S_end, const T* u) const {
    for (int64_t d = 0; d < D; ++d, S += Dv, S_end += Dv) {
      const V k = Lanes<V>::set(keys[d]), decay = Lanes<V>::set(chunk_decay);
      int64_t c = 0;
      for (; c + V::N <= Dv; c += V::N)
        Lanes<V>::store(S_end + c, fma(k, Lanes<V>::load(u + c), Lanes<V>::load(S + c) * decay));
      for (; c < Dv; ++c) S_end[c] = S[c] * chunk_decay + keys[d] * u[c];
    }
  }

  // Computes a call with one token. Reads and writes the state in the caller's memory, not a copy.
  void decode_step() {
    this->set_chunk(0);
    this->load(call.k, spec.k, task.kv_head, D, Dp, keys);
    this->load(call.v, spec.v, task.kv_head, Dv, Vp, rows);
    const T* S = scalars(call.S, head * D * Dv);
    T* S_end = scalars(call.S_end, head * D * Dv);
    if (call.beta) {
      multiply_state(keys, S, result);
      for (int64_t c = 0; c < Dv; ++c) rows[c] = beta[0] * (rows[c] - chunk_decay * result[c]);
    }
    update_state_by_one(S, S_end, rows);
    for (int64_t i = 0; spec.normalize && i < D; ++i)
      scalars(call.z_end, head * D)[i] = sum[i] = chunk_decay * scalars(call.z, head * D)[i] + keys[i];
    for (int64_t g = 0; g < group; ++g) attend_once(task.kv_head * group + g, S_end);
  }

  void attend_once(int64_t h, const T* S_end) {
    this->load(call.q, spec.q, h, D, Dp, queries);
    const T factor = static_cast<T>(spec.scale),
            total = spec.normalize ? dot<V>(queries, sum, D) * factor : 1;
    inverse_sums[0] = total == 0 ? 0 : factor / total;
    multiply_state(queries, S_end, rows);
    this->to_slices(rows, Vp, Dv, inverse_sums, result);
    this->store(result, 1, Dv, call.out, spec.out, h);
  }

  void run() {
    this->start();
    if (spec.L == 1 && tokens == 1 && call.S && !call.S_kept) return decode_step();
    load_state();
    const int64_t segment = C * kLinearSegment, segments = (spec.L + segment - 1) / segment;
    for (int64_t token = 0; token < tokens; token += C) {
      if (task.stop(task.stop_context)) return;
      if (call.S_kept && token % segment == 0)
        write_state(call.S_kept, call.z_kept, head * segments + token / segment);
      this->set_chunk(token);
      load_chunk();
      if (call.beta) replace_values();
      for (int64_t g = 0; g < group; ++g) attend(task.kv_head * group + g);
      update_state();
    }
    write_state(call.S_end, call.z_end, head);
    for (int64_t g = 0; g < group; ++g) this->clear(call.out, spec.out, task.kv_head * group + g, Dv);
  }
};

}  // namespace

const LinearKernels REGARD_TABLE(linear)[4] = REGARD_EACH_DTYPE(linear_kernels, LinearForward);
