// Facts about the attention weights of one task's panels: top-k, entropy, masses by key, distance,
// set and block, and whole rows. Two passes over the key blocks, with forward's loop order and tile
// shapes. Pass 1 is forward without values; it yields each row's shift and softmax sum. Pass 2
// recomputes the scores, normalises them to weights and reduces the weights to facts.
#include "kernels/forward.inl.h"
#include "kernels/largest.inl.h"

namespace {

template <class V, class S>
struct Evidence : Forward<V, S> {
  using Base = Forward<V, S>;
  using Scalar = Number<V>;
  using State = typename Base::State;
  using SpanView = typename Base::SpanView;
  using Base::call, Base::P, Base::scores, Base::spec, Base::states, Base::task;

  // Per-row values of one panel in the second pass. With z = score - shift:
  //   factor           1 / softmax sum
  //   weighted_scores  sum of 2^z * z
  //   threshold        k-th largest score so far
  //   max, total       softmax of the rows in exact_rows
  //   fast_rows        rows with a finite result and a nonzero softmax sum
  //   exact_rows       rows that are computed key by key
  struct RowFacts {
    Scalar *factor, *weighted_scores, *threshold;
    int64_t* choices;
    double *max, *total;
    int* top_k_size;
    uint32_t fast_rows = 0, exact_rows = 0;
  };

  const Facts& facts;
  const EvidenceTask& evidence_task;
  RowFacts* row_facts;
  Scalar *key_sums, *distance_sums;  // each lane's sums over the panels, by key and by distance

  explicit Evidence(const EvidenceTask& t) : Base(t.task), facts(*t.facts), evidence_task(t) {
    Arena& arena = this->arena;
    row_facts = arena.template take<RowFacts>(task.n_panels);
    for (int i = 0; i < task.n_panels; ++i)
      row_facts[i] = {arena.template take<Scalar>(P), arena.template take<Scalar>(P),
                      arena.template take<Scalar>(P), arena.template take<int64_t>(P),
                      arena.template take<double>(P), arena.template take<double>(P),
                      arena.template take<int>(P)};
    key_sums = arena.template take<Scalar>(facts.column_mass ? kKeyBlock * P : 0);
    distance_sums = arena.template take<Scalar>(facts.histogram ? diagonals(task.n_panels) * P : 0);
  }

  static int64_t diagonals(int panels) { return panels * P + kKeyBlock; }

  static int64_t scratch_bytes(const Spec& s, const Facts& f, int panels, bool copy_k) {
    const int64_t line = 64, word = sizeof(Scalar);
    const int64_t sums = (f.column_mass ? kKeyBlock * P : 0) + (f.histogram ? diagonals(panels) * P : 0);
    return Base::scratch_bytes(s, panels, copy_k, false) +
           panels * (round_up(sizeof(RowFacts), line) + 7 * round_up(P * 8, line)) + sums * word + 2 * line;
  }

  void run() {
    this->attend(0, task.n_panels);
    if (task.stop(task.stop_context)) return;
    for (int i = 0; i < task.n_panels; ++i) start_rows(task.panels[i], states[i], row_facts[i]);
    clear(key_sums, facts.column_mass ? kKeyBlock * P : 0);
    clear(distance_sums, facts.histogram ? diagonals(task.n_panels) * P : 0);
    this->visit_blocks(
        0, task.n_panels, [&](int i, const SpanView& view) { process_span(i, view); },
        [&](int64_t begin) { flush_block(begin); });
    for (int i = 0; i < task.n_panels; ++i) finish_rows(task.panels[i], states[i], row_facts[i]);
  }

  static void clear(Scalar* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
  }

  // Returns the row's index in a tensor (B, Hq, Lq).
  int64_t index(const Panel& p, int t) const {
    return (task.batch * spec.Hq + p.head) * spec.Lq + p.row + t * task.row_step;
  }

  void start_rows(const Panel& p, State& s, RowFacts& f) {
    s.span = 0;
    f.fast_rows = f.exact_rows = 0;
    const uint32_t non_finite = this->non_finite_lanes(s) & this->all_lanes(p);
    for (int t = 0; t < P; ++t) {
      const uint32_t lane = 1u << t;
      f.factor[t] = f.weighted_scores[t] = 0;
      f.threshold[t] = static_cast<Scalar>(-__builtin_inf());
      f.choices[t] = f.top_k_size[t] = 0;
      if (non_finite & lane) {
        f.exact_rows |= lane;
        start_exact(p, t, f);
      } else if (t < p.rows && s.total[t] != 0) {
        f.fast_rows |= lane;
        f.factor[t] = 1 / s.total[t];
      }
    }
  }

  // Adds the view's keys to the facts of panel i.
  void process_span(int i, const SpanView& view) {
    const Panel& p = task.panels[i];
    const int64_t n = view.end - view.begin;
    V lane_max[2];
    this->score(p, states[i], view, lane_max);
    if (facts.k) offer_scores(p, row_facts[i], view, lane_max);
    if (facts.nats) count_choices(row_facts[i], view);
    compute_weights(states[i], row_facts[i], n);
    for (int t = 0; t < p.rows && row_facts[i].exact_rows; ++t)
      if (row_facts[i].exact_rows >> t & 1) compute_exact_weights(p, t, row_facts[i], view);
    if (facts.column_mass) add_to_keys(p, view);
    if (facts.histogram) add_to_distances(i, view);
    if (facts.block) add_to_blocks(p, view);
    if (facts.sets) add_to_sets(p, view);
    if (facts.n_rows) store_rows(p, view);
  }

  // Turns scores into weights: 0 for masked keys, absent rows and exact rows.
  void compute_weights(const State& s, RowFacts& f, int64_t n) {
    const V lowest = Lanes<V>::set(Exp2<V>::kLowest);
    for (int i = 0; i < 2; ++i) {
      const V shift = finite_shift(Lanes<V>::load(s.shift + i * V::N));
      const V factor = Lanes<V>::load(f.factor + i * V::N);
      const auto fast = Lanes<V>::mask(f.fast_rows, i * V::N);
      V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
      const auto step = [&](int64_t c, V& partial) {
        Scalar* at = scores + (2 * c + i) * V::N;
        const V z = Lanes<V>::load(at) - shift, w = exp2(z);
        partial = fma(w, max(lowest, z), partial);
        Lanes<V>::store(at, keep(fast, w * factor));
      };
      for (int64_t c = 0; c + 1 < n; c += 2) {
        step(c, sum[0]);
        step(c + 1, sum[1]);
      }
      if (n & 1) step(n - 1, sum[0]);
      Scalar* at = f.weighted_scores + i * V::N;
      Lanes<V>::store(at, Lanes<V>::load(at) + (sum[0] + sum[1]));
    }
  }

  // Facts of single rows

  int64_t key(int64_t c) const { return task.key + c * task.key_step; }

  TopK<Scalar> top_k(const Panel& p, int t, RowFacts& f) const {
    const int64_t at = index(p, t) * facts.k;
    return {static_cast<Scalar*>(facts.top_weights) + at, facts.top_keys + at, facts.k, f.top_k_size[t]};
  }

  // Few tiles hold a top-k score: scans only rows whose maximum exceeds their threshold.
  void offer_scores(const Panel& p, RowFacts& f, const SpanView& view, const V (&lane_max)[2]) {
    uint32_t above = 0;
    for (int i = 0; i < 2; ++i)
      above |= bits(less(Lanes<V>::load(f.threshold + i * V::N), lane_max[i])) << i * V::N;
    above &= f.fast_rows;
    for (int t = 0; above; ++t, above >>= 1) {
      if (!(above & 1)) continue;
      TopK<Scalar> heap = top_k(p, t, f);
      for (int64_t c = 0; c < view.end - view.begin; ++c)
        if (const Scalar s = scores[c * P + t]; s > f.threshold[t]) {
          heap.push(s, key(view.begin + c));
          if (heap.full()) f.threshold[t] = heap.threshold();
        }
    }
  }

  // Counts the keys that each row may attend to. A bias of -inf masks a key.
  void count_choices(RowFacts& f, const SpanView& view) const {
    const int64_t n = view.end - view.begin;
    const bool all = !view.partial && (spec.bias == kNoBias || spec.bias == kAlibi);
    const V one = Lanes<V>::set(1), minus_inf = Lanes<V>::set(static_cast<Scalar>(-__builtin_inf()));
    V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
    for (int64_t c = 0; c < n && !all; ++c)
      for (int i = 0; i < 2; ++i)
        sum[i] = sum[i] + keep(differs(Lanes<V>::load(scores + (2 * c + i) * V::N), minus_inf), one);
    Scalar lane[P];
    for (int i = 0; i < 2; ++i) Lanes<V>::store(lane + i * V::N, sum[i]);
    for (int t = 0; t < P; ++t) f.choices[t] += all ? n : static_cast<int64_t>(lane[t]);
  }

  double entropy(const Panel& p, const State& s, const RowFacts& f, int t) const {
    double weighted_scores = static_cast<double>(f.weighted_scores[t]);
    const double total = static_cast<double>(s.total[t]);
    if (call.sink) {
      const double z = sink_of(p) * kLog2E - static_cast<double>(s.shift[t]);
      weighted_scores += ::exp2(z) * (z < Exp2<V>::kLowest ? 0 : z);
    }
    const double nats = log(total) - kLn2 * weighted_scores / total;
    return nats > 0 ? nats : 0;
  }

  double sink_of(const Panel& p) const {
    return static_cast<double>(static_cast<const Scalar*>(call.sink)[p.head]);
  }

  void finish_rows(const Panel& p, const State& s, RowFacts& f) const {
    for (int t = 0; t < p.rows; ++t) {
      if (f.exact_rows >> t & 1) finish_exact(p, t, f);
      if (facts.nats) {
        const int64_t choices = f.choices[t] + (call.sink ? 1 : 0);
        facts.choices[index(p, t)] = choices;
        if ((f.fast_rows >> t & 1) && choices > 1)
          static_cast<Scalar*>(facts.nats)[index(p, t)] = static_cast<Scalar>(entropy(p, s, f, t));
      }
      if (!facts.k) continue;
      TopK<Scalar> heap = top_k(p, t, f);
      if (f.fast_rows >> t & 1) heap.transform([&](Scalar score) { return weight(s, f, t, score); });
      heap.sort();
    }
  }

  // Returns the weight of one score, by the formula of `compute_weights`.
  static Scalar weight(const State& s, const RowFacts& f, int t, Scalar score) {
    return first_lane(exp2(Lanes<V>::set(score) - finite_shift(Lanes<V>::set(s.shift[t])))) * f.factor[t];
  }

  // Rows whose scores exceed the range of the compute type or hold NaN

  ExactRow<V, S> exact_row(const Panel& p, int t) const { return {task, p, t, this->row_sum, 0, 0}; }

  void start_exact(const Panel& p, int t, RowFacts& f) const {
    ExactRow<V, S> row = exact_row(p, t);
    row.run([&](int64_t j, const S* q, bool) { row.add(row.score(q, j), q, 0, true); });
    f.max[t] = row.max;
    f.total[t] = row.total;
  }

  // Calls visit(key, weight) for every key that the row may attend to.
  template <class Visit>
  void visit_exact_weights(const Panel& p, int t, const RowFacts& f, Visit visit) const {
    ExactRow<V, S> row = exact_row(p, t);
    row.run([&](int64_t j, const S* q, bool) {
      const double s = row.score(q, j);
      if (s != -__builtin_inf()) visit(j, exp(s - f.max[t]) / f.total[t]);
    });
  }

  void compute_exact_weights(const Panel& p, int t, const RowFacts& f, const SpanView& view) const {
    for (int64_t c = 0; c < view.end - view.begin; ++c) scores[c * P + t] = 0;
    ExactRow<V, S> row = exact_row(p, t);
    const S* q = row.query();
    for (const Span* span = view.spans; span < p.spans + p.n_spans && span->begin < view.end; ++span) {
      if (!(span->lanes >> t & 1)) continue;
      const int64_t from = span->begin > view.begin ? span->begin : view.begin;
      for (int64_t c = from; c < span->end && c < view.end; ++c) {
        const double s = row.score(q, key(c));
        if (s == -__builtin_inf()) continue;
        scores[(c - view.begin) * P + t] = static_cast<Scalar>(exp(s - f.max[t]) / f.total[t]);
      }
    }
  }

  // Computes the top-k and entropy of an exact row, which `process_span` skips.
  void finish_exact(const Panel& p, int t, RowFacts& f) const {
    double nats = 0;
    const auto add = [&](double w) { nats -= w == 0 ? 0 : w * log(w); };
    f.choices[t] = f.top_k_size[t] = 0;
    visit_exact_weights(p, t, f, [&](int64_t j, double w) {
      add(w);
      ++f.choices[t];
      if (facts.k) top_k(p, t, f).push(static_cast<Scalar>(w), j);
    });
    if (call.sink) add(exp(sink_of(p) - f.max[t]) / f.total[t]);
    if (facts.nats) static_cast<Scalar*>(facts.nats)[index(p, t)] = static_cast<Scalar>(nats);
  }

  // Sums over rows

  void add_to_keys(const Panel& p, const SpanView& view) {
    Scalar row_weights[P];
    for (int t = 0; t < P; ++t) row_weights[t] = t < p.rows ? row_weight(p, t) : 0;
    const bool unweighted = !facts.row_weights;
    Scalar* sums = key_sums + view.begin % kKeyBlock * P;
    for (int i = 0; i < 2; ++i) {
      const V weight = Lanes<V>::load(row_weights + i * V::N);
      const auto nonzero = differs(weight, Lanes<V>::zero());
      for (int64_t c = 0; c < view.end - view.begin; ++c) {
        const int64_t at = (2 * c + i) * V::N;
        const V w = Lanes<V>::load(scores + at);
        Lanes<V>::store(sums + at, Lanes<V>::load(sums + at) + (unweighted ? w : keep(nonzero, w * weight)));
      }
    }
  }

  Scalar row_weight(const Panel& p, int t) const {
    const Scalar* weights = static_cast<const Scalar*>(facts.row_weights);
    return weights ? weights[task.batch * facts.row_weights_batch + p.row + t * task.row_step] : 1;
  }

  // The distance of row i * P + t and key c equals that of row (i + 1) * P + t and key c + P, so
  // panels add to shared sums without shifting lanes.
  void add_to_distances(int i, const SpanView& view) {
    Scalar* sums = distance_sums + (i * P + kKeyBlock - 1 - view.begin % kKeyBlock) * P;
    for (int64_t c = 0; c < view.end - view.begin; ++c)
      for (int v = 0; v < 2; ++v) {
        Scalar* at = sums - c * P + v * V::N;
        Lanes<V>::store(at, Lanes<V>::load(at) + Lanes<V>::load(scores + (2 * c + v) * V::N));
      }
  }

  // Adds the lane sums of the key block that begins at `begin` to the head's sums.
  void flush_block(int64_t begin) {
    if (facts.column_mass) {
      for (int64_t c = 0; c < kKeyBlock; ++c)
        if (key(begin + c) < spec.Lk)
          evidence_task.column_mass[key(begin + c)] +=
              lane_sum(Lanes<V>::load(key_sums + c * P) + Lanes<V>::load(key_sums + c * P + V::N));
      clear(key_sums, kKeyBlock * P);
    }
    if (facts.histogram) flush_distances(begin);
  }

  void flush_distances(int64_t begin) {
    const int64_t count = diagonals(task.n_panels);
    const int64_t first =
        this->offset() + task.panels[0].row - key(begin + kKeyBlock - 1) - facts.distance_low;
    for (int64_t d = 0; d < count + P - 1; ++d) {
      const int64_t at = first + d * task.row_step;
      if (at < 0 || at >= facts.distances) continue;
      double sum = 0;
      for (int t = d < count ? 0 : static_cast<int>(d - count + 1); t < P && t <= d; ++t)
        sum += static_cast<double>(distance_sums[(d - t) * P + t]);
      evidence_task.histogram[at] += sum;
    }
    clear(distance_sums, count * P);
  }

  // Sums the keys of one block in each lane, then adds each lane's sum to its query block.
  void add_to_blocks(const Panel& p, const SpanView& view) {
    const int64_t key_blocks = (spec.Lk + facts.block - 1) / facts.block;
    const int64_t first = (task.batch * spec.Hq + p.head) * ((spec.Lq + facts.block - 1) / facts.block);
    for (int64_t from = view.begin, to; from < view.end; from = to) {
      const int64_t column = key(from) / facts.block;
      const int64_t n_keys = ((column + 1) * facts.block - key(from) + task.key_step - 1) / task.key_step;
      to = from + n_keys < view.end ? from + n_keys : view.end;
      Scalar sum[P], largest[P];
      sum_and_max(scores + (from - view.begin) * P, to - from, sum, largest);
      for (int t = 0; t < p.rows; ++t) {
        const int64_t at = (first + (p.row + t * task.row_step) / facts.block) * key_blocks + column;
        if (facts.block_mass) facts.block_mass[at] += static_cast<double>(sum[t]);
        if (facts.block_max) update_max(static_cast<Scalar*>(facts.block_max)[at], largest[t]);
      }
    }
  }

  // x = max(x, y), or NaN if either is NaN.
  static void update_max(Scalar& x, Scalar y) {
    if (y > x || y != y) x = y;
  }

  // Computes each lane's sum and maximum. In a row with NaN all unmasked weights are NaN, so the
  // sum shows it.
  static void sum_and_max(const Scalar* weights, int64_t n, Scalar (&sum)[P], Scalar (&largest)[P]) {
    for (int i = 0; i < 2; ++i) {
      V s = Lanes<V>::zero(), m = Lanes<V>::zero();
      for (int64_t c = 0; c < n; ++c) {
        const V w = Lanes<V>::load(weights + (2 * c + i) * V::N);
        s = s + w;
        m = max(w, m);
      }
      Lanes<V>::store(sum + i * V::N, s);
      Lanes<V>::store(largest + i * V::N, select(differs(s, s), s, m));
    }
  }

  void add_to_sets(const Panel& p, const SpanView& view) {
    for (int64_t set = 0; set < facts.sets; ++set) {
      const bool* chosen = facts.chosen + (set * spec.B + task.batch) * spec.Lk;
      V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
      for (int64_t c = 0; c < view.end - view.begin; ++c)
        if (chosen[key(view.begin + c)])
          for (int i = 0; i < 2; ++i) sum[i] = sum[i] + Lanes<V>::load(scores + (2 * c + i) * V::N);
      Scalar lane[P];
      for (int i = 0; i < 2; ++i) Lanes<V>::store(lane + i * V::N, sum[i]);
      Scalar* out = static_cast<Scalar*>(facts.mass_on) + set * spec.B * spec.Hq * spec.Lq;
      for (int t = 0; t < p.rows; ++t) out[index(p, t)] += lane[t];
    }
  }

  void store_rows(const Panel& p, const SpanView& view) {
    const int64_t* end = facts.rows + facts.n_rows;
    const int64_t last = p.row + (p.rows - 1) * task.row_step;
    for (const int64_t* row = lower_bound(facts.rows, end, p.row); row < end && *row <= last; ++row) {
      if ((*row - p.row) % task.row_step) continue;
      const int64_t t = (*row - p.row) / task.row_step;
      const int64_t at = (task.batch * spec.Hq + p.head) * facts.n_rows + (row - facts.rows);
      Scalar* out = static_cast<Scalar*>(facts.row_values) + at * spec.Lk;
      for (int64_t c = view.begin; c < view.end; ++c) out[key(c)] = scores[(c - view.begin) * P + t];
    }
  }
};

template <class V, class S>
constexpr EvidenceKernels evidence_kernels() {
  return {Evidence<V, S>::scratch_bytes, [](const EvidenceTask& t) { Evidence<V, S>(t).run(); }};
}

}  // namespace

const EvidenceKernels REGARD_TABLE(evidence)[4] = REGARD_EACH_DTYPE(evidence_kernels);
