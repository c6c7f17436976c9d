// What the host asked of the devices, and which operations touch one memory without an order between their streams.
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "device.h"

namespace simulated {
namespace {

struct Record {
  long thread;
  std::string kind, detail, place;
  long long bytes;
  int stream, device, capture;
};

struct Access {
  int stream;
  long operation;
  std::string what;
};

// The accesses to the memory from an address to `end`: the last write, and the last read of each stream since.
struct Range {
  uintptr_t end;
  Access write{0, 0, ""};  // operation 0: nobody has written
  std::map<int, Access> reads;
};

std::mutex records_mutex;
std::vector<Record> records;
std::atomic<bool> recording{false};
std::atomic<bool> watching{false};
thread_local std::string place;  // the operator and the lines of Python that run in this thread
thread_local Stream* in_use = nullptr;  // the stream of the last operation that this operator has asked for
thread_local bool runs_operators = false;
std::map<int, Clock> known_to_host;      // by device
std::map<int, Clock> seen_by_operators;  // by device
std::map<uintptr_t, Range> ranges;

// Make `at` a border between two ranges.
void split(uintptr_t at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return;
  auto found = std::prev(next);
  if (found->first == at || found->second.end <= at) return;
  Range right = found->second;
  found->second.end = at;
  ranges.emplace(at, std::move(right));
}

void require_order(const Access& before, const Access& now, Stream* stream, const char* kind) {
  if (!before.operation || before.stream == now.stream) return;
  auto known = stream->known.find(before.stream);
  if (known != stream->known.end() && known->second >= before.operation) return;
  std::string text = now.what + " on stream " + std::to_string(now.stream) + " does not wait for " + before.what +
                     " on stream " + std::to_string(before.stream);
  record(kind, text.c_str(), 0, stream);
}

}  // namespace

void record(const char* kind, const char* detail, long long bytes, Stream* stream) {
  if (!recording) return;
  std::lock_guard<std::mutex> lock(records_mutex);
  records.push_back({(long)pthread_self(), kind, detail, place, bytes, stream ? stream->id : -1,
                     stream ? stream->device : current_device, stream ? stream->capture : 0});
}

void merge(Clock& into, const Clock& other) {
  for (auto& [stream, operation] : other) {
    long& known = into[stream];
    if (operation > known) known = operation;
  }
}

void advance(Stream* stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  merge(stream->known, known_to_host[stream->device]);
  merge(stream->known, seen_by_operators[stream->device]);
  stream->known[stream->id] = ++stream->operations;
  in_use = stream;
}

void host_knows(int device, const Clock& known) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  merge(known_to_host[device], known);
}

void thread_knows(const Clock& known) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (runs_operators) merge(seen_by_operators[current_device], known);
}

bool host_has_seen(int device, const Clock& known) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Clock seen = known_to_host[device];
  for (auto& [stream, operation] : known)
    if (seen[stream] < operation) return false;
  return true;
}

void access(const void* address, size_t bytes, bool writes, Stream* stream, const char* what) {
  if (!watching || !bytes || stream->capture) return;  // a captured operation does not run
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uintptr_t begin = (uintptr_t)address, end = begin + bytes;
  Access now{stream->id, stream->operations, std::string(what) + " (" + place + ")"};
  split(begin);
  split(end);
  for (uintptr_t at = begin; at < end;) {
    auto found = ranges.lower_bound(at);
    if (found == ranges.end() || found->first > at) {  // nobody has touched this memory
      uintptr_t border = found == ranges.end() ? end : std::min(end, found->first);
      found = ranges.emplace(at, Range{border}).first;
    }
    Range& range = found->second;
    require_order(range.write, now, stream, "race");
    if (writes) {
      for (auto& [_, read] : range.reads) require_order(read, now, stream, "race");
      range.reads.clear();
      range.write = now;
    } else {
      range.reads[now.stream] = now;
    }
    at = range.end;
  }
}

void forget_accesses(const void* address, size_t bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uintptr_t begin = (uintptr_t)address;
  split(begin);
  split(begin + bytes);
  ranges.erase(ranges.lower_bound(begin), ranges.lower_bound(begin + bytes));
}

}  // namespace simulated

using namespace simulated;

// Name the operator and the lines of Python that run in this thread from now on.
EXPORT void simulated_set_place(const char* text) {
  place = text;
  in_use = nullptr;
  runs_operators = true;
}

EXPORT void simulated_record(int on) { recording = on != 0; }

// Start or stop the search for accesses without an order. Accesses before the start are forgotten.
EXPORT void simulated_watch_streams(int on) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  ranges.clear();
  watching = on != 0;
}

// Write all records to a file, one line each with its fields separated by tabs, and forget them.
EXPORT void simulated_write_records(const char* path) {
  std::lock_guard<std::mutex> lock(records_mutex);
  FILE* file = fopen(path, "w");
  for (auto& r : records)
    fprintf(file, "%ld\t%s\t%s\t%lld\t%d\t%d\t%d\t%s\n", r.thread, r.kind.c_str(), r.detail.c_str(), r.bytes, r.stream,
            r.device, r.capture, r.place.c_str());
  fclose(file);
  records.clear();
}

// For nccl.cpp and for operators whose values Python computes: one more operation of a stream, and what it touches.
EXPORT void simulated_operation(const char* kind, const char* detail, long long bytes, void* stream) {
  Stream* queue = find_stream((cudaStream_t)stream);
  advance(queue);
  record(kind, detail, bytes, queue);
  add_node(queue, detail);
}

EXPORT void simulated_access(const void* address, size_t bytes, int writes, void* stream, const char* what) {
  Stream* queue = find_stream((cudaStream_t)stream);
  if (in_use != queue) advance(queue);  // the operator ran in a stub such as cuBLAS, which asks for nothing
  access(address, bytes, writes != 0, queue, what);
}
