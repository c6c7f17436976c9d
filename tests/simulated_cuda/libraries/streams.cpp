// Streams, events and graphs of the simulated devices. Work is done when it is asked for; the order is only checked.
#include <atomic>
#include <set>

#include "device.h"

namespace simulated {
namespace {

// Made at first use: other libraries may ask for a stream before the constructors of this one have run.
std::set<Stream*>& all_streams() {
  static auto* streams = new std::set<Stream*>();
  return *streams;
}
std::map<int, Stream*>& default_streams() {
  static auto* streams = new std::map<int, Stream*>();
  return *streams;
}
std::map<int, Graph*>& captures() {
  static auto* graphs = new std::map<int, Graph*>();
  return *graphs;
}
std::atomic<int> next_stream{1}, next_capture{1};
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local std::vector<int> begun_here;

Stream* new_stream(int id) {
  auto* stream = new Stream();
  stream->id = id;
  stream->device = current_device;
  all_streams().insert(stream);
  return stream;
}

cudaError_t create(cudaStream_t* stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  *stream = (cudaStream_t)new_stream(next_stream++);
  return cudaSuccess;
}

bool is_under_way(int capture) { return capture && captures().count(capture); }

}  // namespace

// The default stream of device d has the id -d - 1000, which is no id of another stream.
Stream* find_stream(cudaStream_t stream) {
  if (stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return (Stream*)stream;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream*& found = default_streams()[current_device];
  if (!found) found = new_stream(-current_device - 1000);
  return found;
}

std::vector<Stream*> streams_of(int device) {
  std::vector<Stream*> found;
  for (auto* stream : all_streams())
    if (stream->device == device) found.push_back(stream);
  return found;
}

cudaError_t refuse_in_capture(const char* call) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (int capture : begun_here)
    if (is_under_way(capture)) return fail(cudaErrorStreamCaptureUnsupported, call);
  return cudaSuccess;
}

void add_node(Stream* stream, const char* name) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!is_under_way(stream->capture)) return;
  captures()[stream->capture]->nodes.push_back(name);
  if (!stream->begins) stream->unjoined = true;
}

}  // namespace simulated

using namespace simulated;

// --- streams
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return create(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return create(stream); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its number may still be in a clock
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Stream* queue = find_stream(stream);
  if (queue->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  thread_knows(queue->known);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Stream* queue = find_stream(stream);
  if (queue->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  if (auto error = refuse_in_capture("cudaStreamSynchronize")) return error;
  record("sync", "cudaStreamSynchronize", 0, queue);
  host_knows(queue->device, queue->known);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  if (auto error = refuse_in_capture("cudaDeviceSynchronize")) return error;
  record("sync", "cudaDeviceSynchronize", 0, nullptr);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (auto* stream : streams_of(current_device)) host_knows(current_device, stream->known);
  return cudaSuccess;
}

// --- events
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* queue = find_stream(stream);
  *(Event*)event = {queue->capture, queue, queue->known};
  record("event-record", "", 0, queue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (((Event*)event)->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventQuery");
  if (auto error = refuse_in_capture("cudaEventQuery")) return error;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  thread_knows(((Event*)event)->known);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Event* waited = (Event*)event;
  if (waited->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventSynchronize");
  if (auto error = refuse_in_capture("cudaEventSynchronize")) return error;
  if (!waited->stream || host_has_seen(waited->stream->device, waited->known)) return cudaSuccess;  // nothing to wait for
  record("sync", "cudaEventSynchronize", 0, waited->stream);
  host_knows(waited->stream->device, waited->known);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* queue = find_stream(stream);
  Event* waited = (Event*)event;
  if (is_under_way(waited->capture)) {
    if (!queue->capture) {
      queue->capture = waited->capture;
      queue->begins = false;
      queue->unjoined = true;
    } else if (queue->begins && waited->stream != queue) {
      waited->stream->unjoined = false;
    }
  } else if (queue->capture) {
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  merge(queue->known, waited->known);
  record("event-wait", "", 0, queue);
  return cudaSuccess;
}

// --- graphs
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!stream) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  Stream* queue = (Stream*)stream;
  queue->capture = next_capture++;
  queue->begins = true;
  captures()[queue->capture] = new Graph();
  begun_here.push_back(queue->capture);
  record("capture-begin", "", 0, queue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  int capture = ((Stream*)stream)->capture;
  if (!capture) return fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  Graph* captured = captures()[capture];
  captures().erase(capture);
  bool unjoined = false;
  for (auto* other : all_streams()) {
    if (other->capture != capture) continue;
    unjoined |= !other->begins && other->unjoined;
    other->capture = 0;
    other->begins = other->unjoined = false;
  }
  *graph = (cudaGraph_t)captured;
  record("capture-end", "", (long long)captured->nodes.size(), (Stream*)stream);
  return unjoined ? fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture") : cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = find_stream(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* queue = find_stream(stream);
  cudaStreamIsCapturing(stream, status);
  if (id) *id = queue->capture;
  if (graph) *graph = queue->capture ? (cudaGraph_t)captures()[queue->capture] : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Stream* queue = find_stream(stream);
  advance(queue);
  record("graph", "", (long long)((Graph*)executable)->nodes.size(), queue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->nodes.size();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
