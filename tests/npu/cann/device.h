// What the parts of the stand-in share: streams that run tasks in order, and the text of the last error.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace device {

// An in-order queue with a thread of its own. A task returns an ACL error, 0 for none. After an error the stream does
// nothing more, and whoever waits for it, or for an event recorded on it, gets the error.
class Stream {
 public:
  void push(std::function<int()> task);
  void push_always(std::function<void(int error)> task);  // runs after an error too, and is told it
  int synchronize(int timeout_ms);  // timeout_ms < 0: no limit
  bool idle();
  const int32_t id = next_id();

 private:
  static int32_t next_id();
  void enqueue(std::function<int(int error)> task);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<int(int error)>> tasks_;  // the one that runs stays in front
  bool started_ = false;
  int error_ = 0;
};

Stream& stream_of(void* handle);  // a null handle is the default stream

// Adds to what aclGetRecentErrMsg gives to every thread: each of them may be the one that has to know.
void set_error(const std::string& message);

// A limit in seconds from the environment, as HCCL_CONNECT_TIMEOUT.
int seconds_from(const char* variable, int otherwise);

}  // namespace device
