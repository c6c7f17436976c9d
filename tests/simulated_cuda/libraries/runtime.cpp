// The CUDA runtime of devices without hardware: devices, errors and launches. A kernel is recorded and writes nothing.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "device.h"

namespace simulated {

std::recursive_mutex mutex;
thread_local int current_device = 0;

namespace {

constexpr int kMajor = 9, kMinor = 0, kMultiprocessors = 132, kThreadsPerBlock = 1024, kWarp = 32;
constexpr int kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32, kRegisters = 65536;
constexpr int kShared = 49152, kSharedOptin = 232448, kSharedPerMultiprocessor = 233472, kL2Cache = 60 << 20;
constexpr int kGridX = 2147483647, kGridYZ = 65535, kVersion = 13000;
constexpr size_t kMemory = 143771ull << 20;

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

thread_local cudaError_t error_of_thread = cudaSuccess;
thread_local Launch pushed;

// The mangled name of each kernel, by the address of its host stub. Made at first use: other libraries register their
// kernels before the constructors of this one have run.
std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, const char*>();
  return *names;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, cudaStream_t stream) {
  const char* name = "unknown";
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto found = kernel_names().find(kernel);
    if (found != kernel_names().end()) name = found->second;
  }
  bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  unsigned long long threads = (unsigned long long)block.x * block.y * block.z;
  if (empty || threads > kThreadsPerBlock || grid.x > kGridX || grid.y > kGridYZ || grid.z > kGridYZ)
    return fail(cudaErrorInvalidConfiguration, name);
  Stream* queue = find_stream(stream);
  advance(queue);
  record("kernel", name, (long long)grid.x * grid.y * grid.z, queue);
  add_node(queue, name);
  return cudaSuccess;
}

}  // namespace

int device_count() {
  static int count = getenv("SIMULATED_CUDA_DEVICES") ? atoi(getenv("SIMULATED_CUDA_DEVICES")) : 1;
  return count;
}

cudaError_t fail(cudaError_t error, const char* reason) {
  error_of_thread = error;
  record("error", reason, error, nullptr);
  return error;
}

cudaError_t last_error() { return error_of_thread; }
void forget_error() { error_of_thread = cudaSuccess; }

}  // namespace simulated

using namespace simulated;

// --- launches
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                   int*) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  kernel_names()[stub] = name;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(cudaStream_t*)stream = pushed.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = (cudaKernel_t)stub;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch((const void*)kernel, grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->gridDim, config->blockDim, config->stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t,
                                               cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
// The driver of driver.cpp hands over the kernels that Triton compiled.
EXPORT int simulated_launch(const char* name, unsigned x, unsigned y, unsigned z, unsigned threads, void* stream) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    kernel_names().emplace(name, name);
  }
  return launch(name, dim3(x, y, z), dim3(threads), (cudaStream_t)stream);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  record("host-function", "", 0, find_stream(stream));
  if (!find_stream(stream)->capture) function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  record("host-function", "", 0, find_stream(stream));
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->binaryVersion = found->ptxVersion = 10 * kMajor + kMinor;
  found->maxThreadsPerBlock = kThreadsPerBlock;
  found->numRegs = 32;
  found->maxDynamicSharedSizeBytes = kSharedOptin;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int threads, size_t) {
  *count = threads > 0 && threads < kThreadsPerMultiprocessor ? kThreadsPerMultiprocessor / threads : 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* kernel, int threads,
                                                                          size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared);
}
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- devices
EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Simulated H200 %d", device);
  found->uuid.bytes[0] = (char)(device + 1);
  found->pciBusID = device + 1;
  found->major = kMajor;
  found->minor = kMinor;
  found->totalGlobalMem = kMemory;
  found->multiProcessorCount = kMultiprocessors;
  found->warpSize = kWarp;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = kThreadsPerBlock;
  found->maxThreadsDim[2] = 64;
  found->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  found->maxBlocksPerMultiProcessor = kBlocksPerMultiprocessor;
  found->maxGridSize[0] = kGridX;
  found->maxGridSize[1] = found->maxGridSize[2] = kGridYZ;
  found->regsPerBlock = found->regsPerMultiprocessor = kRegisters;
  found->sharedMemPerBlock = kShared;
  found->sharedMemPerBlockOptin = kSharedOptin;
  found->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  found->totalConstMem = 65536;
  found->l2CacheSize = kL2Cache;
  found->memoryBusWidth = 6144;
  found->textureAlignment = 512;
  found->asyncEngineCount = 3;
  found->unifiedAddressing = found->managedMemory = found->concurrentKernels = 1;
  found->cooperativeLaunch = found->memoryPoolsSupported = found->clusterLaunch = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, kMajor},
      {cudaDevAttrComputeCapabilityMinor, kMinor},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrMaxThreadsPerBlock, kThreadsPerBlock},
      {cudaDevAttrMaxThreadsPerMultiProcessor, kThreadsPerMultiprocessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, kBlocksPerMultiprocessor},
      {cudaDevAttrMaxSharedMemoryPerBlock, kShared},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedPerMultiprocessor},
      {cudaDevAttrMaxRegistersPerBlock, kRegisters},
      {cudaDevAttrMaxRegistersPerMultiprocessor, kRegisters},
      {cudaDevAttrWarpSize, kWarp},
      {cudaDevAttrMaxGridDimX, kGridX},
      {cudaDevAttrMaxGridDimY, kGridYZ},
      {cudaDevAttrMaxGridDimZ, kGridYZ},
      {cudaDevAttrMaxBlockDimX, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimY, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrL2CacheSize, kL2Cache},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
      {cudaDevAttrCooperativeLaunch, 1},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = kMemory;
  return cudaSuccess;
}
static int do_nothing() { return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  bool known = strstr(name, "TensorMap");  // torch looks for it once, for matrix products that never run here
  *function = known ? (void*)do_nothing : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- errors
EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = last_error();
  forget_error();
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return last_error(); }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    default: return "simulated CUDA error";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
