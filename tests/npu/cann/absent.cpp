// What libtorch_npu has to find to be loaded, and the stand-in does not have. The kernels of CANN are among it: whoever
// asks for one gets an error, never a wrong result. Callers pass arguments, which nothing here looks at, so the headers
// that declare them are left out.
#include <cstdint>
#include <string>

#include "device.h"

namespace {

constexpr int kNotSupported = 207000;  // ACL_ERROR_RT_FEATURE_NOT_SUPPORT

int refuse(const std::string& what) {
  device::set_error("the stand-in for CANN has no " + what);
  return kNotSupported;
}

}  // namespace

#define REFUSED(name) \
  int name() { return refuse(#name); }
#define NOTHING(name) \
  void* name() { return nullptr; }
#define IGNORED(name) \
  int name() { return 0; }

extern "C" {

int aclopCompileAndExecute(const char* type) { return refuse(std::string("kernels, and was asked for ") + type); }

// What kernels are given.
NOTHING(aclCreateDataBuffer)
NOTHING(aclCreateTensorDesc)
NOTHING(aclopCreateAttr)
IGNORED(aclDestroyDataBuffer)
IGNORED(aclDestroyTensorDesc)
IGNORED(aclopDestroyAttr)
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)
IGNORED(aclSetTensorDescName)
IGNORED(aclSetTensorFormat)
IGNORED(aclSetTensorPlaceMent)
IGNORED(aclSetTensorShape)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)

// Settings of kernels.
IGNORED(aclSetCompileopt)
IGNORED(aclrtSetDeviceSatMode)
IGNORED(aclrtSetOpExecuteTimeOut)
IGNORED(aclrtSetOpWaitTimeout)

// Logs, profiles and dumps go nowhere.
IGNORED(aclAppLog)
IGNORED(aclmdlFinalizeDump)
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)
IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)

// Hand-written kernels, virtual and shared memory, and host functions in streams.
REFUSED(aclGetDeviceCapability)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtDeviceEnablePeerAccess)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtProcessReport)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)

}  // extern "C"
