// See communicator.h.
#include "communicator.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "device.h"
#include "elements.h"

namespace {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

const char* const kKindNames[] = {
    "a send", "a receive", "a batch", "an all_reduce", "a broadcast", "an all_gather", "a reduce_scatter"};

Deadline after(const char* variable, int otherwise) {
  return Clock::now() + std::chrono::seconds(device::seconds_from(variable, otherwise));
}

Deadline operation_deadline() { return after("HCCL_EXEC_TIMEOUT", 1836); }

bool ready(int fd, short what, Deadline deadline) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd poll_fd{fd, what, 0};
  return poll(&poll_fd, 1, left > 0 ? static_cast<int>(left) : 0) > 0;
}

void write_to(int fd, const void* data, size_t count, Deadline deadline) {
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

void read_from(int fd, void* data, size_t count, Deadline deadline) {
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

Announcement announcement_of(const HcclSendRecvItem& item) {
  return {Kind::kBatch, static_cast<uint8_t>(item.dataType), 0, 0, item.count};
}

}  // namespace

bool Announcement::operator==(const Announcement& other) const {
  return kind == other.kind && type == other.type && reduction == other.reduction && root == other.root &&
         count == other.count;
}

std::string Announcement::text() const {
  return std::string(kKindNames[static_cast<int>(kind)]) + " of " + std::to_string(count) + " elements of type " +
         std::to_string(type);
}

Communicator::Communicator(const std::string& id, uint32_t size, uint32_t rank)
    : size(size), rank(rank), id_(id), peers_(size, -1) {}

Communicator::~Communicator() {
  for (int fd : peers_) {
    if (fd >= 0) close(fd);
  }
}

void Communicator::connect() {
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

void Communicator::send(const void* data, Announcement mine, uint32_t peer) {
  Deadline deadline = operation_deadline();
  meet(peer, mine, Kind::kRecv, deadline);
  write_to(peers_[peer], data, mine.count * size_of(mine.type), deadline);
}

void Communicator::recv(void* data, Announcement mine, uint32_t peer) {
  Deadline deadline = operation_deadline();
  meet(peer, mine, Kind::kSend, deadline);
  read_from(peers_[peer], data, mine.count * size_of(mine.type), deadline);
}

void Communicator::batch(const std::vector<HcclSendRecvItem>& items) {
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

void Communicator::collective(
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

std::pair<sockaddr_un, socklen_t> Communicator::address_of(uint32_t of) const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string name = id_ + "-" + std::to_string(of);  // behind a zero: a name without a file
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

int Communicator::connect_to(uint32_t peer, Deadline deadline) const {
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

// Each side says what it does, and hears what the other does, before data travels.
void Communicator::meet(uint32_t peer, Announcement mine, Kind counterpart, Deadline deadline) const {
  write_to(peers_[peer], &mine, sizeof(mine), deadline);
  Announcement theirs = announced_by(peer, mine, deadline);
  Announcement expected = mine;
  expected.kind = counterpart;
  if (!(theirs == expected)) mismatch(mine, peer, theirs);
}

Announcement Communicator::announced_by(uint32_t peer, const Announcement& mine, Deadline deadline) const {
  if (!ready(peers_[peer], POLLIN, deadline)) {
    throw Failure(
        "rank " + std::to_string(rank) + " waited HCCL_EXEC_TIMEOUT for the other side of " + mine.text() +
        " with rank " + std::to_string(peer) + " of a communicator of " + std::to_string(size));
  }
  Announcement theirs{};
  read_from(peers_[peer], &theirs, sizeof(theirs), deadline);
  return theirs;
}

void Communicator::mismatch(const Announcement& mine, uint32_t peer, const Announcement& theirs) const {
  throw Failure(
      "deadlock: in a communicator of " + std::to_string(size) + ", rank " + std::to_string(rank) + " is at " +
      mine.text() + " with rank " + std::to_string(peer) + ", which is at " + theirs.text() +
      ": operations of a pair are in different orders on its two sides, or do not match");
}

void Communicator::too_late() const {
  std::string missing;
  for (uint32_t peer = 0; peer < size; ++peer) {
    if (peer != rank && peers_[peer] < 0) missing += " " + std::to_string(peer);
  }
  throw Failure(
      "deadlock: rank " + std::to_string(rank) + " waited HCCL_CONNECT_TIMEOUT for rank" + missing +
      " to make a communicator of " + std::to_string(size) +
      " with it: its first use comes in different orders on its ranks, or some never use it");
}
