// Lists of integers from Python -> plain structs.
#pragma once
#include <stddef.h>

#include <vector>

#include "passes/write.h"
#include "types.h"

namespace regard {

using Ints = std::vector<int64_t>;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// dtype, bias dtype, bias kind, B, Hq, Hkv, Lq, Lk, D, Dv, four strides each of q, k, v, out and bias, the
// kind of store, four strides each of the scales of K and V, the size of a page and the number of pages.
constexpr size_t kSpecNumbers = 41;
Spec unpack_spec(const int64_t* numbers);

// Each tensor is nine numbers: address, sizes and strides for (b, h, q, k).
std::vector<MaskTensor> unpack_tensors(const Ints& numbers);

// bias, per-head numbers, first distance, distances, sink, offsets, seed, stats, rest
void unpack_extras(const int64_t* numbers, Call& call);

Gradients unpack_gradients(const int64_t* numbers);

// k, addresses of the largest weights and their keys, nats, choices, column mass, addresses and batch stride
// of the rows' weights, histogram, first distance, distances, sets, chosen, mass on them, block, block mass,
// block max, number of rows, rows, their values
constexpr size_t kFactNumbers = 20;
Facts unpack_facts(const int64_t* numbers);

// dtype, kind of store, B, H, table, its stride, page, pages, then for each side its source, four strides,
// target, four strides, scales, four strides and width.
constexpr size_t kWriteNumbers = 8, kSideNumbers = 16;
Write unpack_write(const Ints& numbers);

// The last token of a call over stored keys, which is still to be written: the addresses of its key and value
// (0: none), each with its strides along samples, heads and channels.
constexpr size_t kTokenNumbers = 8;
Write unpack_token(const Spec& spec, const Call& call, const int64_t* numbers);

// dtype, B, Hq, Hkv, L, D, Dv, normalize, four strides each of q, k, v and out
constexpr size_t kLinearSpecNumbers = 24;
LinearSpec unpack_linear_spec(const int64_t* numbers);

// addresses: q, k, v, out, log_decay, beta, lengths, S, z, S_end, z_end, S_kept, z_kept, errors
constexpr size_t kLinearCallNumbers = 14;
LinearCall unpack_linear_call(const int64_t* numbers);

// addresses: dout, dS_end, dz_end, dq, dk, dv, dlog_decay, dbeta, dS, dz; strides of dout, dq, dk, dv
constexpr size_t kLinearGradientNumbers = 26;
LinearGradients unpack_linear_gradients(const int64_t* numbers);

}  // namespace regard
