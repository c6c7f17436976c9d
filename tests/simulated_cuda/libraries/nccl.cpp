// NCCL between threads of one process. Memory of the simulated devices is host memory, so a collective is a meeting of
// the ranks and a copy. The calls of a rank go to its stream, where they are recorded and checked like kernels.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// The numbers of nccl.h.
enum Result { kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6 };
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16, kFloat8, kFloat8e5 };
enum Operation { kSum, kProduct, kMaximum, kMinimum, kAverage };
struct UniqueId {
  char bytes[128];
};

extern "C" void simulated_operation(const char* kind, const char* detail, long long bytes, void* stream);
extern "C" void simulated_access(const void* address, size_t bytes, int writes, void* stream, const char* what);

namespace {

using Message = std::vector<char>;
using Inputs = std::vector<std::shared_ptr<Message>>;

// All ranks of a communicator.
struct World {
  int size = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<Message>> mail;  // by sender and receiver
  std::map<long, Inputs> meetings;                          // by the number of the collective
  std::map<long, int> present;                              // how many ranks have still to leave
};

struct Communicator {
  std::shared_ptr<World> world;
  int rank;
  long collectives = 0;
};

struct Transfer {
  Communicator* communicator;
  bool sends;
  char* address;
  size_t bytes;
  int peer;
  void* stream;
};

std::mutex worlds_mutex;
std::map<std::string, std::shared_ptr<World>> worlds;
std::atomic<int> next_id{1};
thread_local int open_groups = 0;
thread_local std::vector<Transfer> waiting;
thread_local std::string error_text;

std::chrono::seconds patience() {
  const char* seconds = getenv("SIMULATED_NCCL_SECONDS");
  return std::chrono::seconds(seconds ? atoi(seconds) : 60);
}

size_t width_of(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

Result fail(Result result, const std::string& text) {
  error_text = text;
  fprintf(stderr, "simulated NCCL: %s\n", text.c_str());
  return result;
}

float from_bfloat16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;    // to the nearest, ties to even
}

template <class Wide>
Wide combine(Wide a, Wide b, int operation) {
  switch (operation) {
    case kProduct: return a * b;
    case kMaximum: return b > a ? b : a;
    case kMinimum: return b < a ? b : a;
    default: return a + b;
  }
}

template <class Wide, class Stored, class Read, class Write>
void fold(char* out, const Inputs& inputs, size_t first, size_t count, int operation, Read read, Write write) {
  for (size_t i = 0; i < count; i++) {
    auto value = [&](size_t rank) -> Wide { return read(((const Stored*)inputs[rank]->data())[first + i]); };
    Wide total = value(0);
    for (size_t rank = 1; rank < inputs.size(); rank++) total = combine<Wide>(total, value(rank), operation);
    if (operation == kAverage) total = total / (Wide)inputs.size();
    ((Stored*)out)[i] = write(total);
  }
}

template <class Stored, class Wide = Stored>
void fold_numbers(char* out, const Inputs& inputs, size_t first, size_t count, int operation) {
  fold<Wide, Stored>(
      out, inputs, first, count, operation, [](Stored value) { return (Wide)value; },
      [](Wide value) { return (Stored)value; });
}

// Reduce `count` numbers from number `first` on. Sums of 16-bit numbers are rounded once, at the end.
void reduce(char* out, const Inputs& inputs, size_t first, size_t count, int type, int operation) {
  switch (type) {
    case kInt8: return fold_numbers<int8_t, int>(out, inputs, first, count, operation);
    case kUint8: return fold_numbers<uint8_t, int>(out, inputs, first, count, operation);
    case kInt32: return fold_numbers<int32_t>(out, inputs, first, count, operation);
    case kInt64: return fold_numbers<int64_t>(out, inputs, first, count, operation);
    case kFloat16: return fold_numbers<_Float16, float>(out, inputs, first, count, operation);
    case kFloat32: return fold_numbers<float>(out, inputs, first, count, operation);
    case kFloat64: return fold_numbers<double>(out, inputs, first, count, operation);
    case kBfloat16: return fold<float, uint16_t>(out, inputs, first, count, operation, from_bfloat16, to_bfloat16);
    default: fprintf(stderr, "simulated NCCL: no reduction of type %d\n", type); abort();
  }
}

struct Collective {
  const char* name;
  const void* input;
  size_t bytes_in;
  void* output;
  size_t bytes_out;
  Communicator* communicator;
  void* stream;
};

// Wait until all ranks have brought their inputs, then let `finish` write this rank's output.
Result meet(const Collective& call, const std::function<void(char*, const Inputs&)>& finish) {
  simulated_operation("nccl", call.name, (long long)call.bytes_in, call.stream);
  World& world = *call.communicator->world;
  long number = call.communicator->collectives++;
  std::unique_lock<std::mutex> lock(world.mutex);
  Inputs& inputs = world.meetings[number];
  if (inputs.empty()) {
    inputs.resize(world.size);
    world.present[number] = world.size;
  }
  const char* input = (const char*)call.input;
  inputs[call.communicator->rank] = std::make_shared<Message>(input, input + call.bytes_in);
  world.changed.notify_all();
  auto complete = [&] {
    for (auto& each : inputs)
      if (!each) return false;
    return true;
  };
  if (!world.changed.wait_for(lock, patience(), complete))
    return fail(kRemoteError, std::string(call.name) + ": not all ranks came");
  Inputs all = inputs;
  if (--world.present[number] == 0) {
    world.meetings.erase(number);
    world.present.erase(number);
  }
  lock.unlock();
  finish((char*)call.output, all);
  simulated_access(call.input, call.bytes_in, 0, call.stream, call.name);
  simulated_access(call.output, call.bytes_out, 1, call.stream, call.name);
  return kSuccess;
}

Result transfer_all() {
  std::vector<Transfer> transfers;
  transfers.swap(waiting);
  for (auto& each : transfers) {
    if (!each.sends) continue;
    simulated_operation("nccl", "send", (long long)each.bytes, each.stream);
    simulated_access(each.address, each.bytes, 0, each.stream, "send");
    World& world = *each.communicator->world;
    std::lock_guard<std::mutex> lock(world.mutex);
    world.mail[{each.communicator->rank, each.peer}].emplace_back(each.address, each.address + each.bytes);
    world.changed.notify_all();
  }
  for (auto& each : transfers) {
    if (each.sends) continue;
    simulated_operation("nccl", "receive", (long long)each.bytes, each.stream);
    World& world = *each.communicator->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    auto& mail = world.mail[{each.peer, each.communicator->rank}];
    std::string ranks = "rank " + std::to_string(each.communicator->rank) + " from rank " + std::to_string(each.peer);
    if (!world.changed.wait_for(lock, patience(), [&] { return !mail.empty(); }))
      return fail(kRemoteError, "nothing came to " + ranks);
    Message message = std::move(mail.front());
    mail.pop_front();
    if (message.size() != each.bytes)
      return fail(kInvalidUsage, std::to_string(message.size()) + " bytes came to " + ranks + ", which expects " +
                                     std::to_string(each.bytes));
    memcpy(each.address, message.data(), each.bytes);
    simulated_access(each.address, each.bytes, 1, each.stream, "receive");
  }
  return kSuccess;
}

Result transfer(const Transfer& one) {
  waiting.push_back(one);
  return open_groups ? kSuccess : transfer_all();
}

Result join(Communicator** communicator, int size, const UniqueId& id, int rank) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  auto& world = worlds[std::string(id.bytes, sizeof id.bytes)];
  if (!world) world = std::make_shared<World>();
  world->size = size;
  *communicator = new Communicator{world, rank};
  return kSuccess;
}

}  // namespace

EXPORT Result ncclGetVersion(int* version) {
  *version = 22907;
  return kSuccess;
}
EXPORT Result ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "simulated-%d", next_id++);
  return kSuccess;
}
EXPORT Result ncclCommInitRank(Communicator** communicator, int size, UniqueId id, int rank) {
  return join(communicator, size, id, rank);
}
EXPORT Result ncclCommInitRankConfig(Communicator** communicator, int size, UniqueId id, int rank, void*) {
  return join(communicator, size, id, rank);
}
EXPORT Result ncclCommInitRankScalable(Communicator** communicator, int size, int rank, int, UniqueId* id, void*) {
  return join(communicator, size, *id, rank);
}
EXPORT Result ncclCommCount(Communicator* communicator, int* size) {
  *size = communicator->world->size;
  return kSuccess;
}
EXPORT Result ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return kSuccess;
}
EXPORT Result ncclCommDestroy(Communicator*) { return kSuccess; }
EXPORT Result ncclCommAbort(Communicator*) { return kSuccess; }
EXPORT Result ncclCommFinalize(Communicator*) { return kSuccess; }
EXPORT Result ncclCommRegister(Communicator*, void*, size_t, void**) { return kSuccess; }
EXPORT Result ncclCommDeregister(Communicator*, void*) { return kSuccess; }
EXPORT Result ncclCommGetAsyncError(Communicator*, Result* error) {
  *error = kSuccess;
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(Result error) {
  if (error == kRemoteError) return "remote process exited or there was a network error";  // NCCL's words
  return error ? "simulated NCCL error" : "no error";
}
EXPORT const char* ncclGetLastError(Communicator*) { return error_text.c_str(); }

EXPORT Result ncclGroupStart() {
  open_groups++;
  return kSuccess;
}
EXPORT Result ncclGroupEnd() { return --open_groups ? kSuccess : transfer_all(); }
EXPORT Result ncclSend(const void* from, size_t count, int type, int peer, Communicator* communicator, void* stream) {
  return transfer({communicator, true, (char*)from, count * width_of(type), peer, stream});
}
EXPORT Result ncclRecv(void* to, size_t count, int type, int peer, Communicator* communicator, void* stream) {
  return transfer({communicator, false, (char*)to, count * width_of(type), peer, stream});
}
EXPORT Result ncclAlltoAll(const void* in, void* out, size_t count, int type, Communicator* communicator,
                           void* stream) {
  size_t bytes = count * width_of(type), all = bytes * communicator->world->size;
  return meet({"alltoall", in, all, out, all, communicator, stream}, [=](char* result, const Inputs& inputs) {
    for (auto& input : inputs) {
      memcpy(result, input->data() + communicator->rank * bytes, bytes);
      result += bytes;
    }
  });
}
EXPORT Result ncclAllGather(const void* in, void* out, size_t count, int type, Communicator* communicator,
                            void* stream) {
  size_t bytes = count * width_of(type), all = bytes * communicator->world->size;
  return meet({"allgather", in, bytes, out, all, communicator, stream}, [=](char* result, const Inputs& inputs) {
    for (auto& input : inputs) {
      memcpy(result, input->data(), bytes);
      result += bytes;
    }
  });
}
EXPORT Result ncclReduceScatter(const void* in, void* out, size_t count, int type, int operation,
                                Communicator* communicator, void* stream) {
  size_t bytes = count * width_of(type), all = bytes * communicator->world->size;
  return meet({"reducescatter", in, all, out, bytes, communicator, stream}, [=](char* result, const Inputs& inputs) {
    reduce(result, inputs, communicator->rank * count, count, type, operation);
  });
}
EXPORT Result ncclAllReduce(const void* in, void* out, size_t count, int type, int operation,
                            Communicator* communicator, void* stream) {
  size_t bytes = count * width_of(type);
  return meet({"allreduce", in, bytes, out, bytes, communicator, stream}, [=](char* result, const Inputs& inputs) {
    reduce(result, inputs, 0, count, type, operation);
  });
}
EXPORT Result ncclReduce(const void* in, void* out, size_t count, int type, int operation, int root,
                         Communicator* communicator, void* stream) {
  size_t bytes = count * width_of(type), written = communicator->rank == root ? bytes : 0;
  return meet({"reduce", in, bytes, out, written, communicator, stream}, [=](char* result, const Inputs& inputs) {
    if (communicator->rank == root) reduce(result, inputs, 0, count, type, operation);
  });
}
EXPORT Result ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Communicator* communicator,
                            void* stream) {
  size_t bytes = count * width_of(type);
  return meet({"broadcast", in, bytes, out, bytes, communicator, stream},
              [=](char* result, const Inputs& inputs) { memcpy(result, inputs[root]->data(), bytes); });
}
EXPORT Result ncclBcast(void* data, size_t count, int type, int root, Communicator* communicator, void* stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}
