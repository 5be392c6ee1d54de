// Forward attention with an online softmax, for the panels of one task. Loop order: key blocks of
// 192 keys outside, panels inside, so that each block is read and converted once for all panels. In
// a block, each panel computes scores [key][P] in register tiles of 6 keys x P rows, to which softcap,
// bias and mask are applied before they leave the registers. Then it updates its softmax, turns the
// scores into weights and adds V^T weights to out[Dv][P]. With pairs, the weights are rounded to words
// of two keys, and V is copied to such words; a lane's output is divided by the sum of the rounded
// weights.
#pragma once
#include "kernels/arena.inl.h"
#include "kernels/exact.inl.h"
#include "kernels/gemm.inl.h"

namespace {

constexpr int64_t kKeyBlock = 192;  // the scores of a panel stay in L1

template <class V, class S>
struct Forward {
  using Scalar = Number<V>;
  using O = Operand<V, S>;
  using Element = Number<O>;
  static constexpr int P = kPanel<V>;
  static constexpr bool kPairs = O::kTerms == 2;

  // A panel's running state: queries[D][P] (scaled, or as words), out[Dv][P], each lane's softmax
  // shift and sum, the sum of its weights as they are multiplied with values, its dropout words, the
  // next span, and the initial shift and sum (those of the sink, if any).
  struct State {
    Element* queries;
    Scalar *out, *shift, *total, *rounded_total;
    uint32_t *low, *high;
    int64_t span = 0;
    Scalar first_shift = 0, first_total = 0;
    uint32_t exact = 0;  // lanes that must be computed again key by key
  };

  // Keys [begin, end) of one key block that some row of the panel may attend to, and their rows of
  // K and V, `ldk` and `ldv` elements apart.
  struct SpanView {
    const Span* spans;
    bool partial;
    int64_t begin, end;
    const Element* keys;
    int64_t ldk;
    const Element* values;
    int64_t ldv;
  };

  const Task& task;
  const Spec& spec;
  const Call& call;
  Arena arena;
  State* states;
  Scalar *scores, *biases, *factor;
  Element *keys, *values, *weights;
  uint32_t* lanes;  // of each key of a view
  double* row_sum;
  Strides k, v;   // strides of K and V in the task's numbering of keys
  int64_t depth;  // elements of a query or key
  // Pairs: whether non-finite values count as zero, and which keys of the block have such values.
  bool skip_non_finite = false;
  bool non_finite_keys[kKeyBlock];

  explicit Forward(const Task& t)
      : task(t), spec(*t.spec), call(*t.call), arena{static_cast<char*>(t.scratch)} {
    k = spec.k, v = spec.v;
    k.l *= task.key_step, v.l *= task.key_step;
    depth = elements(spec.D);
    states = arena.take<State>(task.n_panels);
    for (int i = 0; i < task.n_panels; ++i) {
      State& s = states[i];
      s = {arena.take<Element>(depth * P), arena.take<Scalar>(spec.Dv * P),    arena.take<Scalar>(P),
           arena.take<Scalar>(P),          arena.take<Scalar>(kPairs ? P : 0), arena.take<uint32_t>(P),
           arena.take<uint32_t>(P)};
      if (!kPairs) s.rounded_total = s.total;
    }
    scores = arena.take<Scalar>(kKeyBlock * P);
    weights = arena.take<Element>(kPairs ? elements(kKeyBlock) * P : 0);
    biases = arena.take<Scalar>(has_bias_block(spec) ? kKeyBlock * P : 0);
    lanes = arena.take<uint32_t>(kKeyBlock);
    factor = arena.take<Scalar>(P);
    row_sum = arena.take<double>(spec.Dv);
    keys = arena.take<Element>(task.copy_k ? kKeyBlock * depth : 0);
    values = arena.take<Element>(task.copy_v ? elements(kKeyBlock) * spec.Dv : 0);
  }

  // Returns how many elements hold n numbers.
  static int64_t elements(int64_t n) { return (n + O::kTerms - 1) / O::kTerms; }

  static int64_t scratch_bytes(const Spec& s, int panels, bool copy_k, bool copy_v) {
    const int64_t line = 64, word = sizeof(Scalar);
    const int64_t panel =
        round_up(s.D * P * word, line) + round_up(s.Dv * P * word, line) + 5 * round_up(P * 8, line);
    const int64_t block = kKeyBlock * (3 * P + 1 + (copy_k ? s.D : 0) + (copy_v ? s.Dv : 0)) * word;
    return panels * (panel + round_up(sizeof(State), line)) + block + s.Dv * 8 + 16 * line;
  }

  int64_t offset() const { return call.offsets ? call.offsets[task.batch] : call.offset; }
  uint32_t all_lanes(const Panel& p) const { return p.rows == 32 ? ~0u : (1u << p.rows) - 1; }

  void start(const Panel& p, State& s) {
    const S* q = static_cast<const S*>(call.q) + task.batch * spec.q.b + p.head * spec.q.h + p.row * spec.q.l;
    const int64_t step = spec.q.l * task.row_step;
    for (int64_t i = 0; i < depth * P && p.rows < P; ++i) s.queries[i] = 0;
    pack_operand<O>(q, step, spec.q.d, p.rows, spec.D, static_cast<Scalar>(score_factor(spec)), s.queries);
    for (int64_t i = 0; i < spec.Dv * P; ++i) s.out[i] = 0;
    start_softmax(p, s);
    if (spec.drop_below)
      dropout_streams<V>(spec, call, task.batch, p.head, p.row, task.row_step, s.low, s.high);
  }

  // Starts the softmax of all lanes with the sink, or empty if there is none.
  void start_softmax(const Panel& p, State& s) {
    V shift, total;
    ::start_softmax<V>(call, p.head, shift, total);
    for (int r = 0; r < P; r += V::N) {
      Lanes<V>::store(s.shift + r, shift);
      Lanes<V>::store(s.total + r, total);
      Lanes<V>::store(s.rounded_total + r, total);
    }
    s.first_shift = s.shift[0];
    s.first_total = s.total[0];
  }

  ScoreOptions<V> load_options(const Panel& p, const SpanView& view) {
    const TileCoords at{
        task.batch,    p.head, p.row, task.row_step, offset() + p.row, task.key + view.begin * task.key_step,
        task.key_step, p.rows};
    return ::load_options<V, S>(spec, call, at, view.spans, view.partial, view.begin, view.end, biases,
                                lanes);
  }

  // Raises the lanes' shift to the tile's maximum and rescales sums and outputs by powers of two.
  void update_shift(State& s, const V (&lane_max)[2], V (&shift)[2]) {
    V old[2], rescale[2];
    uint32_t grown = 0;
    for (int i = 0; i < 2; ++i) {
      old[i] = Lanes<V>::load(s.shift + i * V::N);
      shift[i] = max(ceil(lane_max[i]), old[i]);
      grown |= bits(less(old[i], shift[i]));
      Lanes<V>::store(s.shift + i * V::N, shift[i]);
      shift[i] = finite_shift(shift[i]);
    }
    if (!grown) return;
    for (int i = 0; i < 2; ++i) {
      rescale[i] = exp2(old[i] - shift[i]);
      scale_vector(s.total + i * V::N, rescale[i]);
      if (kPairs) scale_vector(s.rounded_total + i * V::N, rescale[i]);
      Lanes<V>::store(factor + i * V::N, rescale[i]);
    }
    for (int64_t d = 0; d < spec.Dv; ++d)
      for (int i = 0; i < 2; ++i) scale_vector(s.out + d * P + i * V::N, rescale[i]);
  }

  static void scale_vector(Scalar* x, V factor) { Lanes<V>::store(x, Lanes<V>::load(x) * factor); }

  // Computes the scores of the view's keys and each lane's maximum.
  void score(const Panel& p, const State& s, const SpanView& view, V (&lane_max)[2]) {
    score_keys<O>(load_options(p, view), view.keys, view.ldk, view.end - view.begin, s.queries, depth, scores,
                  lane_max);
  }

  void attend(const Panel& p, State& s, const SpanView& view) {
    const int64_t n = view.end - view.begin;
    V lane_max[2], shift[2];
    score(p, s, view, lane_max);
    if (skip_non_finite) s.exact |= lanes_with_non_finite_values(view);
    update_shift(s, lane_max, shift);
    if constexpr (kPairs) {
      weigh_pairs(s, view, shift);
      const int64_t words = elements((view.begin & 1) + n);
      add_values<O>(view.values, view.ldv, view.begin / 2, words, weights, spec.Dv, s.out);
    } else {
      exponentiate<V>(scores, view.begin, n, shift, s.total);
      if (spec.drop_below) drop_block(s, view.begin, n);
      add_values<V>(view.values, view.ldv, view.begin, n, scores, spec.Dv, s.out);
    }
  }

  // Returns the lanes that attend to a key with non-finite values.
  uint32_t lanes_with_non_finite_values(const SpanView& view) const {
    uint32_t lanes = 0;
    for (int64_t c = 0; c < view.end - view.begin; ++c)
      for (int t = 0; t < P && non_finite_keys[(view.begin + c) % kKeyBlock]; ++t)
        lanes |= static_cast<uint32_t>(scores[c * P + t] != -static_cast<Scalar>(__builtin_inf())) << t;
    return lanes;
  }

  // Turns scores into words of weights. With dropout, the totals include the dropped weights.
  void weigh_pairs(State& s, const SpanView& view, const V (&shift)[2]) {
    const int64_t n = view.end - view.begin;
    const bool odd = view.begin & 1;
    if (!spec.drop_below)
      return with_power<V>(shift, [&](const auto& power) {
        exponentiate_pairs_with(scores, odd, n, power, weights, s.total, s.rounded_total);
      });
    Scalar unused[P] = {};
    const SameWeight<V> same[2] = {};
    exponentiate<V>(scores, view.begin, n, shift, s.total);
    exponentiate_pairs_with(scores, odd, n, same, weights, unused, s.rounded_total);
    drop_block(s, view.begin, n);
    exponentiate_pairs_with(scores, odd, n, same, weights, unused, unused);
  }

  void drop_block(const State& s, int64_t begin, int64_t n) {
    const int64_t key = call.origin.key + task.key + begin * task.key_step;
    drop<V, Zeroed>(s.low, s.high, key, task.key_step, spec.drop_below, n, scores);
  }

  // Calls visit(SpanView) for the panel's spans in the key block [begin, end).
  template <class Visit>
  void visit_panel(const Panel& p, State& s, int64_t begin, int64_t end, const Element* kb, int64_t ldk,
                   const Element* vb, int64_t ldv, Visit visit) {
    visit_spans(p, s.span, begin, end, all_lanes(p),
                [&](const Span* first, int64_t from, int64_t to, bool partial) {
                  visit(SpanView{first, partial, from, to, kb + (from - begin) * ldk, ldk,
                                 vb + (from - begin) / O::kTerms * ldv, ldv});
                });
  }

  bool any_panel_attends(int first, int last, int64_t begin, int64_t end) const {
    for (int i = first; i < last; ++i) {
      const Panel& p = task.panels[i];
      for (int64_t r = states[i].span; r < p.n_spans && p.spans[r].begin < end; ++r)
        if (p.spans[r].end > begin) return true;
    }
    return false;
  }

  const S* key_row(const void* base, const Strides& stride, int64_t key) const {
    const int64_t unit = stride.l / task.key_step;
    return static_cast<const S*>(base) + task.batch * stride.b + task.kv_head * stride.h + task.key * unit +
           key * stride.l;
  }

  // Return rows [begin, end) of K or V as operands: in place or copied. Pairs of values are always
  // copied, to words of two keys.
  const Element* key_block(int64_t begin, int64_t end, int64_t& ld) {
    const S* source = key_row(call.k, k, begin);
    ld = task.copy_k ? depth : k.l / O::kTerms;
    if (!task.copy_k) return reinterpret_cast<const Element*>(source);
    copy_operand<O>(source, k.l, k.d, end - begin, spec.D, ld, keys);
    return keys;
  }
  const Element* value_block(int64_t begin, int64_t end, int64_t& ld) {
    const S* source = spec.Dv ? key_row(call.v, v, begin) : nullptr;
    ld = task.copy_v ? spec.Dv : v.l;
    if (!task.copy_v) return reinterpret_cast<const Element*>(source);
    copy_transposed_operand<O>(source, v.l, v.d, end - begin, spec.Dv, ld, values);
    if constexpr (kPairs)
      if (skip_non_finite) clear_non_finite(values, end - begin, spec.Dv, non_finite_keys);
    return values;
  }

  // Calls visit(panel index, SpanView) for panels [first, last), key block by key block, and
  // end_block(first key) after each block.
  template <class Visit, class Close>
  void visit_blocks(int first, int last, Visit visit, Close end_block) {
    int64_t first_key = INT64_MAX, last_key = 0;
    for (int i = first; i < last; ++i)
      if (const Panel& p = task.panels[i]; p.n_spans) {
        first_key = p.spans[0].begin < first_key ? p.spans[0].begin : first_key;
        last_key = p.spans[p.n_spans - 1].end > last_key ? p.spans[p.n_spans - 1].end : last_key;
      }
    // Blocks begin at multiples of their size, so that a panel's result does not depend on its
    // task.
    for (int64_t begin = first_key / kKeyBlock * kKeyBlock; begin < last_key; begin += kKeyBlock) {
      const int64_t end = begin + kKeyBlock < last_key ? begin + kKeyBlock : last_key;
      if (!any_panel_attends(first, last, begin, end)) continue;
      if (task.stop(task.stop_context)) return;
      int64_t ldk, ldv;
      const Element* kb = key_block(begin, end, ldk);
      const Element* vb = value_block(begin, end, ldv);
      for (int i = first; i < last; ++i)
        visit_panel(task.panels[i], states[i], begin, end, kb, ldk, vb, ldv,
                    [&](const SpanView& view) { visit(i, view); });
      end_block(begin);
    }
  }

  // Returns the lanes whose sum or output is non-finite (x - x != 0).
  uint32_t non_finite_lanes(const State& s) const {
    V zero[2][2];
    for (int i = 0; i < 2; ++i) {
      const V total = Lanes<V>::load(s.total + i * V::N);
      zero[0][i] = zero[1][i] = total - total;
    }
    for (int64_t d = 0; d < spec.Dv; ++d)
      for (int i = 0; i < 2; ++i) {
        const V o = Lanes<V>::load(s.out + d * P + i * V::N);
        zero[d & 1][i] = zero[d & 1][i] + (o - o);
      }
    for (int i = 0; i < 2; ++i) zero[0][i] = zero[0][i] + zero[1][i];
    return bits(differs(zero[0][0], zero[0][0])) | bits(differs(zero[0][1], zero[0][1])) << V::N;
  }

  bool only_sink(const State& s, int t) const {
    return call.sink && s.shift[t] == s.first_shift && s.total[t] == s.first_total;
  }

  void finish(const Panel& p, const State& s) {
    S* out = static_cast<S*>(call.out) + task.batch * spec.out.b + p.head * spec.out.h + p.row * spec.out.l;
    Scalar* lse = call.lse
                      ? static_cast<Scalar*>(call.lse) + (task.batch * spec.Hq + p.head) * spec.Lq + p.row
                      : nullptr;
    for (int t = 0; t < p.rows; ++t)
      factor[t] = s.total[t] == 0 ? 0 : static_cast<Scalar>(spec.keep_scale) / s.rounded_total[t];
    unpack<V>(s.out, spec.Dv, factor, p.rows, out, spec.out.l * task.row_step, spec.out.d, StoreAsIs<V>());
    if (call.residual) write_residual(p, s, out);
    for (int t = 0; lse && t < p.rows; ++t)
      lse[t * task.row_step] =
          lse_of(ExactRow<V, S>{task, p, t, row_sum, 0, 0}, s.shift[t], s.total[t], only_sink(s, t));
    for (int t = 0; call.stats && t < p.rows; ++t)
      write_stats(p, t, s.shift[t], only_sink(s, t) && !attends_to_any(p, t) ? 0 : s.total[t]);
    uint32_t retry = (non_finite_lanes(s) | s.exact) & all_lanes(p);
    for (int t = 0; retry; ++t, retry >>= 1)
      if (ExactRow<V, S> row{task, p, t, row_sum, 0, 0}; (retry & 1) && !row.query_is_nan()) {
        row.run();
        row.write(out, t * spec.out.l * task.row_step, lse ? lse + t * task.row_step : nullptr);
        if (call.stats) write_stats(p, t, row.shift(), row.sum_at_shift());
      }
  }

  void write_residual(const Panel& p, const State& s, const S* out) const {
    S* residual = static_cast<S*>(call.residual) + (out - static_cast<S*>(call.out));
    unpack<V>(s.out, spec.Dv, factor, p.rows, residual, spec.out.l * task.row_step, spec.out.d,
              RoundingResidual<V, S>{out - residual});
  }

  void write_stats(const Panel& p, int t, Scalar shift, Scalar total) const {
    const int64_t all_rows = spec.B * spec.Hq * spec.Lq;
    Scalar* row_stats = static_cast<Scalar*>(call.stats) + (task.batch * spec.Hq + p.head) * spec.Lq + p.row +
                        t * task.row_step;
    row_stats[0] = shift;
    row_stats[all_rows] = total;
  }

  void attend(int first, int last) {
    for (int i = first; i < last; ++i) start(task.panels[i], states[i]);
    visit_blocks(
        first, last, [&](int i, const SpanView& view) { attend(task.panels[i], states[i], view); },
        [](int64_t) {});
  }

  // Computes panels with non-finite lanes again, without the non-finite values. This leaves the bits
  // of rows that do not attend to them; the exact path would round other weights.
  void attend_without_non_finite() {
    skip_non_finite = true;
    for (int i = 0; i < task.n_panels; ++i)
      if (non_finite_lanes(states[i]) & all_lanes(task.panels[i])) {
        states[i].span = 0;
        attend(i, i + 1);
      }
  }

  void run() {
    attend(0, task.n_panels);
    if (kPairs) attend_without_non_finite();
    for (int i = 0; i < task.n_panels; ++i) finish(task.panels[i], states[i]);
  }
};

}  // namespace
