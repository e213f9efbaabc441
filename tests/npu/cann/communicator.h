// A communicator of the stand-in's HCCL: its ranks, connected by unix sockets, and what they do together.
//
// It is made by all of its ranks at once, and waits until they are there. Its operations run in the order of the stream
// they were put on, and each of them waits for its counterpart on the other ranks. These two rules make the deadlocks of
// HCCL: pairs that are first used in different orders, and operations of a pair in opposite orders. Both sides of an
// operation tell one another what they are about to do, so the second kind is reported at once, and the first after
// HCCL_CONNECT_TIMEOUT seconds.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl.h"

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Kind : uint8_t { kSend, kRecv, kBatch, kAllReduce, kBroadcast, kAllGather, kReduceScatter };

// What a rank tells another one before an operation with it.
struct Announcement {
  Kind kind;
  uint8_t type;
  uint8_t reduction;
  uint8_t root;
  uint64_t count;

  bool operator==(const Announcement& other) const;
  std::string text() const;
};

// Every method throws a Failure when it cannot be done in time, or at all.
class Communicator {
 public:
  Communicator(const std::string& id, uint32_t size, uint32_t rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  const uint32_t size;
  const uint32_t rank;
  std::atomic<int> error{HCCL_SUCCESS};

  // Each rank connects to those before it and is connected to by those after it.
  void connect();

  void send(const void* data, Announcement mine, uint32_t peer);
  void recv(void* data, Announcement mine, uint32_t peer);

  // Sends and receives of a batch do not wait for one another. Those of one pair match in their order.
  void batch(const std::vector<HcclSendRecvItem>& items);

  // Rank 0 gets every rank's input and gives every rank its output. `combine` makes all ranks' outputs, one after
  // another, from all ranks' inputs; the ranks are added up in order, so that the bits are the same everywhere.
  using Combine = std::function<void(std::string& inputs, std::string& outputs)>;
  void collective(
      Announcement mine, const void* input, size_t input_bytes, void* output, size_t output_bytes, Combine combine);

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  std::pair<sockaddr_un, socklen_t> address_of(uint32_t of) const;
  int connect_to(uint32_t peer, Deadline deadline) const;
  void meet(uint32_t peer, Announcement mine, Kind counterpart, Deadline deadline) const;
  Announcement announced_by(uint32_t peer, const Announcement& mine, Deadline deadline) const;
  [[noreturn]] void mismatch(const Announcement& mine, uint32_t peer, const Announcement& theirs) const;
  [[noreturn]] void too_late() const;

  const std::string id_;
  std::vector<int> peers_;  // sockets, by rank
};
