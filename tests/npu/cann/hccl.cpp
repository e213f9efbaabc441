// HCCL of the stand-in, over unix sockets between processes.
//
// A communicator is made by all of its ranks at once, and waits until they are there. Its operations run in the order of
// the stream they were put on, and each of them waits for its counterpart on the other ranks. These two rules make the
// deadlocks of HCCL: pairs that are first used in different orders, and operations of a pair in opposite orders. Both
// sides of an operation tell one another what they are about to do, so the second kind is reported at once, and the
// first after HCCL_CONNECT_TIMEOUT seconds.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "acl/error_codes/rt_error_codes.h"
#include "device.h"
#include "elements.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Deadline after(const char* variable, int otherwise) {
  return Clock::now() + std::chrono::seconds(device::seconds_from(variable, otherwise));
}

Deadline operation_deadline() { return after("HCCL_EXEC_TIMEOUT", 1836); }

bool ready(int fd, short what, Deadline deadline) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd poll_fd{fd, what, 0};
  return poll(&poll_fd, 1, left > 0 ? static_cast<int>(left) : 0) > 0;
}

enum class Kind : uint8_t { kSend, kRecv, kBatch, kAllReduce, kBroadcast, kAllGather, kReduceScatter };
const char* const kKindNames[] = {
    "a send", "a receive", "a batch", "an all_reduce", "a broadcast", "an all_gather", "a reduce_scatter"};

// What a rank tells another one before an operation with it.
struct Announcement {
  Kind kind;
  uint8_t type;
  uint8_t reduction;
  uint8_t root;
  uint64_t count;

  bool operator==(const Announcement& other) const {
    return kind == other.kind && type == other.type && reduction == other.reduction && root == other.root &&
           count == other.count;
  }
  std::string text() const {
    return std::string(kKindNames[static_cast<int>(kind)]) + " of " + std::to_string(count) + " elements of type " +
           std::to_string(type);
  }
};

class Communicator {
 public:
  Communicator(const std::string& id, uint32_t size, uint32_t rank) : size(size), rank(rank), id_(id), peers_(size, -1) {}
  ~Communicator() {
    for (int fd : peers_) {
      if (fd >= 0) close(fd);
    }
  }

  const uint32_t size;
  const uint32_t rank;
  std::atomic<int> error{HCCL_SUCCESS};

  // Each rank connects to those before it and is connected to by those after it.
  void connect() {
    Deadline deadline = after("HCCL_CONNECT_TIMEOUT", 120);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    auto [address, length] = address_of(rank);
    bool listens = bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                   listen(listener, static_cast<int>(size)) == 0;
    if (!listens) throw Failure("rank " + std::to_string(rank) + " is there twice in one communicator");
    for (uint32_t peer = 0; peer < rank; ++peer) peers_[peer] = connect_to(peer, deadline);
    for (uint32_t missing = size - 1 - rank; missing > 0; --missing) {
      if (!ready(listener, POLLIN, deadline)) too_late();
      int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      uint32_t peer = 0;
      read_from(fd, &peer, sizeof(peer), deadline);
      peers_[peer] = fd;
    }
    close(listener);
    // A rank that is connected to has yet to see that: nobody goes on before all are there.
    char there = 1;
    for (uint32_t peer = 0; peer < size; ++peer) {
      if (peer != rank) write_to(peers_[peer], &there, 1, deadline);
    }
    for (uint32_t peer = 0; peer < size; ++peer) {
      if (peer != rank && !ready(peers_[peer], POLLIN, deadline)) too_late();
      if (peer != rank) read_from(peers_[peer], &there, 1, deadline);
    }
  }

  void send(const void* data, Announcement mine, uint32_t peer) {
    Deadline deadline = operation_deadline();
    meet(peer, mine, Kind::kRecv, deadline);
    write_to(peers_[peer], data, mine.count * size_of(mine.type), deadline);
  }

  void recv(void* data, Announcement mine, uint32_t peer) {
    Deadline deadline = operation_deadline();
    meet(peer, mine, Kind::kSend, deadline);
    read_from(peers_[peer], data, mine.count * size_of(mine.type), deadline);
  }

  // Sends and receives of a batch do not wait for one another. Those of one pair match in their order.
  void batch(const std::vector<HcclSendRecvItem>& items) {
    Deadline deadline = operation_deadline();
    std::string failure;
    std::thread sender([&] {
      try {
        for (const HcclSendRecvItem& item : items) {
          if (item.sendRecvType != HCCL_SEND) continue;
          Announcement mine = announcement_of(item);
          write_to(peers_[item.remoteRank], &mine, sizeof(mine), deadline);
          write_to(peers_[item.remoteRank], item.buf, mine.count * size_of(mine.type), deadline);
        }
      } catch (const Failure& error) {
        failure = error.what();
      }
    });
    try {
      for (const HcclSendRecvItem& item : items) {
        if (item.sendRecvType != HCCL_RECV) continue;
        Announcement mine = announcement_of(item);
        Announcement theirs = announced_by(item.remoteRank, mine, deadline);
        if (!(theirs == mine)) mismatch(mine, item.remoteRank, theirs);
        read_from(peers_[item.remoteRank], item.buf, mine.count * size_of(mine.type), deadline);
      }
    } catch (const Failure& error) {
      sender.join();
      throw;
    }
    sender.join();
    if (!failure.empty()) throw Failure(failure);
  }

  // Rank 0 gets every rank's input and gives every rank its output. `combine` makes all ranks' outputs, one after
  // another, from all ranks' inputs; the ranks are added up in order, so that the bits are the same everywhere.
  template <typename Combine>
  void collective(
      Announcement mine, const void* input, size_t input_bytes, void* output, size_t output_bytes, Combine combine) {
    Deadline deadline = operation_deadline();
    if (rank != 0) {
      write_to(peers_[0], &mine, sizeof(mine), deadline);
      Announcement theirs = announced_by(0, mine, deadline);
      if (!(theirs == mine)) mismatch(mine, 0, theirs);
      write_to(peers_[0], input, input_bytes, deadline);
      read_from(peers_[0], output, output_bytes, deadline);
      return;
    }
    for (uint32_t peer = 1; peer < size; ++peer) write_to(peers_[peer], &mine, sizeof(mine), deadline);
    std::string inputs(static_cast<const char*>(input), input_bytes);
    inputs.resize(size * input_bytes);
    for (uint32_t peer = 1; peer < size; ++peer) {
      Announcement theirs = announced_by(peer, mine, deadline);
      if (!(theirs == mine)) mismatch(mine, peer, theirs);
      read_from(peers_[peer], &inputs[peer * input_bytes], input_bytes, deadline);
    }
    std::string outputs(size * output_bytes, '\0');
    combine(inputs, outputs);
    std::memcpy(output, outputs.data(), output_bytes);
    for (uint32_t peer = 1; peer < size; ++peer) {
      write_to(peers_[peer], &outputs[peer * output_bytes], output_bytes, deadline);
    }
  }

 private:
  std::pair<sockaddr_un, socklen_t> address_of(uint32_t of) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::string name = id_ + "-" + std::to_string(of);  // behind a zero: a name without a file
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
  }

  int connect_to(uint32_t peer, Deadline deadline) const {
    auto [address, length] = address_of(peer);
    while (Clock::now() < deadline) {
      int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) == 0) {
        write_to(fd, &rank, sizeof(rank), deadline);
        return fd;
      }
      close(fd);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    too_late();
  }

  static Announcement announcement_of(const HcclSendRecvItem& item) {
    return {Kind::kBatch, static_cast<uint8_t>(item.dataType), 0, 0, item.count};
  }

  // Each side says what it does, and hears what the other does, before data travels.
  void meet(uint32_t peer, Announcement mine, Kind counterpart, Deadline deadline) const {
    write_to(peers_[peer], &mine, sizeof(mine), deadline);
    Announcement theirs = announced_by(peer, mine, deadline);
    Announcement expected = mine;
    expected.kind = counterpart;
    if (!(theirs == expected)) mismatch(mine, peer, theirs);
  }

  Announcement announced_by(uint32_t peer, const Announcement& mine, Deadline deadline) const {
    if (!ready(peers_[peer], POLLIN, deadline)) {
      throw Failure(
          "rank " + std::to_string(rank) + " waited HCCL_EXEC_TIMEOUT for the other side of " + mine.text() +
          " with rank " + std::to_string(peer) + " of a communicator of " + std::to_string(size));
    }
    Announcement theirs{};
    read_from(peers_[peer], &theirs, sizeof(theirs), deadline);
    return theirs;
  }

  [[noreturn]] void mismatch(const Announcement& mine, uint32_t peer, const Announcement& theirs) const {
    throw Failure(
        "deadlock: in a communicator of " + std::to_string(size) + ", rank " + std::to_string(rank) + " is at " +
        mine.text() + " with rank " + std::to_string(peer) + ", which is at " + theirs.text() +
        ": operations of a pair are in different orders on its two sides, or do not match");
  }

  [[noreturn]] void too_late() const {
    std::string missing;
    for (uint32_t peer = 0; peer < size; ++peer) {
      if (peer != rank && peers_[peer] < 0) missing += " " + std::to_string(peer);
    }
    throw Failure(
        "deadlock: rank " + std::to_string(rank) + " waited HCCL_CONNECT_TIMEOUT for rank" + missing +
        " to make a communicator of " + std::to_string(size) +
        " with it: its first use comes in different orders on its ranks, or some never use it");
  }

  static void write_to(int fd, const void* data, size_t count, Deadline deadline) {
    auto from = static_cast<const char*>(data);
    while (count > 0) {
      if (!ready(fd, POLLOUT, deadline)) throw Failure("a peer stopped reading");
      ssize_t written = ::send(fd, from, count, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (written <= 0) throw Failure("a peer is gone");
      from += written;
      count -= static_cast<size_t>(written);
    }
  }

  static void read_from(int fd, void* data, size_t count, Deadline deadline) {
    auto to = static_cast<char*>(data);
    while (count > 0) {
      if (!ready(fd, POLLIN, deadline)) throw Failure("a peer stopped writing");
      ssize_t got = ::recv(fd, to, count, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) throw Failure("a peer is gone");
      to += got;
      count -= static_cast<size_t>(got);
    }
  }

  const std::string id_;
  std::vector<int> peers_;  // sockets, by rank
};

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
