/* A stand-in for NVML: as many GPUs as the file $NVML_STAND_IN has lines, each with the bytes in all, the driver's own
   and those used by processes, and then, if it tells of them, a number and bytes for each process; "lost" is a GPU that
   does not answer. While there is the file's twin `.slow`, for up to 30 s, nobody hears what is in use. Each start adds a
   byte to the file's twin `.opened`. */

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

static const char *file(void) {
    const char *path = getenv("NVML_STAND_IN");
    return path ? path : "/dev/null";
}

/* The line of a GPU, counted from 1, or nothing. */
static int line(size_t gpu, char *text, int size) {
    FILE *stream = fopen(file(), "r");
    int found = 0;
    while (stream && gpu-- && (found = fgets(text, size, stream) != NULL)) {}
    if (stream) fclose(stream);
    return found;
}

int nvmlInit_v2(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s.opened", file());
    FILE *stream = fopen(path, "a");
    if (stream) {
        fputc('.', stream);
        fclose(stream);
    }
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    char text[100];
    *device = (void *)(size_t)(index + 1);
    return line(index + 1, text, sizeof text) ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, nvmlMemory_v2_t *memory) {
    char text[100];
    char path[4096];
    snprintf(path, sizeof path, "%s.slow", file());
    for (int waited = 0; waited < 30000 && !access(path, F_OK); waited++) usleep(1000);
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID_ARGUMENT;
    if (!line((size_t)device, text, sizeof text)) return GPU_IS_LOST;
    int count = sscanf(text, "%llu %llu %llu", &memory->total, &memory->reserved, &memory->used);
    if (count != 3) return GPU_IS_LOST;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, nvmlProcessInfo_t *processes) {
    char text[100];
    unsigned int room = *count;
    int at = 0, read = 0;
    if (!line((size_t)device, text, sizeof text)) return GPU_IS_LOST;
    if (sscanf(text, "%*u %*u %*u%n", &at) < 0 || !at) return GPU_IS_LOST;
    nvmlProcessInfo_t one = {0};
    for (*count = 0; sscanf(text + at, "%u %llu%n", &one.pid, &one.used, &read) == 2; at += read)
        if ((*count)++ < room) processes[*count - 1] = one;
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}
