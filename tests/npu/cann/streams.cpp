// Streams and events of the stand-in: real queues, so that what is not ordered by a stream or an event is not ordered.
#include "device.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"

using Clock = std::chrono::steady_clock;

namespace device {

namespace {

std::mutex error_mutex;
std::string error_message;

}  // namespace

void set_error(const std::string& message) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (error_message.find(message) == std::string::npos) error_message += (error_message.empty() ? "" : "\n") + message;
}

int seconds_from(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

int32_t Stream::next_id() {
  static std::atomic<int32_t> count{0};
  return count++;
}

void Stream::push(std::function<int()> task) {
  enqueue([task = std::move(task)](int error) { return error != 0 ? error : task(); });
}

void Stream::push_always(std::function<void(int error)> task) {
  enqueue([task = std::move(task)](int error) { return task(error), error; });
}

void Stream::enqueue(std::function<int(int error)> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {  // torch_npu makes pools of streams, of which it uses few
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_all();
}

int Stream::synchronize(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto drained = [this] { return tasks_.empty(); };
  if (timeout_ms < 0) {
    changed_.wait(lock, drained);
  } else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), drained)) {
    return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  }
  return error_;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto& task = tasks_.front();  // others are only added behind it
    lock.unlock();
    int error = task(error_);
    lock.lock();
    error_ = error;
    tasks_.pop_front();
    changed_.notify_all();
  }
}

Stream& stream_of(void* handle) {
  static Stream* const default_stream = new Stream;
  return handle != nullptr ? *static_cast<Stream*>(handle) : *default_stream;
}

}  // namespace device

using device::Stream;
using device::stream_of;

namespace {

std::mutex streams_mutex;
std::vector<Stream*> streams;  // never deleted: their threads end with the process

aclError new_stream(aclrtStream* handle) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.push_back(new Stream);
  *handle = streams.back();
  return ACL_SUCCESS;
}

// Each record is one more; a wait is for those that were made before it.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t done = 0;
  int error = 0;
  Clock::time_point time;

  int wait(uint64_t record) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= record; });
    return error;
  }
};

// Tasks refer to an event that its owner may have destroyed already.
using SharedEvent = std::shared_ptr<Event>;

SharedEvent& event_of(aclrtEvent handle) { return *static_cast<SharedEvent*>(handle); }

aclError new_event(aclrtEvent* handle) {
  *handle = new SharedEvent(std::make_shared<Event>());
  return ACL_SUCCESS;
}

bool is_done(aclrtEvent handle) {
  SharedEvent& event = event_of(handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->done >= event->recorded;
}

aclError synchronize_all(int timeout_ms) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    all = streams;
  }
  all.push_back(&stream_of(nullptr));
  for (Stream* stream : all) {
    if (int error = stream->synchronize(timeout_ms)) return error;
  }
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

const char* aclGetRecentErrMsg() {
  thread_local std::string copy;
  std::lock_guard<std::mutex> lock(device::error_mutex);
  copy = device::error_message;
  return copy.c_str();
}

aclError aclrtCreateStream(aclrtStream* stream) { return new_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return new_stream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return stream_of(stream).synchronize(-1); }
aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }  // it always stops on failure
aclError aclrtSynchronizeStream(aclrtStream stream) { return stream_of(stream).synchronize(-1); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return stream_of(stream).synchronize(timeout);
}
aclError aclrtSynchronizeDevice() { return synchronize_all(-1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return synchronize_all(timeout); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = stream_of(stream).idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream).id;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return new_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return new_event(event); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<SharedEvent*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  SharedEvent event = event_of(handle);
  Stream& stream = stream_of(stream_handle);
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = ++event->recorded;
  }
  stream.push_always([event, record](int error) {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->done = record;
    event->error = error;
    event->time = Clock::now();
    event->changed.notify_all();
  });
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  SharedEvent event = event_of(handle);
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = event->recorded;
  }
  stream_of(stream).push([event, record] { return event->wait(record); });
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }  // each record counts by itself

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  SharedEvent event = event_of(handle);
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = event->recorded;
  }
  return event->wait(record);
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = is_done(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  *status = is_done(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = std::chrono::duration<float, std::milli>(event_of(end)->time - event_of(start)->time).count();
  return ACL_SUCCESS;
}

}  // extern "C"
