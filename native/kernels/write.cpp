// Writes new rows into a cache: copies floats, or quantises groups of 32 channels to int8 or int4
// codes with float16 scales (see StoreKind). Loop order: rows, groups of a row, channels.
#include "kernels/pack.inl.h"

namespace {

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
inline float round_to_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

// Clamps and rounds x to a code. NaN becomes code 0: x is 0 / 0 in a group of equal elements.
inline float code_of(float x, float min_code, float max_code) {
  x = x == x ? x : 0;
  x = x > min_code ? x : min_code;
  return round_to_even(x < max_code ? x : max_code);
}

inline float round_to_half(float x, Half* target) {
  from_float(target, x);
  return to_float(*target);
}

// The elements of one group. Channels beyond the row's width repeat its last channel.
struct Group {
  static constexpr int kLanes = 8;  // independent accumulators, which compilers vectorise
  float x[kGroup];

  template <class S>
  Group(const S* row, int64_t stride, int64_t n) {
    for (int64_t i = 0; i < kGroup; ++i)
      x[i] = static_cast<float>(to_float(row[(i < n ? i : n - 1) * stride]));
  }

  bool is_finite() const {
    float zero[kLanes] = {};
    for (int i = 0; i < kGroup; ++i) zero[i % kLanes] += x[i] - x[i];
    float sum = 0;
    for (const float z : zero) sum += z;
    return sum == 0;
  }

  bool has_nan() const {
    bool nan = false;
    for (const float value : x) nan |= value != value;
    return nan;
  }

  // Returns the largest sign * x, or the largest |x| if sign is 0. The elements must be finite.
  float max_of(float sign) const {
    float lane_max[kLanes];
    for (int i = 0; i < kGroup; ++i) {
      const float value = sign == 0 ? fabsf(x[i]) : sign * x[i];
      lane_max[i % kLanes] = i < kLanes || value > lane_max[i % kLanes] ? value : lane_max[i % kLanes];
    }
    for (const float t : lane_max) lane_max[0] = t > lane_max[0] ? t : lane_max[0];
    return lane_max[0];
  }
};

inline void encode_bytes(const Group& group, int64_t n, int8_t* codes, Half* scale) {
  constexpr float kMaxCode = 127;
  const float max_abs = group.is_finite() ? group.max_of(0)
                        : group.has_nan() ? __builtin_nanf("")
                                          : __builtin_inff();
  const float step = round_to_half(max_abs / kMaxCode, scale);
  for (int64_t i = 0; i < kGroup; ++i)
    codes[i] = i < n ? static_cast<int8_t>(code_of(group.x[i] / step, -kMaxCode, kMaxCode)) : 0;
}

// Fits step and low in x = low + step * code by least squares. The codes of the fit divide the
// range of the group's elements evenly.
inline void fit_line(const Group& group, Half* line) {
  constexpr float kMaxCode = 15;
  const float low = -group.max_of(-1), step = (group.max_of(1) - low) / kMaxCode;
  double c_sum = 0, cc_sum = 0, x_sum = 0, cx_sum = 0;
  for (const float x : group.x) {
    const double c = code_of((x - low) / step, 0, kMaxCode), value = x;
    c_sum += c, cc_sum += c * c, x_sum += value, cx_sum += c * value;
  }
  const double spread = cc_sum - c_sum * c_sum / kGroup;
  const float fitted =
      static_cast<float>(spread > 0 ? (cx_sum - c_sum * x_sum / kGroup) / spread : static_cast<double>(step));
  from_float(line, fitted);
  from_float(line + 1, static_cast<float>((x_sum - static_cast<double>(fitted) * c_sum) / kGroup));
}

inline void encode_nibbles(const Group& group, int64_t n, uint8_t* codes, Half* line) {
  constexpr int64_t kHalf = kGroup / 2;
  if (group.is_finite())
    fit_line(group, line);
  else
    from_float(line, __builtin_nanf("")), from_float(line + 1, __builtin_nanf(""));
  const float step = to_float(line[0]), low = to_float(line[1]);
  float code[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) code[i] = code_of((group.x[i] - low) / step, 0, 15);
  for (int64_t i = n; i < kGroup; ++i) code[i] = 0;
  for (int64_t i = 0; i < kHalf; ++i)
    codes[i] = static_cast<uint8_t>(static_cast<int>(code[i]) | static_cast<int>(code[i + kHalf]) << 4);
}

template <class S>
void encode_row(const NewRows& rows, const S* source, uint8_t* codes, Half* scales) {
  const bool bytes = rows.store == kInt8;
  for (int64_t at = 0; at < rows.width; at += kGroup) {
    const int64_t n = rows.width - at < kGroup ? rows.width - at : kGroup;
    const Group group(source + at * rows.stride, rows.stride, n);
    if (bytes)
      encode_bytes(group, n, reinterpret_cast<int8_t*>(codes), scales);
    else
      encode_nibbles(group, n, codes, scales);
    codes += bytes ? kGroup : kGroup / 2;
    scales += bytes ? 1 : 2;
  }
}

template <class S>
void copy_row(const NewRows& rows, const S* source, S* target) {
  if (rows.stride == 1)
    __builtin_memcpy(target, source, static_cast<size_t>(rows.width) * sizeof(S));
  else
    for (int64_t d = 0; d < rows.width; ++d) target[d] = source[d * rows.stride];
}

template <class S>
void write_rows(const NewRows& rows) {
  const S* source = static_cast<const S*>(rows.source);
  for (int64_t r = 0; r < rows.count; ++r, source += rows.row_stride)
    if (rows.store == kFloats)
      copy_row(rows, source, static_cast<S*>(rows.target) + r * rows.target_stride);
    else
      encode_row(rows, source, static_cast<uint8_t*>(rows.target) + r * rows.target_stride,
                 static_cast<Half*>(rows.scales) + r * rows.scale_stride);
}

template <class V, class S>
constexpr WriteKernels write_kernels() {
  return {write_rows<S>};
}

}  // namespace

const WriteKernels REGARD_TABLE(write)[4] = REGARD_EACH_DTYPE(write_kernels);
