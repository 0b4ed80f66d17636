// A CUDA runtime and driver without a GPU: it counts bytes and hands out addresses nobody dereferences.
//
// The library replaces `libcudart.so.13`, so that the allocator inside `libc10_cuda.so` runs on any
// machine. What it must model is what the allocator can see: the bytes that are left, the addresses that
// come back (`crates/memfit-engine/src/allocator/driver.rs` has the same rules in words), and whether an
// event has completed. All else answers success.

#include "stand_in_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>

namespace {

constexpr size_t kGranule = size_t{2} << 20;
constexpr uintptr_t kFirstAddress = 0x7f0000000000;
constexpr uintptr_t kFirstReserved = 0x600000000000;

size_t total_bytes = size_t{80} << 30;
size_t other_bytes = 0;
size_t used_bytes = 0;
bool is_descending = false;

size_t round_up(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }
bool fits(size_t bytes) { return used_bytes + other_bytes + bytes <= total_bytes; }

// Address ranges that were freed: the lowest one that is large enough serves first.
uintptr_t next_address = kFirstAddress;
std::map<uintptr_t, size_t> free_ranges;
std::map<uintptr_t, size_t> allocations;

uintptr_t take_address(size_t bytes) {
  for (auto range = free_ranges.begin(); range != free_ranges.end(); ++range) {
    if (range->second < bytes) continue;
    const auto [address, size] = *range;
    free_ranges.erase(range);
    if (size > bytes) free_ranges[address + bytes] = size - bytes;
    return address;
  }
  if (is_descending) return next_address -= bytes;
  next_address += bytes;
  return next_address - bytes;
}

void give_address(uintptr_t address, size_t bytes) {
  auto range = free_ranges.emplace(address, bytes).first;
  auto next = std::next(range);
  if (next != free_ranges.end() && address + bytes == next->first) {
    range->second += next->second;
    free_ranges.erase(next);
  }
  if (range == free_ranges.begin()) return;
  auto previous = std::prev(range);
  if (previous->first + previous->second == range->first) {
    previous->second += range->second;
    free_ranges.erase(range);
  }
}

struct Event {
  uintptr_t stream = 0;
  bool is_complete = true;
};

bool are_events_ready = true;
bool is_capturing = false;
std::map<uintptr_t, std::deque<Event*>> recorded;

void complete(Event* event) {
  if (event->is_complete) return;
  event->is_complete = true;
  auto& queue = recorded[event->stream];
  for (auto place = queue.begin(); place != queue.end(); ++place) {
    if (*place == event) {
      queue.erase(place);
      return;
    }
  }
}

}  // namespace

extern "C" {

void stand_in_set_device(size_t total, bool descending) {
  total_bytes = total;
  is_descending = descending;
}
void stand_in_set_other(size_t bytes) { other_bytes = bytes; }
void stand_in_set_events_ready(bool ready) { are_events_ready = ready; }
void stand_in_set_capturing(bool capturing) { is_capturing = capturing; }
void stand_in_complete(uintptr_t stream, size_t count) {
  auto& queue = recorded[stream];
  for (; count > 0 && !queue.empty(); --count) complete(queue.front());
}

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (!fits(bytes)) return cudaErrorMemoryAllocation;
  used_bytes += bytes;
  const uintptr_t address = take_address(round_up(bytes));
  allocations[address] = bytes;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  auto allocation = allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (allocation == allocations.end()) {
    std::fprintf(stderr, "cudaFree of an address that cudaMalloc did not return\n");
    std::abort();
  }
  used_bytes -= allocation->second;
  give_address(allocation->first, round_up(allocation->second));
  allocations.erase(allocation);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const size_t taken = used_bytes + other_bytes;
  *free = taken < total_bytes ? total_bytes - taken : 0;
  *total = total_bytes;
  return cudaSuccess;
}

// Device.

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13020, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = 0, cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stand-in");
  properties->totalGlobalMem = total_bytes;
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "stand-in error"; }
const char* cudaGetErrorString(cudaError_t) { return "stand-in error"; }

// Streams and events.

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  auto* event = reinterpret_cast<Event*>(handle);
  *event = {reinterpret_cast<uintptr_t>(stream), false};
  recorded[event->stream].push_back(event);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (!are_events_ready && !event->is_complete) return cudaErrorNotReady;
  complete(event);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  complete(reinterpret_cast<Event*>(handle));
  return cudaSuccess;
}

// What the allocator calls without caring for more than the answer.

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  return *count = 0, cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaSuccess; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

}  // extern "C"

// The driver's virtual memory, which the allocator finds by name.

namespace {

uintptr_t next_reserved = kFirstReserved;
std::map<CUmemGenericAllocationHandle, size_t> pages;
CUmemGenericAllocationHandle next_page = 1;

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = next_reserved;
  // A gap, so that two reservations never touch.
  next_reserved += round_up(bytes) + (size_t{1} << 30);
  return CUDA_SUCCESS;
}
CUresult create_page(CUmemGenericAllocationHandle* page, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  if (!fits(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  used_bytes += bytes;
  *page = next_page++;
  pages[*page] = bytes;
  return CUDA_SUCCESS;
}
CUresult release_page(CUmemGenericAllocationHandle page) {
  used_bytes -= pages[page];
  pages.erase(page);
  return CUDA_SUCCESS;
}
CUresult no_attribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
CUresult succeed() { return CUDA_SUCCESS; }

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  const std::string name = symbol;
  *function = name == "cuMemAddressReserve"     ? reinterpret_cast<void*>(reserve)
              : name == "cuMemCreate"           ? reinterpret_cast<void*>(create_page)
              : name == "cuMemRelease"          ? reinterpret_cast<void*>(release_page)
              : name == "cuDeviceGetAttribute"  ? reinterpret_cast<void*>(no_attribute)
                                                : reinterpret_cast<void*>(succeed);
  return cudaSuccess;
}
