// The CUDA driver, as far as Triton's launcher and torch call it. Kernels that Triton compiled are only recorded.
#include <cuda.h>

#include <cstring>

#undef cuDeviceGetAttribute

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int simulated_launch(const char*, unsigned, unsigned, unsigned, unsigned, void*) __attribute__((weak));
extern "C" int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
extern "C" int cudaGetDevice(int*) __attribute__((weak));
extern "C" int cudaGetDeviceCount(int*) __attribute__((weak));

static CUcontext context() {
  static int marker;
  return (CUcontext)&marker;
}

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
EXPORT CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
// The runtime numbers attributes as the driver does.
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (int)attribute, device);
}
EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  strncpy(name, "Simulated H200", length);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) {
  *found = context();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext*) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { return (CUresult)cudaGetDevice(device); }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "simulated CUDA driver error";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
EXPORT CUresult cuGetProcAddress_v2(const char*, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  *function = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

// A module is any address, and a function is its own name.
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = (CUmodule)context();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                       const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr address) {
  *(CUdeviceptr*)value = address;  // Triton asks for the address on the device
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                               unsigned threads_y, unsigned threads_z, unsigned, CUstream stream, void**, void**) {
  return (CUresult)simulated_launch((const char*)function, x, y, z, threads_x * threads_y * threads_z, stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, 0, config->hStream, nullptr, nullptr);
}
