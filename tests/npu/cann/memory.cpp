// Devices and memory of the stand-in: device memory is host memory.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"
#include "device.h"

namespace {

constexpr uint32_t kDevices = 8;
constexpr size_t kMemory = size_t{32} << 30;

thread_local int32_t current_device = -1;
char contexts[kDevices];  // a context is the address of its device's place here

std::mutex options_mutex;
std::map<int, int64_t> options;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // start and size

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + size;
}

uint32_t visible_devices() {
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (visible == nullptr) return kDevices;
  uint32_t count = *visible != '\0';
  for (const char* at = visible; *at != '\0'; ++at) count += *at == ',';
  return count;
}

// Fresh memory is all ones, NaN in every floating point type: what reads it before it is written comes to light.
aclError allocate(void** pointer, size_t size) {
  if (posix_memalign(pointer, 512, size) != 0) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::memset(*pointer, 0xff, size);
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclrtGetSocName() { return "Ascend910B1"; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = visible_devices();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= static_cast<int32_t>(visible_devices())) {
    device::set_error("stand-in for CANN: there is no device " + std::to_string(device));
    return ACL_ERROR_RT_INVALID_DEVICEID;
  }
  current_device = device;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current_device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[current_device];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int32_t>(static_cast<char*>(context) - contexts);
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  *flags = 0;
  *active = device == current_device;
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
  *can_access = 0;
  return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  *value = options[option];
  return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  options[option] = value;
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* available, size_t* total) {
  *available = *total = kMemory;
  return ACL_SUCCESS;
}

aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size); }
aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size); }

aclError aclrtFree(void* pointer) {
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** pointer, size_t size) {
  if (aclError error = allocate(pointer, size)) return error;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[static_cast<const char*>(*pointer)] = size;
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t count, aclrtMemcpyKind) {
  if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
  std::memcpy(to, from, count);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void* to, size_t room, const void* from, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
  if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE && !is_pinned(from)) {  // pageable memory is read before the call returns
    auto staged = std::make_shared<std::string>(static_cast<const char*>(from), count);
    device::stream_of(stream).push([=] { return std::memcpy(to, staged->data(), count), 0; });
  } else {
    device::stream_of(stream).push([=] { return std::memcpy(to, from, count), 0; });
  }
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* pointer, size_t room, int32_t value, size_t count) {
  if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
  std::memset(pointer, value, count);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* pointer, size_t room, int32_t value, size_t count, aclrtStream stream) {
  if (count > room) return ACL_ERROR_RT_PARAM_INVALID;
  device::stream_of(stream).push([=] { return std::memset(pointer, value, count), 0; });
  return ACL_SUCCESS;
}

}  // extern "C"
