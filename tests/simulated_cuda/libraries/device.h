// The state of the simulated devices, which the source files of the CUDA runtime share.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

// A library that torch loads exports only what CUDA's own library exports, and the functions of record.cpp.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated {

// For each stream, the number of its last operation that is known to be done.
using Clock = std::map<int, long>;

struct Stream {
  int id = 0;
  int device = 0;
  int capture = 0;         // number of the capture that the stream takes part in, 0 for none
  bool begins = false;     // whether the capture began on this stream
  bool unjoined = false;   // whether the capture has work here that its first stream does not wait for
  long operations = 0;
  Clock known;             // what is done before the next operation of this stream starts
};

struct Event {
  int capture = 0;
  Stream* stream = nullptr;
  Clock known;
};

struct Graph {
  std::vector<std::string> nodes;
};

struct Block {
  size_t bytes;
  int device;
  bool pinned;
};

extern std::recursive_mutex mutex;
extern thread_local int current_device;

int device_count();
cudaError_t fail(cudaError_t error, const char* reason);
void forget_error();
cudaError_t last_error();

// streams.cpp
Stream* find_stream(cudaStream_t stream);
// Fails while this thread captures a graph in a mode that forbids the call.
cudaError_t refuse_in_capture(const char* call);
void add_node(Stream* stream, const char* name);
std::vector<Stream*> streams_of(int device);

// memory.cpp
const char* place_of(const void* address);

// record.cpp
void record(const char* kind, const char* detail, long long bytes, Stream* stream);
// Number an operation of a stream: whatever the stream or the host has waited for is done before it.
void advance(Stream* stream);
void merge(Clock& into, const Clock& other);
// The host has waited, so that all threads may use what is done; or this thread has seen that it is done. Then threads
// that run operators on its device may use it, such as those of autograd, but not all: NCCL's sees the end of everything.
void host_knows(int device, const Clock& known);
void thread_knows(const Clock& known);
// Whether the host has waited for all of this, or for later work.
bool host_has_seen(int device, const Clock& known);
void access(const void* address, size_t bytes, bool writes, Stream* stream, const char* what);
void forget_accesses(const void* address, size_t bytes);

}  // namespace simulated
