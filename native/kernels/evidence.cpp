// Facts about the weights of some panels. The first walk over the keys is that of attention, with no values:
// it leaves each row's shift and sum. The second computes the weights, block by block, and uses them.
#include "kernels/forward.inl.h"
#include "kernels/largest.inl.h"

namespace {

template <class V, class S>
struct Evidence : Forward<V, S> {
  using Base = Forward<V, S>;
  using Scalar = Number<V>;
  using State = typename Base::State;
  using Seen = typename Base::Seen;
  using Base::call, Base::P, Base::scores, Base::spec, Base::states, Base::task;

  // What a panel's rows need in the second walk.
  struct Found {
    Scalar *factor, *weighted,
        *threshold;  // 1 / sum; sum of 2^z * z, z being a score less the shift; of top-k
    int64_t* choices;
    double *top, *total;           // of exact rows
    int* filled;                   // numbers in the row's top-k
    uint32_t good = 0, exact = 0;  // rows that see something, and those of them that are computed key by key
  };

  const Facts& facts;
  const EvidenceTask& look;
  Found* found;
  Scalar *by_key, *by_distance;  // sums over the panels for each lane, of a block's keys and distances

  explicit Evidence(const EvidenceTask& l) : Base(l.task), facts(*l.facts), look(l) {
    Arena& arena = this->arena;
    found = arena.template take<Found>(task.n_panels);
    for (int i = 0; i < task.n_panels; ++i)
      found[i] = {arena.template take<Scalar>(P), arena.template take<Scalar>(P),
                  arena.template take<Scalar>(P), arena.template take<int64_t>(P),
                  arena.template take<double>(P), arena.template take<double>(P),
                  arena.template take<int>(P)};
    by_key = arena.template take<Scalar>(facts.column_mass ? kBlock * P : 0);
    by_distance = arena.template take<Scalar>(facts.histogram ? diagonals(task.n_panels) * P : 0);
  }

  static int64_t diagonals(int panels) { return panels * P + kBlock; }

  static int64_t scratch_bytes(const Spec& s, const Facts& f, int panels, bool copy_k) {
    const int64_t line = 64, word = sizeof(Scalar);
    const int64_t sums = (f.column_mass ? kBlock * P : 0) + (f.histogram ? diagonals(panels) * P : 0);
    return Base::scratch_bytes(s, panels, copy_k, false) +
           panels * (round_up(sizeof(Found), line) + 7 * round_up(P * 8, line)) + sums * word + 2 * line;
  }

  void run() {
    this->attend_all();
    if (task.stop(task.stop_context)) return;
    for (int i = 0; i < task.n_panels; ++i) start_rows(task.panels[i], states[i], found[i]);
    clear(by_key, facts.column_mass ? kBlock * P : 0);
    clear(by_distance, facts.histogram ? diagonals(task.n_panels) * P : 0);
    this->walk([&](int i, const Seen& seen) { look_at(i, seen); }, [&](int64_t begin) { close(begin); });
    for (int i = 0; i < task.n_panels; ++i) finish_rows(task.panels[i], states[i], found[i]);
  }

  static void clear(Scalar* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0;
  }

  // Where a row's numbers are in a tensor (B, Hq, Lq).
  int64_t index(const Panel& p, int t) const {
    return (task.batch * spec.Hq + p.head) * spec.Lq + p.row + t * task.row_step;
  }

  void start_rows(const Panel& p, State& s, Found& r) {
    s.span = 0;
    r.good = r.exact = 0;
    const uint32_t broken = this->broken(s) & this->all_lanes(p);
    for (int t = 0; t < P; ++t) {
      const uint32_t lane = 1u << t;
      r.factor[t] = r.weighted[t] = 0;
      r.threshold[t] = static_cast<Scalar>(-__builtin_inf());
      r.choices[t] = r.filled[t] = 0;
      if (broken & lane) {
        r.exact |= lane;
        start_exact(p, t, r);
      } else if (t < p.rows && s.total[t] != 0) {
        r.good |= lane;
        r.factor[t] = 1 / s.total[t];
      }
    }
  }

  // The keys [begin, end) of a panel.
  void look_at(int i, const Seen& seen) {
    const Panel& p = task.panels[i];
    const int64_t n = seen.end - seen.begin;
    V top[2];
    this->score(p, states[i], seen, top);
    if (facts.k) offer_scores(p, found[i], seen, top);
    if (facts.nats) count_choices(found[i], seen);
    weigh(states[i], found[i], n);
    for (int t = 0; t < p.rows && found[i].exact; ++t)
      if (found[i].exact >> t & 1) weigh_exactly(p, t, found[i], seen);
    if (facts.column_mass) add_to_keys(p, seen);
    if (facts.histogram) add_to_distances(i, seen);
    if (facts.block) add_to_blocks(p, seen);
    if (facts.sets) add_to_sets(p, seen);
    if (facts.n_rows) keep_rows(p, seen);
  }

  // scores -> weights; 0 for what is hidden, and for rows that are not there or computed exactly.
  void weigh(const State& s, Found& r, int64_t n) {
    const V lowest = Lanes<V>::set(Exp2<V>::kLowest);
    for (int i = 0; i < 2; ++i) {
      const V shift = finite_shift(Lanes<V>::load(s.shift + i * V::N));
      const V factor = Lanes<V>::load(r.factor + i * V::N);
      const auto good = Lanes<V>::mask(r.good, i * V::N);
      V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
      const auto step = [&](int64_t c, V& into) {
        Scalar* at = scores + (2 * c + i) * V::N;
        const V z = Lanes<V>::load(at) - shift, w = exp2(z);
        into = fma(w, max(lowest, z), into);
        Lanes<V>::store(at, keep(good, w * factor));
      };
      for (int64_t c = 0; c + 1 < n; c += 2) {
        step(c, sum[0]);
        step(c + 1, sum[1]);
      }
      if (n & 1) step(n - 1, sum[0]);
      Scalar* at = r.weighted + i * V::N;
      Lanes<V>::store(at, Lanes<V>::load(at) + (sum[0] + sum[1]));
    }
  }

  // Rows of the panel and what they have found so far, key by key

  int64_t key(int64_t c) const { return task.key + c * task.key_step; }

  Largest<Scalar> largest_of(const Panel& p, int t, Found& r) const {
    const int64_t at = index(p, t) * facts.k;
    return {static_cast<Scalar*>(facts.top_weights) + at, facts.top_keys + at, facts.k, r.filled[t]};
  }

  // Few blocks hold any of a row's largest: only rows whose largest score is above their k-th are looked at.
  void offer_scores(const Panel& p, Found& r, const Seen& seen, const V (&top)[2]) {
    uint32_t above = 0;
    for (int i = 0; i < 2; ++i)
      above |= bits(less(Lanes<V>::load(r.threshold + i * V::N), top[i])) << i * V::N;
    above &= r.good;
    for (int t = 0; above; ++t, above >>= 1) {
      if (!(above & 1)) continue;
      Largest<Scalar> best = largest_of(p, t, r);
      for (int64_t c = 0; c < seen.end - seen.begin; ++c)
        if (const Scalar s = scores[c * P + t]; s > r.threshold[t]) {
          best.offer(s, key(seen.begin + c));
          if (best.full()) r.threshold[t] = best.least();
        }
    }
  }

  // A bias of -inf excludes keys, as the mask does.
  void count_choices(Found& r, const Seen& seen) const {
    const int64_t n = seen.end - seen.begin;
    const bool all = !seen.partial && (spec.bias == kNoBias || spec.bias == kAlibi);
    const V one = Lanes<V>::set(1), hidden = Lanes<V>::set(static_cast<Scalar>(-__builtin_inf()));
    V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
    for (int64_t c = 0; c < n && !all; ++c)
      for (int i = 0; i < 2; ++i)
        sum[i] = sum[i] + keep(differs(Lanes<V>::load(scores + (2 * c + i) * V::N), hidden), one);
    Scalar lane[P];
    for (int i = 0; i < 2; ++i) Lanes<V>::store(lane + i * V::N, sum[i]);
    for (int t = 0; t < P; ++t) r.choices[t] += all ? n : static_cast<int64_t>(lane[t]);
  }

  double entropy(const Panel& p, const State& s, const Found& r, int t) const {
    double weighted = static_cast<double>(r.weighted[t]);
    const double total = static_cast<double>(s.total[t]);
    if (call.sink) {
      const double z = sink_of(p) * kLog2E - static_cast<double>(s.shift[t]);
      weighted += ::exp2(z) * (z < Exp2<V>::kLowest ? 0 : z);
    }
    const double nats = log(total) - kLn2 * weighted / total;
    return nats > 0 ? nats : 0;
  }

  double sink_of(const Panel& p) const {
    return static_cast<double>(static_cast<const Scalar*>(call.sink)[p.head]);
  }

  void finish_rows(const Panel& p, const State& s, Found& r) const {
    for (int t = 0; t < p.rows; ++t) {
      if (r.exact >> t & 1) finish_exact(p, t, r);
      if (facts.nats) {
        const int64_t choices = r.choices[t] + (call.sink ? 1 : 0);
        facts.choices[index(p, t)] = choices;
        if ((r.good >> t & 1) && choices > 1)
          static_cast<Scalar*>(facts.nats)[index(p, t)] = static_cast<Scalar>(entropy(p, s, r, t));
      }
      if (!facts.k) continue;
      Largest<Scalar> best = largest_of(p, t, r);
      if (r.good >> t & 1) best.each([&](Scalar score) { return weight(s, r, t, score); });
      best.sort();
    }
  }

  // As `weigh` computes it.
  static Scalar weight(const State& s, const Found& r, int t, Scalar score) {
    return first_of(exp2(Lanes<V>::set(score) - finite_shift(Lanes<V>::set(s.shift[t])))) * r.factor[t];
  }

  // Rows whose scores leave the compute type, or hold NaN

  ExactRow<V, S> exact_row(const Panel& p, int t) const { return {task, p, t, this->row_sum, 0, 0}; }

  void start_exact(const Panel& p, int t, Found& r) const {
    ExactRow<V, S> row = exact_row(p, t);
    row.walk([&](int64_t j, const S* q, bool) { row.add(row.score(q, j), q, 0, true); });
    r.top[t] = row.top;
    r.total[t] = row.total;
  }

  // visit(key, weight) for every key that the row sees.
  template <class Visit>
  void each_exact(const Panel& p, int t, const Found& r, Visit visit) const {
    ExactRow<V, S> row = exact_row(p, t);
    row.walk([&](int64_t j, const S* q, bool) {
      const double s = row.score(q, j);
      if (s != -__builtin_inf()) visit(j, exp(s - r.top[t]) / r.total[t]);
    });
  }

  void weigh_exactly(const Panel& p, int t, const Found& r, const Seen& seen) const {
    for (int64_t c = 0; c < seen.end - seen.begin; ++c) scores[c * P + t] = 0;
    ExactRow<V, S> row = exact_row(p, t);
    const S* q = row.query();
    for (const Span* span = seen.spans; span < p.spans + p.n_spans && span->begin < seen.end; ++span) {
      if (!(span->lanes >> t & 1)) continue;
      const int64_t from = span->begin > seen.begin ? span->begin : seen.begin;
      for (int64_t c = from; c < span->end && c < seen.end; ++c) {
        const double s = row.score(q, key(c));
        if (s == -__builtin_inf()) continue;
        scores[(c - seen.begin) * P + t] = static_cast<Scalar>(exp(s - r.top[t]) / r.total[t]);
      }
    }
  }

  // Top-k and entropy, which `look_at` leaves out for such rows.
  void finish_exact(const Panel& p, int t, Found& r) const {
    double nats = 0;
    const auto add = [&](double w) { nats -= w == 0 ? 0 : w * log(w); };
    r.choices[t] = r.filled[t] = 0;
    each_exact(p, t, r, [&](int64_t j, double w) {
      add(w);
      ++r.choices[t];
      if (facts.k) largest_of(p, t, r).offer(static_cast<Scalar>(w), j);
    });
    if (call.sink) add(exp(sink_of(p) - r.top[t]) / r.total[t]);
    if (facts.nats) static_cast<Scalar*>(facts.nats)[index(p, t)] = static_cast<Scalar>(nats);
  }

  // Sums over rows

  void add_to_keys(const Panel& p, const Seen& seen) {
    Scalar counts[P];
    for (int t = 0; t < P; ++t) counts[t] = t < p.rows ? row_weight(p, t) : 0;
    const bool plain = !facts.row_weights;
    Scalar* sums = by_key + seen.begin % kBlock * P;
    for (int i = 0; i < 2; ++i) {
      const V count = Lanes<V>::load(counts + i * V::N);
      const auto counted = differs(count, Lanes<V>::zero());
      for (int64_t c = 0; c < seen.end - seen.begin; ++c) {
        const int64_t at = (2 * c + i) * V::N;
        const V w = Lanes<V>::load(scores + at);
        Lanes<V>::store(sums + at, Lanes<V>::load(sums + at) + (plain ? w : keep(counted, w * count)));
      }
    }
  }

  Scalar row_weight(const Panel& p, int t) const {
    const Scalar* weights = static_cast<const Scalar*>(facts.row_weights);
    return weights ? weights[task.batch * facts.row_weights_batch + p.row + t * task.row_step] : 1;
  }

  // Row i * P + t less key c is the same for the next panel P keys further on: lanes need not be shifted.
  void add_to_distances(int i, const Seen& seen) {
    Scalar* sums = by_distance + (i * P + kBlock - 1 - seen.begin % kBlock) * P;
    for (int64_t c = 0; c < seen.end - seen.begin; ++c)
      for (int v = 0; v < 2; ++v) {
        Scalar* at = sums - c * P + v * V::N;
        Lanes<V>::store(at, Lanes<V>::load(at) + Lanes<V>::load(scores + (2 * c + v) * V::N));
      }
  }

  // The panels have passed the block that begins at key `begin`.
  void close(int64_t begin) {
    if (facts.column_mass) {
      for (int64_t c = 0; c < kBlock; ++c)
        if (key(begin + c) < spec.Lk)
          look.column_mass[key(begin + c)] +=
              sum_of(Lanes<V>::load(by_key + c * P) + Lanes<V>::load(by_key + c * P + V::N));
      clear(by_key, kBlock * P);
    }
    if (facts.histogram) close_distances(begin);
  }

  void close_distances(int64_t begin) {
    const int64_t count = diagonals(task.n_panels);
    const int64_t first =
        this->position() + task.panels[0].row - key(begin + kBlock - 1) - facts.distance_low;
    for (int64_t d = 0; d < count + P - 1; ++d) {
      const int64_t at = first + d * task.row_step;
      if (at < 0 || at >= facts.distances) continue;
      double sum = 0;
      for (int t = d < count ? 0 : static_cast<int>(d - count + 1); t < P && t <= d; ++t)
        sum += static_cast<double>(by_distance[(d - t) * P + t]);
      look.histogram[at] += sum;
    }
    clear(by_distance, count * P);
  }

  // Neighbouring keys of one block of the pyramid are summed first, then lanes go to their own blocks.
  void add_to_blocks(const Panel& p, const Seen& seen) {
    const int64_t across = (spec.Lk + facts.block - 1) / facts.block;
    const int64_t first = (task.batch * spec.Hq + p.head) * ((spec.Lq + facts.block - 1) / facts.block);
    for (int64_t from = seen.begin, to; from < seen.end; from = to) {
      const int64_t column = key(from) / facts.block;
      const int64_t inside = ((column + 1) * facts.block - key(from) + task.key_step - 1) / task.key_step;
      to = from + inside < seen.end ? from + inside : seen.end;
      Scalar sum[P], most[P];
      gather(scores + (from - seen.begin) * P, to - from, sum, most);
      for (int t = 0; t < p.rows; ++t) {
        const int64_t at = (first + (p.row + t * task.row_step) / facts.block) * across + column;
        if (facts.block_mass) facts.block_mass[at] += static_cast<double>(sum[t]);
        if (facts.block_max) raise_to(static_cast<Scalar*>(facts.block_max)[at], most[t]);
      }
    }
  }

  // NaN stays.
  static void raise_to(Scalar& x, Scalar y) {
    if (y > x || y != y) x = y;
  }

  // Of each lane, the sum and the largest. Where a row has NaN, all of it that is seen is NaN, and so the
  // sum.
  static void gather(const Scalar* weights, int64_t n, Scalar (&sum)[P], Scalar (&most)[P]) {
    for (int i = 0; i < 2; ++i) {
      V s = Lanes<V>::zero(), m = Lanes<V>::zero();
      for (int64_t c = 0; c < n; ++c) {
        const V w = Lanes<V>::load(weights + (2 * c + i) * V::N);
        s = s + w;
        m = max(w, m);
      }
      Lanes<V>::store(sum + i * V::N, s);
      Lanes<V>::store(most + i * V::N, select(differs(s, s), s, m));
    }
  }

  void add_to_sets(const Panel& p, const Seen& seen) {
    for (int64_t set = 0; set < facts.sets; ++set) {
      const bool* chosen = facts.chosen + (set * spec.B + task.batch) * spec.Lk;
      V sum[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
      for (int64_t c = 0; c < seen.end - seen.begin; ++c)
        if (chosen[key(seen.begin + c)])
          for (int i = 0; i < 2; ++i) sum[i] = sum[i] + Lanes<V>::load(scores + (2 * c + i) * V::N);
      Scalar lane[P];
      for (int i = 0; i < 2; ++i) Lanes<V>::store(lane + i * V::N, sum[i]);
      Scalar* out = static_cast<Scalar*>(facts.mass_on) + set * spec.B * spec.Hq * spec.Lq;
      for (int t = 0; t < p.rows; ++t) out[index(p, t)] += lane[t];
    }
  }

  void keep_rows(const Panel& p, const Seen& seen) {
    const int64_t* end = facts.rows + facts.n_rows;
    const int64_t last = p.row + (p.rows - 1) * task.row_step;
    for (const int64_t* row = first_not_below(facts.rows, end, p.row); row < end && *row <= last; ++row) {
      if ((*row - p.row) % task.row_step) continue;
      const int64_t t = (*row - p.row) / task.row_step;
      const int64_t at = (task.batch * spec.Hq + p.head) * facts.n_rows + (row - facts.rows);
      Scalar* out = static_cast<Scalar*>(facts.row_values) + at * spec.Lk;
      for (int64_t c = seen.begin; c < seen.end; ++c) out[key(c)] = scores[(c - seen.begin) * P + t];
    }
  }
};

template <class V, class S>
constexpr EvidenceKernels evidence_kernels() {
  return {Evidence<V, S>::scratch_bytes, [](const EvidenceTask& l) { Evidence<V, S>(l).run(); }};
}

}  // namespace

const EvidenceKernels REGARD_TABLE(evidence)[4] = REGARD_EACH_DTYPE(evidence_kernels);
