/* Counts the bytes of CPU tensors of a process that knows nothing of it: preloaded, it stands before
 * the C library where torch's allocator (libc10) asks for memory.
 *
 * Responsible for two numbers in the file that TENSOR_COUNT_FILE names: bytes that are live, and the
 * most that ever were. Blocks that memfit's own hook passes on count as torch's. Scratch memory that
 * other libraries take for themselves does not. Processes that are forked or started do not count.
 *
 * Shares no code with memfit, which it judges.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOTS (1u << 20) /* more than any script has tensors */
#define CALLERS 64
#define TENSOR_ALIGNMENT 64 /* libc10 asks for this one */

typedef int (*memalign_function)(void **, size_t, size_t);
typedef void (*free_function)(void *);

static struct {
    uintptr_t address;
    uint64_t bytes;
} blocks[SLOTS];

static struct {
    void *address;
    int is_torch;
} callers[CALLERS];

static struct {
    uint64_t live_bytes, peak_bytes;
} *count;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int caller_count;
static memalign_function next_memalign;
static free_function next_free;

static void stop_counting(void) { count = NULL; }

__attribute__((constructor)) static void start(void) {
    next_memalign = (memalign_function)dlsym(RTLD_NEXT, "posix_memalign");
    next_free = (free_function)dlsym(RTLD_NEXT, "free");
    const char *path = getenv("TENSOR_COUNT_FILE");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof *count) != 0)
        return;
    void *mapped = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return;
    unsetenv("TENSOR_COUNT_FILE");
    pthread_atfork(NULL, NULL, stop_counting);
    count = mapped;
}

/* Whether a caller is torch's allocator, or memfit's hook, which passes its calls on. */
static int is_torch(void *address) {
    for (int i = 0; i < caller_count; i++)
        if (callers[i].address == address)
            return callers[i].is_torch;
    Dl_info found;
    int answer = dladdr(address, &found) != 0 && found.dli_fname != NULL &&
                 (strstr(found.dli_fname, "libc10.so") || strstr(found.dli_fname, "_native"));
    if (caller_count < CALLERS) {
        callers[caller_count].address = address;
        callers[caller_count++].is_torch = answer;
    }
    return answer;
}

static uint32_t slot_of(uintptr_t address) {
    return (uint32_t)((address >> 6) * 0x9E3779B97F4A7C15u >> 44) & (SLOTS - 1);
}

static void add(uintptr_t address, uint64_t bytes) {
    uint32_t slot = slot_of(address);
    while (blocks[slot].address != 0)
        slot = (slot + 1) & (SLOTS - 1);
    blocks[slot].address = address;
    blocks[slot].bytes = bytes;
    count->live_bytes += bytes;
    if (count->live_bytes > count->peak_bytes)
        count->peak_bytes = count->live_bytes;
}

static void take_away(uintptr_t address) {
    uint32_t slot = slot_of(address);
    while (blocks[slot].address != address) {
        if (blocks[slot].address == 0)
            return; /* not a tensor */
        slot = (slot + 1) & (SLOTS - 1);
    }
    count->live_bytes -= blocks[slot].bytes;
    blocks[slot].address = 0;
    /* Those behind it move up, so that a search may stop at the first empty slot. */
    uint32_t hole = slot;
    for (uint32_t i = (slot + 1) & (SLOTS - 1); blocks[i].address != 0; i = (i + 1) & (SLOTS - 1)) {
        uint32_t home = slot_of(blocks[i].address);
        if (((i - home) & (SLOTS - 1)) >= ((i - hole) & (SLOTS - 1))) {
            blocks[hole] = blocks[i];
            blocks[i].address = 0;
            hole = i;
        }
    }
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    if (next_memalign == NULL) { /* before the constructor */
        next_memalign = (memalign_function)dlsym(RTLD_NEXT, "posix_memalign");
        if (next_memalign == NULL)
            return ENOMEM;
    }
    int failed = next_memalign(out, alignment, bytes);
    if (failed || count == NULL || alignment != TENSOR_ALIGNMENT)
        return failed;
    void *caller = __builtin_return_address(0);
    pthread_mutex_lock(&lock);
    if (is_torch(caller))
        add((uintptr_t)*out, bytes);
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *pointer) {
    if (next_free == NULL) {
        next_free = (free_function)dlsym(RTLD_NEXT, "free");
        if (next_free == NULL)
            return;
    }
    uintptr_t address = (uintptr_t)pointer;
    if (count != NULL && address != 0 && address % TENSOR_ALIGNMENT == 0) {
        pthread_mutex_lock(&lock);
        take_away(address);
        pthread_mutex_unlock(&lock);
    }
    next_free(pointer);
}
