// Elements of HCCL's types: their sizes, and their reductions in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "third_party/hccl/inc/hccl/hccl_types.h"

inline size_t size_of(int type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 1;
  }
}

// bfloat16 as arithmetic needs it: widened, and rounded to nearest even.
struct BFloat16 {
  uint16_t bits;

  BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof(wide));
    bits = value != value ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};

template <typename T>
T reduced(HcclReduceOp op, T a, T b) {
  switch (op) {
    case HCCL_REDUCE_PROD:
      return static_cast<T>(a * b);
    case HCCL_REDUCE_MAX:
      return std::max(a, b);
    case HCCL_REDUCE_MIN:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <typename T, typename Wide = T>
void reduce_as(HcclReduceOp op, void* data, uint32_t ranks, uint64_t count) {
  T* total = static_cast<T*>(data);
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    const T* part = total + rank * count;
    for (uint64_t i = 0; i < count; ++i) total[i] = T(reduced<Wide>(op, Wide(total[i]), Wide(part[i])));
  }
}

// float64 is not among them, nor are unsigned types.
inline bool can_reduce(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16:
      return true;
    default:
      return false;
  }
}

// `data` holds `count` elements of each rank; the first rank's become the reduction of all, in the order of ranks.
inline void reduce(HcclDataType type, HcclReduceOp op, void* data, uint32_t ranks, uint64_t count) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<int8_t>(op, data, ranks, count);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<int16_t>(op, data, ranks, count);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<int32_t>(op, data, ranks, count);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<int64_t>(op, data, ranks, count);
    case HCCL_DATA_TYPE_FP16:
      return reduce_as<_Float16, float>(op, data, ranks, count);
    case HCCL_DATA_TYPE_BFP16:
      return reduce_as<BFloat16, float>(op, data, ranks, count);
    default:
      return reduce_as<float>(op, data, ranks, count);
  }
}
