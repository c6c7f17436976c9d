// Memory of the simulated devices: it is host memory, so that copies happen at once and Python can compute values in it.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "device.h"

namespace simulated {
namespace {

std::map<uintptr_t, Block> blocks;

const Block* find_block(const void* address) {
  auto next = blocks.upper_bound((uintptr_t)address);
  if (next == blocks.begin()) return nullptr;
  auto found = std::prev(next);
  return (uintptr_t)address < found->first + found->second.bytes ? &found->second : nullptr;
}

cudaError_t allocate(void** address, size_t bytes, bool pinned) {
  *address = nullptr;
  if (!bytes) return cudaSuccess;
  if (!pinned)
    if (auto error = refuse_in_capture("cudaMalloc")) return error;
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  blocks[(uintptr_t)memory] = {bytes, current_device, pinned};
  *address = memory;
  record(pinned ? "allocation-pinned" : "allocation", "", (long long)bytes, nullptr);
  return cudaSuccess;
}

// CUDA waits for all devices before it frees memory.
cudaError_t release(void* address, const char* call) {
  if (!address) return cudaSuccess;
  if (auto error = refuse_in_capture(call)) return error;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end()) return fail(cudaErrorInvalidValue, call);
  record("sync", call, (long long)found->second.bytes, nullptr);
  forget_accesses(address, found->second.bytes);
  munmap(address, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

// A copy from or to pageable memory is not asynchronous, even if the call says so: "copy-pageable".
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool async) {
  if (!bytes) return cudaSuccess;
  Stream* queue = find_stream(stream);
  std::string how = std::string(place_of(from)) + " to " + place_of(to);
  bool pageable = how.find("pageable") != std::string::npos;
  if (!async) {
    if (queue->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaMemcpy");
    if (auto error = refuse_in_capture("cudaMemcpy")) return error;
  }
  advance(queue);
  record(!async ? "sync" : pageable ? "copy-pageable" : "copy", how.c_str(), (long long)bytes, queue);
  add_node(queue, how.c_str());
  memcpy(to, from, bytes);
  // Of host memory, torch's allocator knows when a copy is done: it asks the events of all streams.
  if (!strcmp(place_of(from), "device")) access(from, bytes, false, queue, "a copy");
  if (!strcmp(place_of(to), "device")) access(to, bytes, true, queue, "a copy");
  if (!async) host_knows(queue->device, queue->known);
  return cudaSuccess;
}

}  // namespace

const char* place_of(const void* address) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const Block* block = find_block(address);
  return !block ? "pageable" : block->pinned ? "pinned" : "device";
}

}  // namespace simulated

using namespace simulated;

EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes, false); }
EXPORT cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return allocate(address, bytes, false); }
EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate(address, bytes, true); }
EXPORT cudaError_t cudaFree(void* address) { return release(address, "cudaFree"); }
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return release(address, "cudaFreeAsync"); }
EXPORT cudaError_t cudaFreeHost(void* address) { return release(address, "cudaFreeHost"); }
EXPORT cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  blocks[(uintptr_t)address] = {bytes, current_device, true};
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  blocks.erase((uintptr_t)address);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  memset(found, 0, sizeof *found);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const Block* block = find_block(address);
  found->type = !block ? cudaMemoryTypeUnregistered : block->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = block ? block->device : 0;
  found->devicePointer = block ? (void*)address : nullptr;
  found->hostPointer = block && block->pinned ? (void*)address : nullptr;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, false);
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, true);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, true);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++)
    memcpy((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
  Stream* queue = find_stream(stream);
  advance(queue);
  record("copy", "cudaMemcpy2DAsync", (long long)(width * height), queue);
  add_node(queue, "cudaMemcpy2DAsync");
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  Stream* queue = find_stream(stream);
  advance(queue);
  record("memset", "", (long long)bytes, queue);
  add_node(queue, "memset");
  memset(address, value, bytes);
  access(address, bytes, true, queue, "a memset");
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char scratch[1 << 16];
  *address = scratch;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = (cudaMemPool_t)1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *(unsigned long long*)value = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
