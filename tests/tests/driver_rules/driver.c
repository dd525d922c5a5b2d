/* A CUDA driver without a device, for tests of what this crate gives a driver: memory is the host's, kernels do nothing, and all other work is done at once. It prints
   what streams and graphs are told, and follows the rules of recordings: which streams an event takes into one, and what spoils one. With DRIVER_PAUSES in
   the environment, the answer whether a stream is recorded takes 0.2 s, in which other threads may begin a recording. Each page of memory is an allocation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define SAY(...) do { printf("\ndriver: " __VA_ARGS__); printf("\n"); fflush(stdout); } while (0)

typedef struct { int number; unsigned long capture; } Stream;
typedef struct { unsigned long capture; int stream; } Event;
typedef struct { int number; } Graph;
static Stream *streams[100];
static int stream_count, graph_count;
static unsigned long captures;
static int spoiled;
static int contexts[2];
static __thread void *current;

int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int error, const char **to) { *to = 0; return error ? 1 : 1; }
int cuGetErrorString(int error, const char **to) { *to = 0; return error ? 1 : 1; }
int cuDriverGetVersion(int *to) { *to = 12090; return 0; }
int cuDeviceGetCount(int *to) { *to = 2; return 0; }
int cuDeviceGet(int *to, int ordinal) { *to = ordinal; return 0; }
/* Compute capability 8.0, and 132 multiprocessors. */
int cuDeviceGetAttribute(int *to, int attribute) { *to = attribute == 75 ? 8 : attribute == 16 ? 132 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **to, int device) { *to = &contexts[device]; return 0; }
int cuDevicePrimaryCtxRelease_v2(void) { return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetCurrent(void **to) { *to = current; return 0; }

int cuModuleLoadDataEx(void **to) { *to = to; return 0; }
int cuModuleGetFunction(void **to) { *to = to; return 0; }
int cuModuleUnload(void) { return 0; }
int cuMemAlloc_v2(void **to, unsigned long bytes) { return posix_memalign(to, 4096, bytes) ? 2 : 0; }
int cuMemFree_v2(void *memory) { free(memory); return 0; }
int cuMemGetAddressRange_v2(unsigned long *base, unsigned long *bytes, unsigned long address) {
    *base = address / 4096 * 4096;
    *bytes = 4096;
    return 0;
}
int cuMemHostAlloc(void **to, unsigned long bytes) { *to = malloc(bytes); return 0; }
int cuMemAllocHost_v2(void **to, unsigned long bytes) { *to = malloc(bytes); return 0; }
int cuMemFreeHost(void *memory) { free(memory); return 0; }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, unsigned long bytes) { memcpy(to, from, bytes); SAY("upload to %p", to); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, unsigned long bytes) { memcpy(to, from, bytes); return 0; }
int cuMemsetD8Async(void *to, unsigned char value, unsigned long bytes) { memset(to, value, bytes); return 0; }

int cuStreamCreateWithPriority(Stream **to) {
    Stream *made = calloc(1, sizeof *made);
    made->number = ++stream_count;
    *to = streams[made->number] = made;
    return 0;
}
int cuStreamDestroy_v2(Stream *stream) { SAY("stream %d ends", stream->number); return 0; }
int cuStreamSynchronize(Stream *stream) {
    if (stream->capture) { spoiled = 1; return 900; }
    return 0;
}
int cuStreamBeginCapture_v2(Stream *stream) {
    if (stream->capture) { spoiled = 1; return 901; }
    stream->capture = ++captures;
    spoiled = 0;
    return 0;
}
int cuStreamGetCaptureInfo_v2(Stream *stream, unsigned *status, unsigned long *id) {
    *status = !stream->capture ? 0 : spoiled ? 2 : 1;
    if (*status == 1) *id = stream->capture;
    if (getenv("DRIVER_PAUSES")) usleep(200000);
    return 0;
}
int cuStreamEndCapture(Stream *stream, Graph **to) {
    unsigned long ended = stream->capture;
    for (int each = 1; each <= stream_count; each++) if (streams[each]->capture == ended) streams[each]->capture = 0;
    *to = 0;
    if (spoiled) return 901;
    *to = calloc(1, sizeof **to);
    return 0;
}
int cuGraphInstantiateWithFlags(Graph **to) {
    *to = calloc(1, sizeof **to);
    (*to)->number = ++graph_count;
    return 0;
}
int cuGraphDestroy(Graph *graph) { free(graph); return 0; }
int cuGraphExecDestroy(Graph *graph) { SAY("graph %d ends", graph->number); return 0; }
int cuGraphLaunch(Graph *graph, Stream *stream) {
    if (stream->capture) { spoiled = 1; return 900; }
    SAY("graph %d is launched by stream %d", graph->number, stream->number);
    return 0;
}

int cuEventCreate(Event **to) { *to = calloc(1, sizeof **to); return 0; }
int cuEventDestroy_v2(Event *event) { free(event); return 0; }
int cuEventRecord(Event *event, Stream *stream) {
    event->capture = stream->capture;
    event->stream = stream->number;
    return 0;
}
int cuEventQuery(Event *event) {
    if (event->capture) { spoiled = 1; return 907; }
    return 0;
}
int cuEventSynchronize(Event *event) { return cuEventQuery(event); }
int cuStreamWaitEvent(Stream *stream, Event *event) {
    if (stream->capture && stream->capture != event->capture) { spoiled = 1; return event->capture ? 903 : 905; }
    stream->capture = event->capture;
    SAY("stream %d waits for stream %d%s", stream->number, event->stream, event->capture ? ", recorded" : "");
    return 0;
}
/* What gradsync gives a launch, up to the stream: the function, the blocks and threads of three dimensions, and bytes of shared memory. */
int cuLaunchKernel(
    void *function, unsigned x, unsigned y, unsigned z, unsigned u, unsigned v, unsigned w, unsigned bytes, Stream *stream
) {
    (void)function, (void)x, (void)y, (void)z, (void)u, (void)v, (void)w, (void)bytes;
    SAY("kernel on stream %d%s", stream->number, stream->capture ? ", recorded" : "");
    return 0;
}
int cuGetProcAddress(const char *name, void **to) { (void)name; *to = 0; return 0; }
