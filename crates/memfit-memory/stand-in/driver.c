/* A stand-in for the CUDA driver, for machines without one.
 *
 * Responsible for the calls that memfit-memory makes, with the driver's own signatures: built with
 * -DSTAND_IN_WITH_CUDA_H the compiler compares them with the real header. Device memory is files in
 * memory, mapped where the caller reserved addresses, so that what is unmapped keeps its bytes and what is
 * new is not zero. Not responsible for kernels; one that runs can be pretended.
 *
 * Tests tell it how much memory there is and which call shall fail, and ask what is held.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef STAND_IN_WITH_CUDA_H
#include <cuda.h>
#else
typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef int CUmemAllocationGranularity_flags;
typedef struct CUctx_st *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct {
  int type;
  int id;
} CUmemLocation;
typedef struct {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef struct {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;
enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_UNKNOWN = 999
};
#endif

#define GRANULARITY ((size_t)2 << 20)
#define MOST 4096

/* What a test may ask; all of it is zero when nothing is held. */
struct stand_in_counts {
  uint64_t calls;        /* that count for stand_in_fail, since the last one */
  uint64_t handles;      /* created and not released, or released and still mapped */
  uint64_t mappings;
  uint64_t reservations;
  uint64_t used_bytes;   /* of the device */
  uint64_t pinned_bytes; /* of the host */
  uint64_t contexts;     /* retained */
  uint64_t misuses;      /* calls that break a rule of the driver's */
};

struct handle {
  size_t size;
  int file;
  int is_released;
  int mappings;
};

struct range {
  uintptr_t start;
  size_t size;
  unsigned handle;
  int is_accessible;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle handles[MOST]; /* size 0: free */
static struct range mappings[MOST], reservations[MOST], pinned[MOST];
static size_t total_bytes = (size_t)1 << 30, pinnable_bytes = SIZE_MAX;
static struct stand_in_counts counts;
static uint64_t most_used_bytes, most_pinned_bytes;
static uint64_t fail_at;
static int fail_lasts, fail_code = CUDA_ERROR_UNKNOWN, kernel_runs, lacks_management;
static _Thread_local int contexts_pushed;

void stand_in_set(size_t total, size_t pinnable, int without_management) {
  total_bytes = total;
  pinnable_bytes = pinnable;
  lacks_management = without_management;
}

/* Lets the call of that number, counted from now and from 1, fail; all later ones too if it lasts. */
void stand_in_fail(uint64_t at, int lasts, int code) {
  pthread_mutex_lock(&lock);
  counts.calls = 0;
  fail_at = at;
  fail_lasts = lasts;
  fail_code = code;
  pthread_mutex_unlock(&lock);
}

/* Pretends a kernel that runs until somebody waits for the device. */
void stand_in_launch(void) { kernel_runs = 1; }

void stand_in_count(struct stand_in_counts *answer) {
  pthread_mutex_lock(&lock);
  *answer = counts;
  pthread_mutex_unlock(&lock);
}

/* The most bytes used of the device, and pinned of the host, since the last time it was asked. */
void stand_in_peaks(uint64_t *used_bytes, uint64_t *pinned_bytes) {
  pthread_mutex_lock(&lock);
  *used_bytes = most_used_bytes;
  *pinned_bytes = most_pinned_bytes;
  most_used_bytes = counts.used_bytes;
  most_pinned_bytes = counts.pinned_bytes;
  pthread_mutex_unlock(&lock);
}

static CUresult misuse(void) {
  counts.misuses++;
  return CUDA_ERROR_INVALID_VALUE;
}

/* Every call that can be made to fail begins here, with the lock taken, and ends with done(). */
static int begin(void) {
  pthread_mutex_lock(&lock);
  counts.calls++;
  return fail_at != 0 && (fail_lasts ? counts.calls >= fail_at : counts.calls == fail_at) ? fail_code : 0;
}

static CUresult done(int code) {
  if (counts.used_bytes > most_used_bytes)
    most_used_bytes = counts.used_bytes;
  if (counts.pinned_bytes > most_pinned_bytes)
    most_pinned_bytes = counts.pinned_bytes;
  pthread_mutex_unlock(&lock);
  return (CUresult)code;
}

static struct range *find(struct range *ranges, uintptr_t start, size_t size) {
  for (int i = 0; i < MOST; i++)
    if (ranges[i].size != 0 && ranges[i].start == start && (size == 0 || ranges[i].size == size))
      return &ranges[i];
  return NULL;
}

static struct range *unused(struct range *ranges) {
  for (int i = 0; i < MOST; i++)
    if (ranges[i].size == 0)
      return &ranges[i];
  return NULL;
}

/* Whether a whole range is mapped, and accessible if it is asked for. */
static int is_mapped(uintptr_t start, size_t size, int accessible) {
  uintptr_t at = start;
  while (at < start + size) {
    struct range *under = NULL;
    for (int i = 0; i < MOST; i++)
      if (mappings[i].size != 0 && mappings[i].start <= at && at < mappings[i].start + mappings[i].size)
        under = &mappings[i];
    if (under == NULL || (accessible && !under->is_accessible))
      return 0;
    at = under->start + under->size;
  }
  return 1;
}

CUresult cuInit(unsigned int flags) {
  int failed = begin();
  return done(failed ? failed : flags == 0 ? 0 : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  int failed = begin();
  if (!failed && ordinal != 0)
    failed = CUDA_ERROR_INVALID_DEVICE;
  if (!failed)
    *device = ordinal;
  return done(failed);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  int failed = begin();
  (void)device;
  if (!failed)
    *value = attribute == 102 ? !lacks_management : 0;
  return done(failed);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  int failed = begin();
  (void)device;
  if (!failed) {
    *context = (CUcontext)&counts;
    counts.contexts++;
  }
  return done(failed);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  int failed = begin();
  (void)device;
  if (!failed)
    counts.contexts--;
  return done(failed);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  int failed = begin();
  if (!failed && context != (CUcontext)&counts)
    failed = misuse();
  if (!failed)
    contexts_pushed++;
  return done(failed);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  int failed = begin();
  /* A failed pop is one that happened: the caller cannot tell, and a stack that grows is the worse lie. */
  if (contexts_pushed == 0)
    failed = misuse();
  else
    contexts_pushed--;
  if (context != NULL)
    *context = (CUcontext)&counts;
  return done(failed);
}

CUresult cuCtxSynchronize(void) {
  int failed = begin();
  if (!failed && contexts_pushed == 0)
    failed = CUDA_ERROR_INVALID_CONTEXT;
  if (!failed)
    kernel_runs = 0;
  return done(failed);
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  int failed = begin();
  if (!failed && contexts_pushed == 0)
    failed = CUDA_ERROR_INVALID_CONTEXT;
  if (!failed) {
    *free = total_bytes - counts.used_bytes;
    *total = total_bytes;
  }
  return done(failed);
}

static int is_device_memory(const CUmemAllocationProp *prop) {
  return prop->type == 1 && prop->location.type == 1 && prop->location.id == 0;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
  int failed = begin();
  if (!failed && (!is_device_memory(prop) || option != 0))
    failed = misuse();
  if (!failed)
    *granularity = GRANULARITY;
  return done(failed);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  int failed = begin();
  (void)alignment;
  if (!failed && (size == 0 || size % GRANULARITY != 0 || wanted != 0 || flags != 0))
    failed = misuse();
  struct range *slot = unused(reservations);
  if (!failed && slot == NULL)
    failed = CUDA_ERROR_OUT_OF_MEMORY;
  if (!failed) {
    /* On a boundary of the granularity, as the driver does it. */
    char *start = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
      failed = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
      size_t before = (GRANULARITY - (uintptr_t)start % GRANULARITY) % GRANULARITY;
      if (before > 0)
        munmap(start, before);
      if (before < GRANULARITY)
        munmap(start + before + size, GRANULARITY - before);
      *slot = (struct range){(uintptr_t)start + before, size, 0, 0};
      *address = (CUdeviceptr)slot->start;
      counts.reservations++;
    }
  }
  return done(failed);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  int failed = begin();
  struct range *reserved = find(reservations, (uintptr_t)address, size);
  if (!failed && reserved == NULL)
    failed = misuse();
  for (int i = 0; !failed && i < MOST; i++)
    if (mappings[i].size != 0 && mappings[i].start >= reserved->start &&
        mappings[i].start < reserved->start + reserved->size)
      failed = misuse();
  if (!failed) {
    munmap((void *)reserved->start, reserved->size);
    reserved->size = 0;
    counts.reservations--;
  }
  return done(failed);
}

static void drop_if_unused(struct handle *handle) {
  if (handle->is_released && handle->mappings == 0) {
    close(handle->file);
    counts.used_bytes -= handle->size;
    counts.handles--;
    handle->size = 0;
  }
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *answer, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  int failed = begin();
  if (!failed && (size == 0 || size % GRANULARITY != 0 || !is_device_memory(prop) || flags != 0))
    failed = misuse();
  if (!failed && size > total_bytes - counts.used_bytes)
    failed = CUDA_ERROR_OUT_OF_MEMORY;
  unsigned number = 1;
  while (number < MOST && handles[number].size != 0)
    number++;
  if (!failed && number == MOST)
    failed = CUDA_ERROR_OUT_OF_MEMORY;
  if (!failed) {
    int file = memfd_create("stand-in", 0);
    if (file < 0 || ftruncate(file, (off_t)size) != 0) {
      failed = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
      void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      memset(bytes, 0xA5, size); /* what somebody left there */
      munmap(bytes, size);
      handles[number] = (struct handle){size, file, 0, 0};
      counts.handles++;
      counts.used_bytes += size;
      *answer = number;
    }
  }
  return done(failed);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  int failed = begin();
  if (!failed && (handle == 0 || handle >= MOST || handles[handle].size == 0 || handles[handle].is_released))
    failed = misuse();
  if (!failed) {
    handles[handle].is_released = 1;
    drop_if_unused(&handles[handle]);
  }
  return done(failed);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  int failed = begin();
  uintptr_t start = (uintptr_t)address;
  int is_reserved = 0;
  for (int i = 0; i < MOST; i++) {
    if (reservations[i].size != 0 && reservations[i].start <= start &&
        start + size <= reservations[i].start + reservations[i].size)
      is_reserved = 1;
    if (!failed && mappings[i].size != 0 && start < mappings[i].start + mappings[i].size &&
        mappings[i].start < start + size)
      failed = misuse();
  }
  if (!failed && (!is_reserved || offset != 0 || flags != 0 || handle == 0 || handle >= MOST ||
                  handles[handle].size != size || handles[handle].is_released))
    failed = misuse();
  struct range *slot = unused(mappings);
  if (!failed && (slot == NULL || mmap((void *)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                                       handles[handle].file, 0) == MAP_FAILED))
    failed = CUDA_ERROR_OUT_OF_MEMORY;
  if (!failed) {
    *slot = (struct range){start, size, (unsigned)handle, 0};
    handles[handle].mappings++;
    counts.mappings++;
  }
  return done(failed);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  int failed = begin();
  struct range *mapped = find(mappings, (uintptr_t)address, size);
  if (!failed && (mapped == NULL || kernel_runs))
    failed = misuse();
  if (!failed) {
    mmap((void *)mapped->start, mapped->size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    mapped->size = 0;
    counts.mappings--;
    handles[mapped->handle].mappings--;
    drop_if_unused(&handles[mapped->handle]);
  }
  return done(failed);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  int failed = begin();
  uintptr_t start = (uintptr_t)address;
  if (!failed && (count != 1 || access->flags != 3 || access->location.type != 1 || access->location.id != 0 ||
                  !is_mapped(start, size, 0)))
    failed = misuse();
  if (!failed) {
    mprotect((void *)start, size, PROT_READ | PROT_WRITE);
    for (int i = 0; i < MOST; i++)
      if (mappings[i].size != 0 && start <= mappings[i].start && mappings[i].start < start + size)
        mappings[i].is_accessible = 1;
  }
  return done(failed);
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size) {
  int failed = begin();
  if (!failed && contexts_pushed == 0)
    failed = CUDA_ERROR_INVALID_CONTEXT;
  if (!failed && !is_mapped((uintptr_t)source, size, 1))
    failed = misuse();
  if (!failed)
    memcpy(target, (void *)(uintptr_t)source, size);
  return done(failed);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size) {
  int failed = begin();
  if (!failed && contexts_pushed == 0)
    failed = CUDA_ERROR_INVALID_CONTEXT;
  if (!failed && !is_mapped((uintptr_t)target, size, 1))
    failed = misuse();
  if (!failed)
    memcpy((void *)(uintptr_t)target, source, size);
  return done(failed);
}

CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned int flags) {
  int failed = begin();
  struct range *slot = unused(pinned);
  if (!failed && (slot == NULL || flags != 0 || size > pinnable_bytes - counts.pinned_bytes))
    failed = CUDA_ERROR_OUT_OF_MEMORY;
  if (!failed) {
    *slot = (struct range){(uintptr_t)start, size, 0, 0};
    counts.pinned_bytes += size;
  }
  return done(failed);
}

CUresult cuMemHostUnregister(void *start) {
  int failed = begin();
  struct range *found = find(pinned, (uintptr_t)start, 0);
  if (!failed && found == NULL)
    failed = misuse();
  if (!failed) {
    counts.pinned_bytes -= found->size;
    found->size = 0;
  }
  return done(failed);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = (int)error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STAND_IN";
  return CUDA_SUCCESS;
}
