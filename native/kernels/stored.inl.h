// Reads stored keys or values of one head: floats of any dtype, or int8 or int4 codes with scales;
// contiguous or in pages. Rows are read in tiles, in place where a kernel can use them, else
// converted to the compute type.
#pragma once
#include "kernels/arena.inl.h"
#include "kernels/pack.inl.h"

namespace {

// A converted tile stays in L1. While the rows of a tile that is read in place are used, the rows of
// the next tile are prefetched: a tile's `ahead` is the distance to the next tile, in elements.
constexpr int64_t kTileKeys = 32;

// A row of floats. Sums along D have the lanes of a cache line of the compute type, kWidth, so that
// they do not depend on the width of a vector.
template <class V, class K>
struct FloatRow {
  static constexpr bool kFloats = true;
  static constexpr int kWidth = 64 / sizeof(Number<V>), kParts = kWidth / V::N, kLine = 64 / sizeof(K);
  // Keys that are multiplied by several queries at once: more share each load of the queries, which
  // pays off for 16 bits; fewer are nearer to one stream, which pays off for floats from DRAM.
  static constexpr int kAdjacent = sizeof(K) == 2 ? 4 : 2;
  const K* data;
  int64_t ahead;
  V load(int64_t d) const { return Lanes<V>::load(data + d); }
  Number<V> element(int64_t d) const { return static_cast<Number<V>>(to_float(data[d])); }
  // Prefetches the cache line that holds element d of the next tile's row.
  void prefetch(int64_t d) const { __builtin_prefetch(data + d + ahead); }
};

template <class V, class K>
struct FloatTile {
  using Row = FloatRow<V, K>;
  const K* data;
  int64_t ld, ahead;
  Row row(int64_t c) const { return {data + c * ld, ahead}; }
  FloatTile from(int64_t c) const { return {data + c * ld, ld, ahead}; }
};

// A row of codes. A unit is one vector of int8 codes, or two vectors of int4 codes that share their
// bytes.
template <class V, StoreKind Kind>
struct CodeRow {
  static constexpr bool kFloats = false;
  // Whether one query multiplies codes, and scales the sum of a group.
  static constexpr bool kScalesLate = Kind == kInt8 || !kLooksUpNibbles;
  static constexpr int kHalf = kGroup / 2, kVectors = Kind == kInt8 ? 1 : 2, kParts = 1;
  static constexpr int kAdjacent = 4;
  static constexpr int kUnits = kGroup / kVectors / V::N;  // units of a group
  const uint8_t* codes;
  const Number<V>* scales;
  int64_t ahead;

  // Returns the channel, within its group, of lane 0 of vector n of a unit.
  static constexpr int channel(int unit, int n) { return unit * V::N + n * kHalf; }

  void load(int64_t group, int unit, V (&x)[kVectors]) const {
    if constexpr (Kind == kInt8)
      x[0] = Lanes<V>::load(reinterpret_cast<const int8_t*>(codes) + group * kGroup + unit * V::N);
    else
      load_nibbles(codes + group * kHalf + unit * V::N, x[0], x[1]);
  }
  // An element is code * scale + low; int8 has no low.
  V scale(int64_t group) const { return Lanes<V>::set(scales[kVectors * group]); }
  V low(int64_t group) const { return Lanes<V>::set(scales[2 * group + 1]); }
  // Loads elements instead of codes.
  void load_dequantised(int64_t group, int unit, V (&x)[kVectors]) const {
    if constexpr (Kind == kInt8) {
      load(group, unit, x);
      x[0] = x[0] * scale(group);
    } else {
      dequantise_nibbles(codes + group * kHalf + unit * V::N, scale(group), low(group), x[0], x[1]);
    }
  }
  void prefetch(int64_t group) const { __builtin_prefetch(codes + group * kGroup / kVectors + ahead); }
};

template <class V, StoreKind Kind>
struct CodeTile {
  using Row = CodeRow<V, Kind>;
  const uint8_t* codes;
  int64_t ld, ahead;
  const Number<V>* scales;
  int64_t per_row;
  Row row(int64_t c) const { return {codes + c * ld, scales + c * per_row, ahead}; }
};

template <class V, class S>
class Stored {
  using Scalar = Number<V>;

 public:
  Stored(const Run& p, const void* data, const Strides& stride, const void* scales,
         const Strides& scale_stride, int64_t width)
      : spec_(*p.spec), stride_(stride), scale_stride_(scale_stride), width_(width), batch_(p.batch),
        key_(p.key), step_(p.key_step),
        table_(p.call->table ? p.call->table + p.batch * p.call->table_stride : nullptr) {
    data_ = static_cast<const char*>(data) + p.kv_head * stride.h * element_bytes();
    scales_ = static_cast<const Half*>(scales) + (scales ? p.kv_head * scale_stride.h : 0);
  }

  static Stored keys(const Run& p) {
    return {p, p.call->k, p.spec->k, p.call->k_scale, p.spec->k_scale, p.spec->D};
  }
  static Stored values(const Run& p) {
    return {p, p.call->v, p.spec->v, p.call->v_scale, p.spec->v_scale, p.spec->Dv};
  }

  // Return the number of scratch elements for a converted tile of n rows, and for its scales.
  static int64_t tile_size(int64_t width, int64_t n) { return n * round_up(width, kGroup); }
  static int64_t scales_size(int64_t width, int64_t n) { return n * 2 * (round_up(width, kGroup) / kGroup); }

  // Returns rows [begin, begin + n) in place, `ld` elements apart. Returns null if they are
  // codes, cross a page, are not contiguous along D, or lie in a page that does not exist.
  const S* in_place(int64_t begin, int64_t n, int64_t& ld) const {
    if (spec_.store != kFloats || stride_.d != 1 || rows_in_page(begin, n) < n) return nullptr;
    ld = stride_.l * step_;
    return reinterpret_cast<const S*>(locate(begin).data);
  }

  // Returns rows of codes in place, with their scales converted. The codes are null if the rows
  // cross a page or lie in a page that does not exist.
  template <StoreKind Kind>
  CodeTile<V, Kind> codes_in_place(int64_t begin, int64_t n, Scalar* scales) const {
    const Row row = locate(begin);
    if (!row.exists || rows_in_page(begin, n) < n) return {};
    convert_scales(row, n, scales);
    return {reinterpret_cast<const uint8_t*>(row.data), stride_.l * step_, 0, scales, scales_per_row()};
  }

  // Returns how many elements (bytes, for codes) row `to` lies behind row `from`, or 0 if one of
  // them lies in a page that does not exist.
  int64_t distance(int64_t from, int64_t to) const {
    const Row a = locate(from), b = locate(to);
    return a.exists && b.exists ? (b.data - a.data) / element_bytes() : 0;
  }

  // Returns rows in the compute type, copied to `target`. Rows of a page that does not exist are
  // zeros, and `has_bad_page` returns true.
  const Scalar* rows(int64_t begin, int64_t n, Scalar* target, Scalar* scales, int64_t& ld) {
    ld = round_up(width_, kGroup);
    for (int64_t r = 0, m; r < n; r += m) {
      m = rows_in_page(begin + r, n - r);
      convert(locate_checked(begin + r), m, target + r * ld, scales, ld);
    }
    return target;
  }

  bool has_bad_page() const { return bad_page_; }

 private:
  struct Row {
    bool exists;  // the page table's entry is valid
    const char* data;
    const Half* scales;
  };

  int64_t element_bytes() const { return spec_.store == kFloats ? sizeof(S) : 1; }
  int64_t groups() const { return (width_ + kGroup - 1) / kGroup; }

  // Returns how many of the next n rows lie in the same page.
  int64_t rows_in_page(int64_t begin, int64_t n) const {
    if (!table_) return n;
    const int64_t left = (spec_.page - ((key_ + begin * step_) & (spec_.page - 1)) + step_ - 1) / step_;
    return left < n ? left : n;
  }

  Row locate(int64_t j) const {
    const int64_t key = key_ + j * step_;
    const int64_t outer = table_ ? table_[key / spec_.page] : batch_;
    const int64_t row = table_ ? key & (spec_.page - 1) : key;
    if (table_ && (outer < 0 || outer >= spec_.pages)) return {false, nullptr, nullptr};
    return {true, data_ + (outer * stride_.b + row * stride_.l) * element_bytes(),
            scales_ + outer * scale_stride_.b + row * scale_stride_.l};
  }

  Row locate_checked(int64_t j) {
    const Row row = locate(j);
    bad_page_ |= !row.exists;
    return row;
  }

  void convert(const Row& row, int64_t n, Scalar* target, Scalar* scales, int64_t ld) {
    if (!row.exists)
      for (int64_t i = 0; i < n * ld; ++i) target[i] = 0;
    else if (spec_.store == kFloats)
      copy_rows<V>(reinterpret_cast<const S*>(row.data), stride_.l * step_, stride_.d, n, width_, ld, target);
    else if constexpr (sizeof(Scalar) == sizeof(float))
      dequantise(row, n, target, scales);
  }

  int64_t scales_per_row() const { return groups() * (spec_.store == kInt8 ? 1 : 2); }

  void convert_scales(const Row& row, int64_t n, Scalar* scales) const {
    const int64_t per_row = scales_per_row(), row_stride = scale_stride_.l * step_;
    if (row_stride == per_row)
      copy_rows<V>(row.scales, 0, 1, 1, n * per_row, 0, scales);
    else
      copy_rows<V>(row.scales, row_stride, 1, n, per_row, per_row, scales);
  }

  // Dequantises n rows.
  void dequantise(const Row& row, int64_t n, Scalar* target, Scalar* scales) const {
    convert_scales(row, n, scales);
    for (int64_t r = 0; r < n; ++r) {
      const char* codes = row.data + r * stride_.l * step_;
      for (int64_t g = 0; g < groups(); ++g, target += kGroup)
        if (spec_.store == kInt8)
          dequantise_int8_group(reinterpret_cast<const int8_t*>(codes) + g * kGroup, *scales++, target);
        else
          dequantise_int4_group(reinterpret_cast<const uint8_t*>(codes) + g * kGroup / 2, scales[0],
                                scales[1], target),
              scales += 2;
    }
  }

  static void dequantise_int8_group(const int8_t* codes, Scalar scale, Scalar* target) {
    const V factor = Lanes<V>::set(scale);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += V::N) Lanes<V>::store(target + i, Lanes<V>::load(codes + i) * factor);
  }

  static void dequantise_int4_group(const uint8_t* codes, Scalar scale, Scalar low, Scalar* target) {
    const V factor = Lanes<V>::set(scale), lows = Lanes<V>::set(low);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup / 2; i += V::N) {
      V below, above;
      dequantise_nibbles(codes + i, factor, lows, below, above);
      Lanes<V>::store(target + i, below);
      Lanes<V>::store(target + kGroup / 2 + i, above);
    }
  }

  const Spec& spec_;
  Strides stride_, scale_stride_;
  int64_t width_, batch_, key_, step_;
  const int32_t* table_;
  const char* data_;
  const Half* scales_;
  bool bad_page_ = false;
};

}  // namespace
