// HCCL of the stand-in: operations of communicators, put on streams. `communicator.h` says how they behave.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "acl/error_codes/rt_error_codes.h"
#include "communicator.h"
#include "device.h"
#include "elements.h"

namespace {

// The handle that torch_npu has; operations underway keep the communicator alive.
using Handle = std::shared_ptr<Communicator>;

Handle& comm_of(HcclComm comm) { return *static_cast<Handle*>(comm); }

HcclResult refuse(const std::string& why) {
  device::set_error("HCCL (stand-in): " + why);
  return HCCL_E_NOT_SUPPORT;
}

// Runs `operation(communicator)` on the stream. Where it fails the communicator has failed, and so has the stream.
template <typename Operation>
HcclResult enqueue(HcclComm handle, aclrtStream stream, Operation operation) {
  Handle comm = comm_of(handle);
  device::stream_of(stream).push([comm, operation] {
    try {
      operation(*comm);
      return 0;
    } catch (const Failure& failure) {
      device::set_error(std::string("HCCL (stand-in): ") + failure.what());
      fprintf(stderr, "HCCL (stand-in): %s\n", failure.what());
      comm->error = HCCL_E_TIMEOUT;
      return static_cast<int>(ACL_ERROR_RT_TASK_TIMEOUT);
    }
  });
  return HCCL_SUCCESS;
}

Announcement announce(Kind kind, HcclDataType type, uint64_t count, int reduction = 0, uint32_t root = 0) {
  return {kind, static_cast<uint8_t>(type), static_cast<uint8_t>(reduction), static_cast<uint8_t>(root), count};
}

HcclResult check_reduction(HcclDataType type) {
  return can_reduce(type) ? HCCL_SUCCESS : refuse("no reduction of elements of type " + std::to_string(type));
}

}  // namespace

extern "C" {

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> count{0};
  std::memset(info, 0, sizeof(*info));
  snprintf(info->internal, sizeof(info->internal), "hccl-stand-in-%d-%d", getpid(), count++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(
    uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*, HcclComm* handle) {
  auto comm = std::make_shared<Communicator>(info->internal, size, rank);
  try {
    comm->connect();
  } catch (const Failure& failure) {
    device::set_error(std::string("HCCL (stand-in): ") + failure.what());
    return HCCL_E_TIMEOUT;
  }
  *handle = new Handle(comm);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* handle) {
  return HcclCommInitRootInfoConfig(size, info, rank, nullptr, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  delete static_cast<Handle*>(handle);
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  *error = static_cast<HcclResult>(comm_of(handle)->error.load());
  return HCCL_SUCCESS;
}

HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  Announcement mine = announce(Kind::kSend, type, count);
  return enqueue(comm, stream, [=](Communicator& c) { c.send(data, mine, peer); });
}

HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
  Announcement mine = announce(Kind::kRecv, type, count);
  return enqueue(comm, stream, [=](Communicator& c) { c.recv(data, mine, peer); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<HcclSendRecvItem> all(items, items + count);
  return enqueue(comm, stream, [=](Communicator& c) { c.batch(all); });
}

HcclResult HcclAllReduce(
    void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  if (HcclResult error = check_reduction(type)) return error;
  size_t bytes = count * size_of(type);
  return enqueue(comm, stream, [=](Communicator& c) {
    c.collective(announce(Kind::kAllReduce, type, count, op), input, bytes, output, bytes, [&](auto& in, auto& out) {
      reduce(type, op, &in[0], c.size, count);
      for (uint32_t rank = 0; rank < c.size; ++rank) std::memcpy(&out[rank * bytes], in.data(), bytes);
    });
  });
}

HcclResult HcclReduceScatter(
    void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  if (HcclResult error = check_reduction(type)) return error;
  size_t bytes = count * size_of(type);
  return enqueue(comm, stream, [=](Communicator& c) {
    Announcement mine = announce(Kind::kReduceScatter, type, count, op);
    c.collective(mine, input, c.size * bytes, output, bytes, [&](auto& in, auto& out) {
      reduce(type, op, &in[0], c.size, c.size * count);
      std::memcpy(&out[0], in.data(), c.size * bytes);
    });
  });
}

HcclResult HcclAllGather(
    void* input, void* output, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  size_t bytes = count * size_of(type);
  return enqueue(comm, stream, [=](Communicator& c) {
    Announcement mine = announce(Kind::kAllGather, type, count);
    c.collective(mine, input, bytes, output, c.size * bytes, [&](auto& in, auto& out) {
      for (uint32_t rank = 0; rank < c.size; ++rank) std::memcpy(&out[rank * in.size()], in.data(), in.size());
    });
  });
}

HcclResult HcclBroadcast(
    void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  size_t bytes = count * size_of(type);
  return enqueue(comm, stream, [=](Communicator& c) {
    Announcement mine = announce(Kind::kBroadcast, type, count, 0, root);
    c.collective(mine, data, bytes, data, bytes, [&](auto& in, auto& out) {
      for (uint32_t rank = 0; rank < c.size; ++rank) std::memcpy(&out[rank * bytes], &in[root * bytes], bytes);
    });
  });
}

}  // extern "C"
