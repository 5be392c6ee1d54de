// Linear attention, backward. Chunks of 32 tokens from last to first, in segments of 16 chunks: the
// states before a segment's chunks are recomputed from the state that forward saved. In each chunk:
// gradients through the state, then query heads, then the delta rule. Products run in register
// tiles of 6 tokens x P columns.
#include "kernels/linear.inl.h"

namespace {

template <class V>
struct LinearBackward : LinearChunk<V> {
  using Base = LinearChunk<V>;
  using T = Number<V>;
  using Base::head, Base::group, Base::tokens, Base::begin, Base::n, Base::scalars;
  using Base::P, Base::C, Base::task, Base::spec, Base::call, Base::D, Base::Dv, Base::Dp, Base::Vp;
  using Base::pair_decay, Base::state_decay, Base::decay_to_end, Base::chunk_decay, Base::beta, Base::ones;

  // A chunk's tokens in three layouts: rows [C][width] as the left operand of a product; slices as
  // the right operand if the product sums over tokens; panels (tokens in the lanes) as the right
  // operand if the product sums over columns.
  struct Tokens {
    T *rows, *slices, *panels;
  };

  const LinearGradients& grads;
  T *states, *sums;   // before each chunk of a segment: S^T in slices of Dv rows, and z
  T *dS, *dS_T, *dz;  // slices of D rows, of Dv rows; (Dp)
  // `value` holds the values (delta rule: beta * errors); `out` holds the gradient of the result of
  // the current lookup (see lookup_backward).
  Tokens key, value, query, out;
  T *errors, *dquery, *dkey, *dvalue;  // slices
  T *weights, *dweights, *inverse_sums, *dtotal, *column_sums;
  double* dlog;  // (C + 1): `write` computes dlog_decay as the cumulative sum of these numbers

  LinearBackward(const LinearTask& t, const TokenAccess<V>& a, Arena& arena)
      : Base(t, a, arena), grads(*t.grads) {
    states = arena.take<T>(kLinearSegment * Dp * Dv);
    sums = arena.take<T>(kLinearSegment * Dp);
    dS = arena.take<T>(D * Vp);
    dS_T = arena.take<T>(Dp * Dv);
    dz = arena.take<T>(Dp);
    key = {arena.take<T>(C * Dp), arena.take<T>(C * Dp), arena.take<T>(C * D)};
    query = {arena.take<T>(C * Dp), arena.take<T>(C * Dp), nullptr};
    value = {arena.take<T>(C * Vp), nullptr, arena.take<T>(C * Dv)};
    out = {arena.take<T>(C * Vp), arena.take<T>(C * Vp), nullptr};
    errors = arena.take<T>(C * Vp);
    dquery = arena.take<T>(C * Dp);
    dkey = arena.take<T>(C * Dp);
    dvalue = arena.take<T>(C * Vp);
    weights = arena.take<T>(C * C);
    dweights = arena.take<T>(C * C);
    inverse_sums = arena.take<T>(C);
    dtotal = arena.take<T>(C);
    column_sums = arena.take<T>(C);
    dlog = arena.take<double>(C + 1);
  }

  const T* decay() const { return call.log_decay ? pair_decay : nullptr; }

  // Transposes `columns` columns of a matrix with D rows, `ld` elements apart, to slices of the
  // transposed matrix [Dv][D].
  void transpose(const T* source, int64_t ld, int64_t columns, T* target) const {
    for (int64_t d = 0; d < D; d += P)
      pack<V>(source + d * ld, ld, 1, static_cast<int>(D - d < P ? D - d : P), columns, Scaled<V>{1},
              target + d * Dv);
  }

  void load_chunk() {
    this->load(call.k, spec.k, task.kv_head, D, Dp, key.rows);
    if (!call.beta) return this->load(call.v, spec.v, task.kv_head, Dv, Vp, value.rows);
    copy_rows<V>(scalars(call.errors, (head * spec.L + begin) * Dv), Dv, 1, n, Dv, Vp, value.rows);
    this->to_slices(value.rows, Vp, Dv, ones, errors);
    this->scale_rows(value.rows, Vp, beta);
  }

  // Computes the states before the chunks at tokens `first` to `last`.
  void recompute_states(int64_t first, int64_t last) {
    const int64_t segment = C * kLinearSegment,
                  index = head * ((spec.L + segment - 1) / segment) + first / segment;
    transpose(scalars(call.S_kept, index * D * Dv), Dv, Dv, states);
    for (int64_t i = 0; i < Dp; ++i)
      sums[i] = spec.normalize && i < D ? scalars(call.z_kept, index * D)[i] : 0;
    T *S_now = states, *z_now = sums;
    for (int64_t token = first; token < last; token += C, S_now += Dp * Dv, z_now += Dp) {
      this->set_chunk(token);
      load_chunk();
      this->to_slices(key.rows, Dp, D, decay_to_end, key.slices);
      add_outer<V>(value.rows, Vp, Dv, key.slices, Dp, n, chunk_decay, S_now, S_now + Dp * Dv);
      for (int64_t i = 0; spec.normalize && i < D; ++i) z_now[Dp + i] = chunk_decay * z_now[i];
      for (int64_t i = 0; spec.normalize && i < n; ++i)
        add_scaled<V>(z_now + Dp, key.rows + i * Dp, Dp, decay_to_end[i]);
    }
  }

  // slices_i = factor_i * (rows_i * right + addend)
  void multiply_and_scale(const T* rows, int64_t ld, int64_t depth, const T* right, int64_t columns,
                          const T* addend, T* slices, const T* factor) const {
    for (int64_t c = 0; c < columns; c += P)
      visit_tiles(n, [&](auto count, int64_t t) {
        V sum[count.value][2];
        multiply<V, count.value, true>(rows + t * ld, ld, right + c * depth, depth, sum);
        for (int r = 0; addend && r < count.value; ++r)
          for (int h = 0; h < 2; ++h) sum[r][h] = sum[r][h] + Lanes<V>::load(addend + c + h * V::N);
        scale_tile<V, count.value>(factor + t, sum);
        store_tile<V, count.value>(sum, slices + c * C + t * P);
      });
  }

  // slices_j += sum over i >= j, or i > j if Strict, of w[i][j] * right_i.
  template <bool Strict>
  void add_later_tokens(const T* w, const T* right, int64_t columns, T* slices) const {
    for (int64_t c = 0; c < columns; c += P)
      visit_tiles(n, [&](auto count, int64_t t) {
        constexpr int R = count.value;
        const T* slice = right + c * C;
        V sum[R][2];
        load_tile<V, R>(slices + c * C + t * P, sum);
#pragma GCC unroll 6
        for (int i = Strict; i < R; ++i)
#pragma GCC unroll 6
          for (int r = 0; r <= i - Strict; ++r) {
            const V x = Lanes<V>::set(w[(t + i) * C + t + r]);
            sum[r][0] = fma(x, Lanes<V>::load(slice + (t + i) * P), sum[r][0]);
            sum[r][1] = fma(x, Lanes<V>::load(slice + (t + i) * P + V::N), sum[r][1]);
          }
        multiply_add<V, R, false>(w + (t + R) * C + t, C, slice + (t + R) * P, n - t - R, sum);
        store_tile<V, R>(sum, slices + c * C + t * P);
      });
  }

  template <bool Strict>
  void add_earlier_tokens(const T* w, const T* right, int64_t columns, T* slices) const {
    for (int64_t c = 0; c < columns; c += P)
      visit_tiles(n, [&](auto count, int64_t t) {
        V sum[count.value][2];
        load_tile<V, count.value>(slices + c * C + t * P, sum);
        Base::template add_lower<count.value, Strict>(w, right + c * C, t, sum);
        store_tile<V, count.value>(sum, slices + c * C + t * P);
      });
  }

  // Returns a_i . b_i of two sliced matrices.
  T dot_row(const T* a, const T* b, int64_t i, int64_t columns) const {
    T sum = 0;
    for (int64_t c = 0; c < columns; c += P) sum += dot<V>(a + c * C + i * P, b + c * C + i * P, P);
    return sum;
  }

  // Computes the gradients that reach keys and values through the state after the chunk. Then
  // multiplies dS by the chunk's decay: its share of the gradient of the state before the chunk.
  void begin_chunk(const T* S_now, const T* z_now) {
    for (int64_t c = 0; c < Vp; c += P) transpose(dS + c * D, P, c + P <= Dv ? P : Dv - c, dS_T + c * P);
    multiply_and_scale(value.rows, Vp, Dv, dS_T, Dp, spec.normalize ? dz : nullptr, dkey, decay_to_end);
    multiply_and_scale(key.rows, Dp, D, dS, Vp, nullptr, dvalue, decay_to_end);
    if (!call.log_decay) return;
    for (int64_t i = 0; i <= C; ++i) dlog[i] = 0;
    dlog[0] += chunk_decay * dot<V>(dS_T, S_now, Dp * Dv);
    if (spec.normalize) dlog[0] += chunk_decay * dot<V>(dz, z_now, D);
    for (int64_t j = 0; j < n; ++j) dlog[j + 1] += dot_row(key.slices, dkey, j, Dp);
    scale<V>(dS, D * Vp, chunk_decay);
    scale<V>(dz, Dp, chunk_decay);
  }

  // Adds the gradient of the normalisation. dtotal[i] is the gradient of the sum of row i's
  // weights, so it is added to the gradient of every weight of the row, and through z to dquery.
  void divisor_backward(const T* z_now) {
    for (int64_t i = 0; i < n; ++i) {
      T* row = dweights + i * C;
      const T weighted_gradient = dot<V>(weights + i * C, row, i + 1) + dot_row(query.slices, dquery, i, Dp);
      dtotal[i] = -weighted_gradient * inverse_sums[i];
      for (int64_t j = 0; j <= i; ++j) row[j] += dtotal[i];
      for (int64_t c = 0; c < Dp; c += P)
        add_scaled<V>(dquery + c * C + i * P, z_now + c, P, state_decay[i] * dtotal[i]);
    }
  }

  // Adds the gradients of log_decay. The decay from token j to token i is the product of the decays
  // of tokens j + 1 to i, so the gradients of all these tokens get the term w[i][j] * dw[i][j].
  // `dlog` holds differences: entry j + 1 adds the term, entry i + 1 subtracts it. The decay from
  // the state to token i includes tokens 0 to i.
  void add_decay_gradient(const Tokens& x) {
    for (int64_t i = 0; i < C; ++i) column_sums[i] = 0;
    for (int64_t i = 0; i < n; ++i) {
      const T *w = weights + i * C, *dw = dweights + i * C;
      const T from_state = dot_row(x.slices, dquery, i, Dp);
      dlog[0] += from_state;
      dlog[i + 1] -= from_state + dot<V>(w, dw, i);
      int64_t j = 0;
      for (; j + V::N <= i; j += V::N)
        Lanes<V>::store(column_sums + j,
                        fma(Lanes<V>::load(w + j), Lanes<V>::load(dw + j), Lanes<V>::load(column_sums + j)));
      for (; j < i; ++j) column_sums[j] += w[j] * dw[j];
    }
    for (int64_t j = 0; j < n; ++j) dlog[j + 1] += column_sums[j];
  }

  // Backward of a lookup: each token uses x as a query to the state and to the chunk's tokens up to
  // itself, or before itself if Strict. `out` holds the gradient of the result, `weights` holds
  // x . k times the decay. Computes the gradient of x in dquery, and adds to dkey and dS.
  template <bool Strict>
  void lookup_backward(const Tokens& x, const T* S_now, const T* z_now) {
    const bool normalized = spec.normalize && !Strict;
    multiply_and_scale(out.rows, Vp, Dv, S_now, Dp, nullptr, dquery, state_decay);
    this->score(out.rows, Vp, Dv, value.panels, nullptr, dweights);
    if (normalized) divisor_backward(z_now);
    if (call.log_decay) {
      add_decay_gradient(x);
      for (int64_t i = 0; i < n * C; i += V::N)
        Lanes<V>::store(dweights + i, Lanes<V>::load(dweights + i) * Lanes<V>::load(pair_decay + i));
    }
    add_earlier_tokens<Strict>(dweights, key.slices, Dp, dquery);
    add_later_tokens<Strict>(dweights, x.slices, Dp, dkey);
    if (call.log_decay) this->scale_rows(x.rows, Dp, state_decay);
    add_outer<V>(x.rows, Dp, D, out.slices, Vp, n, 1, dS, dS);
    for (int64_t i = 0; normalized && i < n; ++i) add_scaled<V>(dz, x.rows + i * Dp, Dp, dtotal[i]);
  }

  void query_head(int64_t h, const T* S_now, const T* z_now) {
    this->load(call.q, spec.q, h, D, Dp, query.rows);
    scale<V>(query.rows, n * Dp, static_cast<T>(spec.scale));
    this->to_slices(query.rows, Dp, D, ones, query.slices);
    this->score(query.rows, Dp, D, key.panels, decay(), weights);
    this->load(grads.dout, grads.dout_stride, h, Dv, Vp, out.rows);
    if (spec.normalize) {
      this->compute_inverse_sums(query.rows, z_now, weights, inverse_sums);
      this->scale_rows(out.rows, Vp, inverse_sums);
    }
    this->to_slices(out.rows, Vp, Dv, ones, out.slices);
    lookup_backward<false>(query, S_now, z_now);
    add_later_tokens<false>(weights, out.slices, Vp, dvalue);
    this->store(dquery, static_cast<T>(spec.scale), D, grads.dq, grads.dq_stride, h);
  }

  // Backward of the delta rule. Each error depends on the errors of earlier tokens in the chunk, so
  // the gradients of the errors are computed from the last token to the first. An error is v minus
  // a lookup with k as the query, so backward of this lookup follows.
  void delta_rule_backward(const T* S_now, const T* z_now) {
    this->score(key.rows, Dp, D, key.panels, decay(), weights);
    for (int64_t c = 0; c < Vp; c += P)
      visit_tiles(n, [&](auto count, int64_t before) {
        constexpr int R = count.value;
        const int64_t t = n - before - R;
        T *dvalue_tile = dvalue + c * C + t * P, *dlookup_tile = out.slices + c * C + t * P;
        V sum[R][2];
        multiply<V, R, false>(weights + (t + R) * C + t, C, dlookup_tile + R * P, n - t - R, sum);
        for (int r = R - 1; r >= 0; --r)
          for (int h = 0; h < 2; ++h) {
            const V d = Lanes<V>::load(dvalue_tile + r * P + h * V::N) + sum[r][h];
            const V x = d * Lanes<V>::set(-beta[t + r]);
            Lanes<V>::store(dvalue_tile + r * P + h * V::N, d);
            Lanes<V>::store(dlookup_tile + r * P + h * V::N, x);
            for (int i = 0; i < r; ++i)
              sum[i][h] = fma(Lanes<V>::set(weights[(t + r) * C + t + i]), x, sum[i][h]);
          }
      });
    for (int64_t i = 0; i < n; ++i)
      scalars(grads.dbeta, head * spec.L + begin)[i] = dot_row(dvalue, errors, i, Vp);
    unpack_slices<V>(out.slices, C, n, Dv, T(1), out.rows, Vp, 1);
    lookup_backward<true>(key, S_now, z_now);
    for (int64_t c = 0; c < Dp; c += P) add_scaled<V>(dkey + c * C, dquery + c * C, n * P, 1);
  }

  void write() const {
    this->store(dkey, 1, D, grads.dk, grads.dk_stride, task.kv_head);
    this->store(call.beta ? out.slices : dvalue, call.beta ? -1 : 1, Dv, grads.dv, grads.dv_stride,
                task.kv_head);
    double sum = 0;
    for (int64_t i = 0; call.log_decay && i < n; ++i)
      scalars(grads.dlog_decay, head * spec.L + begin)[i] = static_cast<T>(sum += dlog[i]);
  }

  void chunk(int64_t token, const T* S_now, const T* z_now) {
    this->set_chunk(token);
    load_chunk();
    this->to_slices(key.rows, Dp, D, ones, key.slices);
    this->to_panels(key.rows, Dp, D, key.panels);
    this->to_panels(value.rows, Vp, Dv, value.panels);
    begin_chunk(S_now, z_now);
    for (int64_t g = 0; g < group; ++g) query_head(task.kv_head * group + g, S_now, z_now);
    if (call.beta) delta_rule_backward(S_now, z_now);
    write();
  }

  void start() {
    Base::start();
    for (int64_t i = 0; D != Dp && i < kLinearSegment * Dp * Dv; ++i) states[i] = 0;
    for (int64_t i = 0; D != Dp && i < Dp * Dv; ++i) dS_T[i] = 0;
    for (int64_t i = 0; i < kLinearSegment * Dp; ++i) sums[i] = 0;
    for (int64_t i = 0; i < C * Dp; ++i) key.rows[i] = query.rows[i] = 0;
    if (grads.dS_end)
      pack_slices<V>(scalars(grads.dS_end, head * D * Dv), Dv, 1, static_cast<int>(D), Dv, ones, D, dS);
    else
      for (int64_t i = 0; i < D * Vp; ++i) dS[i] = 0;
    for (int64_t i = 0; i < Dp; ++i) dz[i] = grads.dz_end && i < D ? scalars(grads.dz_end, head * D)[i] : 0;
  }

  void clear_padding() const {
    for (int64_t g = 0; g < group; ++g) this->clear(grads.dq, grads.dq_stride, task.kv_head * group + g, D);
    this->clear(grads.dk, grads.dk_stride, task.kv_head, D);
    this->clear(grads.dv, grads.dv_stride, task.kv_head, Dv);
    for (int64_t l = tokens; l < spec.L; ++l) {
      if (call.log_decay) scalars(grads.dlog_decay, head * spec.L)[l] = 0;
      if (call.beta) scalars(grads.dbeta, head * spec.L)[l] = 0;
    }
  }

  void run() {
    start();
    const int64_t segment = C * kLinearSegment;
    for (int64_t first = (tokens - 1) / segment * segment; tokens && first >= 0; first -= segment) {
      const int64_t end = first + segment < tokens ? first + segment : tokens;
      const int64_t last = first + (end - 1 - first) / C * C;
      recompute_states(first, last);
      for (int64_t token = last; token >= first; token -= C) {
        if (task.stop(task.stop_context)) return;
        const int64_t index = (token - first) / C;
        chunk(token, states + index * Dp * Dv, sums + index * Dp);
      }
    }
    unpack_slices<V>(dS, D, D, Dv, T(1), scalars(grads.dS, head * D * Dv), Dv, 1);
    for (int64_t i = 0; grads.dz && i < D; ++i) scalars(grads.dz, head * D)[i] = dz[i];
    clear_padding();
  }
};

}  // namespace

const LinearKernels REGARD_TABLE(linear_gradients)[4] = REGARD_EACH_DTYPE(linear_kernels, LinearBackward);
