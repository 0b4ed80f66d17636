// Drives the real allocator with a script of operations and prints what it did, one line per answer.
//
// Usage: driver TOTAL_BYTES ascending|descending [speed] < script. The settings come from
// PYTORCH_CUDA_ALLOC_CONF. With `speed` it runs allocations and frees alone and prints what they took. The operations and their answers are listed in `script.rs`, whose simulator side prints the same.

#include "stand_in_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

namespace c10::cuda::_internal {
// In no public header: libtorch_cuda, which is not loaded here, calls it.
void setHasPrimaryContext(bool (*ask)(c10::DeviceIndex));
}  // namespace c10::cuda::_internal

namespace allocator = c10::cuda::CUDACachingAllocator;
using allocator::TraceEntry;
using c10::CachingAllocator::StatArray;

namespace {

// A stack is a number here; whoever turns the dump into a snapshot gives it frames.
struct Stack : c10::GatheredContext {
  explicit Stack(int number) : number(number) {}
  int number;
};
int current_stack = 0;
std::shared_ptr<c10::GatheredContext> gather() { return std::make_shared<Stack>(current_stack); }
int stack_of(const std::shared_ptr<c10::GatheredContext>& context) {
  return context ? static_cast<Stack*>(context.get())->number : -1;
}

void record() {
  allocator::recordHistory(true, gather, size_t{1} << 30, allocator::RecordContext::ALL, true, {});
}

// An exception's first line, without the C++ stack that may follow and the addresses in it.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

const char* action_name(TraceEntry::Action action) {
  switch (action) {
    case TraceEntry::ALLOC: return "alloc";
    case TraceEntry::FREE_REQUESTED: return "free_requested";
    case TraceEntry::FREE_COMPLETED: return "free_completed";
    case TraceEntry::SEGMENT_ALLOC: return "segment_alloc";
    case TraceEntry::SEGMENT_FREE: return "segment_free";
    case TraceEntry::SEGMENT_MAP: return "segment_map";
    case TraceEntry::SEGMENT_UNMAP: return "segment_unmap";
    case TraceEntry::SNAPSHOT: return "snapshot";
    case TraceEntry::OOM: return "oom";
    default: return "annotate";
  }
}

void print_array(const char* name, const StatArray& statistic) {
  std::printf(" %s", name);
  for (const auto& one : statistic) {
    std::printf(" %" PRId64 "/%" PRId64 "/%" PRId64 "/%" PRId64, one.current, one.peak, one.allocated, one.freed);
  }
}

void print_statistics() {
  const auto s = allocator::getDeviceStats(0);
  std::printf("statistics");
  print_array("allocation", s.allocation);
  print_array("segment", s.segment);
  print_array("active", s.active);
  print_array("inactive_split", s.inactive_split);
  print_array("allocated_bytes", s.allocated_bytes);
  print_array("reserved_bytes", s.reserved_bytes);
  print_array("active_bytes", s.active_bytes);
  print_array("inactive_split_bytes", s.inactive_split_bytes);
  print_array("requested_bytes", s.requested_bytes);
  std::printf(" retries %" PRId64 " ooms %" PRId64 " rejections %" PRId64 " syncs %" PRId64
              " device_allocs %" PRId64 " device_frees %" PRId64,
              s.num_alloc_retries, s.num_ooms, s.num_oom_rejections, s.num_sync_all_streams, s.num_device_alloc,
              s.num_device_free);
  for (const auto* one : {&s.oversize_allocations, &s.oversize_segments}) {
    std::printf(" %" PRId64 "/%" PRId64 "/%" PRId64 "/%" PRId64, one->current, one->peak, one->allocated,
                one->freed);
  }
  std::printf("\n");
}

void print_segments() {
  const auto snapshot = allocator::snapshot({0, 0}, false);
  for (const auto& segment : snapshot.segments) {
    std::printf("segment %zx %zu stream %zx %s%s counter %d pool %llu,%llu", segment.address, segment.total_size,
                reinterpret_cast<size_t>(segment.stream), segment.is_large ? "large" : "small",
                segment.is_expandable ? " expandable" : "", segment.registration_counter,
                segment.owner_private_pool_id.first, segment.owner_private_pool_id.second);
    for (const auto& block : segment.blocks) {
      std::printf(" %zu:%zu:%s", block.size, block.active ? block.requested_size : 0,
                  block.allocated ? "allocated" : block.active ? "awaiting" : "inactive");
    }
    std::printf("\n");
  }
  std::printf("segments %zu\n", snapshot.segments.size());
}

void print_trace() {
  const auto snapshot = allocator::snapshot({0, 0}, true);
  for (const auto& entry : snapshot.device_traces.at(0)) {
    if (entry.action_ == TraceEntry::SNAPSHOT) continue;
    std::printf("%s %zx %zu %zx %llu,%llu\n", action_name(entry.action_), entry.addr_, entry.size_,
                reinterpret_cast<size_t>(entry.stream_), entry.mempool_.first, entry.mempool_.second);
  }
  record();
}

// The whole snapshot as JSON, for `benchmarks/snapshots.py`.
void dump(const char* path) {
  const auto snapshot = allocator::snapshot();
  std::FILE* file = std::fopen(path, "w");
  std::fprintf(file, "{\"segments\": [");
  const char* comma = "";
  for (const auto& s : snapshot.segments) {
    std::fprintf(file,
                 "%s\n{\"device\": %d, \"address\": %zu, \"total_size\": %zu, \"allocated_size\": %zu, "
                 "\"active_size\": %zu, \"requested_size\": %zu, \"stream\": %zu, \"is_large\": %s, "
                 "\"pool\": [%llu, %llu], \"is_expandable\": %s, \"stack\": %d, \"blocks\": [",
                 comma, s.device, s.address, s.total_size, s.allocated_size, s.active_size, s.requested_size,
                 reinterpret_cast<size_t>(s.stream), s.is_large ? "true" : "false", s.owner_private_pool_id.first,
                 s.owner_private_pool_id.second, s.is_expandable ? "true" : "false",
                 stack_of(s.context_when_allocated));
    comma = ",";
    const char* inner = "";
    for (const auto& b : s.blocks) {
      std::fprintf(file, "%s{\"size\": %zu, \"requested_size\": %zu, \"state\": \"%s\", \"stack\": %d}", inner,
                   b.size, b.requested_size,
                   b.allocated ? "active_allocated" : b.active ? "active_awaiting_free" : "inactive",
                   stack_of(b.context_when_allocated));
      inner = ", ";
    }
    std::fprintf(file, "]}");
  }
  std::fprintf(file, "],\n\"trace\": [");
  comma = "";
  for (const auto& e : snapshot.device_traces.at(0)) {
    std::fprintf(file,
                 "%s\n{\"action\": \"%s\", \"addr\": %zu, \"size\": %zu, \"stream\": %zu, \"pool\": [%llu, %llu], "
                 "\"time_us\": %lld, \"compile_context\": \"%s\", \"user_metadata\": \"%s\", \"stack\": %d}",
                 comma, action_name(e.action_), e.addr_, e.size_, reinterpret_cast<size_t>(e.stream_),
                 e.mempool_.first, e.mempool_.second, static_cast<long long>(e.time_.t_), e.compile_context_.c_str(),
                 e.user_metadata_.c_str(), stack_of(e.context_));
    comma = ",";
  }
  const auto& c = snapshot.config_metadata;
  std::fprintf(file,
               "],\n\"settings\": {\"garbage_collection_threshold\": %.17g, \"max_split_size\": %lld, "
               "\"pinned_num_register_threads\": %zu, \"expandable_segments\": %s, "
               "\"release_lock_on_cudamalloc\": %s, \"pinned_use_cuda_host_register\": %s, "
               "\"graph_capture_record_stream_reuse\": %s, \"last\": \"%s\", "
               "\"max_round_threshold\": %lld, \"max_cached_size\": %lld, \"roundup\": [",
               c.garbage_collection_threshold, static_cast<long long>(c.max_split_size),
               c.pinned_num_register_threads, c.expandable_segments ? "true" : "false",
               c.release_lock_on_malloc ? "true" : "false", c.pinned_use_host_register ? "true" : "false",
               c.graph_capture_record_stream_reuse ? "true" : "false", c.last_allocator_settings.c_str(),
               static_cast<long long>(c.max_round_threshold), static_cast<long long>(c.max_cached_size));
  comma = "";
  for (const auto divisions : c.roundup_power2_divisions) {
    std::fprintf(file, "%s%zu", comma, divisions);
    comma = ", ";
  }
  std::fprintf(file, "]}}\n");
  std::fclose(file);
}

void print_settings() {
  using All = c10::CachingAllocator::AcceleratorAllocatorConfig;
  using Cuda = allocator::CUDAAllocatorConfig;
  std::printf("%zu %zu %zu %g %d %g %zu ", All::large_segment_size(), All::max_split_size(),
              All::max_non_split_rounding_size(), All::garbage_collection_threshold(),
              All::use_expandable_segments(), Cuda::per_process_memory_fraction(),
              Cuda::pinned_num_register_threads());
  const char* comma = "";
  for (const auto divisions : All::roundup_power2_divisions()) {
    std::printf("%s%zu", comma, divisions);
    comma = ",";
  }
  std::printf("\n");
}

std::vector<void*> slots;

void*& slot(const char* number) {
  const auto index = std::strtoull(number, nullptr, 10);
  if (index >= slots.size()) slots.resize(index + 1);
  return slots[index];
}
cudaStream_t stream(const char* number) {
  return reinterpret_cast<cudaStream_t>(std::strtoull(number, nullptr, 16));
}
c10::MempoolId_t pool(const char* number) { return {0, std::strtoull(number, nullptr, 10)}; }

void run(char operation, const char* first, const char* second, const char* third) {
  switch (operation) {
    case 'm': {
      void*& place = slot(first);
      try {
        place = nullptr;
        place = allocator::raw_alloc_with_stream(std::strtoull(second, nullptr, 10), stream(third));
        std::printf("%zx\n", reinterpret_cast<size_t>(place));
      } catch (const c10::OutOfMemoryError& error) {
        std::printf("%s\n", first_line(error).c_str());
      }
      break;
    }
    case 'f':
      allocator::raw_delete(slot(first));
      slot(first) = nullptr;
      break;
    case 'r':
      if (void* pointer = slot(first)) {
        c10::DataPtr data(pointer, pointer, allocator::get()->raw_deleter(), c10::Device(c10::kCUDA, 0));
        allocator::recordStream(data, c10::cuda::getStreamFromExternal(stream(second), 0));
        data.release_context();
      }
      break;
    case 'e': stand_in_set_events_ready(first[0] == '1'); break;
    case 'c': stand_in_complete(std::strtoull(first, nullptr, 16), std::strtoull(second, nullptr, 10)); break;
    case 'y': allocator::emptyCache(pool(first)); break;
    case 'b': {
      const auto only = stream(second);
      const bool is_all = second[0] == '*';
      allocator::beginAllocateToPool(0, pool(first), [=](cudaStream_t s) { return is_all || s == only; });
      break;
    }
    case 'n': allocator::endAllocateToPool(0, pool(first)); break;
    case 'l': allocator::releasePool(0, pool(first)); break;
    case 'i': allocator::createOrIncrefPool(0, pool(first)); break;
    case 'u': allocator::setUseOnOOM(0, pool(first), second[0] == '1'); break;
    case 'p': allocator::setNoSplit(0, pool(first)); break;
    case 'q':
      if (first[0] == '1') {
        allocator::markCaptureBegin(0);
      } else {
        allocator::markCaptureEnd(0);
      }
      stand_in_set_capturing(first[0] == '1');
      break;
    case 'g': allocator::setMemoryFraction(std::strtod(first, nullptr), 0); break;
    case 'o': stand_in_set_other(std::strtoull(first, nullptr, 10)); break;
    case 'x': c10::CachingAllocator::setAllocatorSettings(first); break;
    case 's': print_statistics(); break;
    case 'P': allocator::resetPeakStats(0); break;
    case 'A': allocator::resetAccumulatedStats(0); break;
    case 'S': print_segments(); break;
    case 'T': print_trace(); break;
    case 'd': print_settings(); break;
    case 'k': current_stack = std::atoi(first); break;
    case 'J': dump(first); break;
    default: std::fprintf(stderr, "unknown operation %c\n", operation); std::exit(2);
  }
}

// Runs allocations and frees alone, read beforehand, and prints the processor time they took.
void run_for_time() {
  struct Operation {
    size_t slot;
    size_t bytes;
    cudaStream_t stream;
  };
  std::vector<Operation> operations;
  char kind = 0;
  size_t slot_number = 0;
  while (std::scanf(" %c %zu", &kind, &slot_number) == 2) {
    size_t bytes = 0;
    size_t handle = 0;
    if (kind == 'm' && std::scanf("%zu %zx", &bytes, &handle) != 2) std::exit(2);
    operations.push_back({slot_number, bytes, reinterpret_cast<cudaStream_t>(handle)});
    if (slot_number >= slots.size()) slots.resize(slot_number + 1);
  }
  allocator::recordHistory(false, nullptr, 1, allocator::RecordContext::NEVER, true, {});
  const std::clock_t start = std::clock();
  for (const auto& operation : operations) {
    void*& place = slots[operation.slot];
    if (operation.bytes > 0) {
      place = allocator::raw_alloc_with_stream(operation.bytes, operation.stream);
    } else {
      allocator::raw_delete(place);
    }
  }
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  const auto statistics = allocator::getDeviceStats(0);
  std::printf("%.6f %" PRId64 " %" PRId64 "\n", seconds, statistics.allocated_bytes[0].peak,
              statistics.reserved_bytes[0].peak);
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count < 3) return 2;
  stand_in_set_device(std::strtoull(arguments[1], nullptr, 10), std::strcmp(arguments[2], "descending") == 0);
  try {
    // Outside of Python nobody tells c10 how to ask whether the device is in use.
    c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
    allocator::init(1);
    if (argument_count > 3) {
      run_for_time();
      std::fflush(stdout);
      std::_Exit(0);
    }
    record();
    char line[4096];
    while (std::fgets(line, sizeof line, stdin) != nullptr) {
      char* rest = line + 1;
      const char* words[3] = {"", "", ""};
      for (auto& word : words) {
        if (char* found = std::strtok(rest, " \n")) word = found;
        rest = nullptr;
      }
      run(line[0], words[0], words[1], words[2]);
    }
  } catch (const std::exception& error) {
    std::printf("error %s\n", first_line(error).c_str());
  }
  std::fflush(stdout);
  // The allocator's own statics are not worth tearing down.
  std::_Exit(0);
}
