// A CUDA driver for tests: two devices, host memory, and a memory of what was asked of it. Work on a stream is held
// back until someone waits for the stream, so that a copy that is not waited for is seen.
//
// -DONLY_INIT leaves every function out but cuInit, -DNO_VMM those of virtual memory management, -DNO_PIN those of
// page-locked memory, -DNO_ID cuCtxGetId;
// -DINIT=code makes cuInit fail, -DINIT=pause() hang.
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef INIT
#define INIT 0
#endif

typedef unsigned long long u64;
int cuInit(unsigned flags) { return flags ? 1 : INIT; }

#ifndef ONLY_INIT
typedef struct { unsigned type; int id; } Location;
typedef struct {
    unsigned type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Prop;
typedef struct { Location location; unsigned flags; } Access;
typedef struct { int device, retained, destroyed; u64 id; } Context;
typedef struct { Context *context; int destroyed; } Stream;
typedef struct { Stream *stream; u64 behind; int recorded; } Event;
typedef struct { int kind; char *dst; const char *src; size_t n; Stream *stream; u64 number; } Job;

#define GRANULE (2ull << 20)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Context contexts[2] = {{.device = 0, .id = 11}, {.device = 1, .id = 12}};
static _Thread_local Context *stack[16];
static _Thread_local int depth;
static Job jobs[256];
static u64 queued, done;
static int failing, capturing, waits_fail;
// How each thread gets on with captures; 2 is relaxed. And how many calls broke those that others have under way.
static _Thread_local unsigned mode;
static long broke;
static long handles, spans, maps, streams, events;
// Page-locked pieces, and how often the next ones are refused.
static struct { char *at; size_t n; int owned, flags; } pins[64];
static long pinned;
static int pin_fails_in;
static Prop last_prop;
static Access last_access;

// What tests ask and do.
int fake_depth(void) { return depth; }
int fake_retained(int device) { return contexts[device].retained; }
void fake_fail(int code) { failing = code; }
void fake_capture(int status) { capturing = status; }
void fake_rdma_prop(unsigned out[4]) {
    out[0] = last_prop.handle_types; out[1] = last_prop.flags.rdma; out[2] = last_prop.type;
    out[3] = (unsigned)last_prop.location.id;
}
long fake_broke(void) { return broke; }
long fake_mode(void) { return mode; }
long fake_alive(void) { return handles + spans + maps + streams + events + pinned; }
void fake_fail_waits(int times) { waits_fail = times; }
void fake_fail_pin(int nth) { pin_fails_in = nth; }
int fake_pin_flags(char *at) {
    for (int i = 0; i < 64; i++) if (pins[i].n && pins[i].at == at) return pins[i].flags;
    return -1;
}

static int enter(void) {
    broke += mode != 2;
    if (failing) return failing;
    if (!depth || !stack[depth - 1]) return 201;
    return stack[depth - 1]->destroyed ? 709 : 0;
}
#define ENTER do { int code = enter(); if (code) return code; } while (0)

int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int len, int device) {
    strncpy(name, device ? "Fake B" : "Fake A", (size_t)len);
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(device * 16 + i);
    return 0;
}
// Virtual memory and file descriptors, no fabric; RDMA on device 1 only; not integrated.
/* The compute capability. */
#ifndef MAJOR
#define MAJOR 9
#define MINOR 0
#endif
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (failing) return failing;
    if (attribute == 75) return *value = MAJOR, 0;
    if (attribute == 76) return *value = MINOR, 0;
    *value = attribute == 102 || attribute == 103 || (attribute == 110 && device == 1);
    return 0;
}
int cuDevicePrimaryCtxRetain(Context **c, int device) {
    *c = &contexts[device];
    contexts[device].retained++;
    contexts[device].destroyed = 0;
    return 0;
}
int cuDevicePrimaryCtxReset_v2(int device) { contexts[device].destroyed = 1; contexts[device].id += 100; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) {
    if (failing == 4) return 4;
    contexts[device].retained--;
    return 0;
}
int cuCtxGetCurrent(Context **c) { *c = depth ? stack[depth - 1] : NULL; return failing == 4 ? 4 : 0; }
int cuCtxPushCurrent_v2(Context *c) {
    if (failing == 4) return 4;
    if (!c || depth == 16) return 201;
    stack[depth++] = c;
    return 0;
}
int cuCtxPopCurrent_v2(Context **c) {
    if (!depth) return 201;
    *c = stack[--depth];
    return 0;
}
#ifndef NO_ID
int cuCtxGetId(Context *c, u64 *id) {
    if (failing == 4) return 4;
    if (c->destroyed) return 709;
    *id = c->id;
    return 0;
}
#endif

static void run_one(void) {
    Job *job = &jobs[done++ % 256];
    if (job->kind == 0) memcpy(job->dst, job->src, job->n);
    else memset(job->dst, job->kind - 1, job->n);
}
static int queue(int kind, void *dst, const void *src, size_t n, Stream *stream) {
    ENTER;
    if (stream && (stream->destroyed || stream->context != stack[depth - 1])) return 400;
    pthread_mutex_lock(&lock);
    if (queued - done == 256) run_one();
    jobs[queued % 256] = (Job){kind, dst, src, n, stream, queued};
    queued++;
    pthread_mutex_unlock(&lock);
    return 0;
}
static void drain(void) {
    pthread_mutex_lock(&lock);
    while (done < queued) run_one();
    pthread_mutex_unlock(&lock);
}
int cuCtxSynchronize(void) { ENTER; drain(); return 0; }
int cuStreamCreate(Stream **s, unsigned flags) {
    ENTER;
    if (flags != 1) return 1;
    *s = calloc(1, sizeof(Stream));
    (*s)->context = stack[depth - 1];
    streams++;
    return 0;
}
int cuStreamDestroy_v2(Stream *s) { ENTER; s->destroyed = 1; streams--; return 0; }
int cuStreamSynchronize(Stream *s) { ENTER; if (s && s->destroyed) return 400; if (waits_fail) return waits_fail--, 999; drain(); return 0; }
int cuThreadExchangeStreamCaptureMode(unsigned *m) { unsigned was = mode; mode = *m; *m = was; return 0; }
int cuStreamIsCapturing(Stream *s, unsigned *status) {
    ENTER;
    (void)s;
    if (capturing > 2) return capturing;
    *status = (unsigned)capturing;
    return 0;
}
// As seen on a card: host memory is one page-locked piece, part of one, or none at all.
static int crosses(const char *at, size_t n) {
    for (int i = 0; i < 64; i++) {
        if (!pins[i].n) continue;
        char *end = pins[i].at + pins[i].n;
        if (at < end && pins[i].at < at + n && (at < pins[i].at || at + n > end)) return 1;
    }
    return 0;
}
int cuMemcpyHtoDAsync_v2(u64 dst, const void *src, size_t n, Stream *s) {
    return crosses(src, n) ? 1 : queue(0, (void *)dst, src, n, s);
}
int cuMemcpyDtoHAsync_v2(void *dst, u64 src, size_t n, Stream *s) {
    return crosses(dst, n) ? 1 : queue(0, dst, (void *)src, n, s);
}
int cuMemcpyDtoDAsync_v2(u64 dst, u64 src, size_t n, Stream *s) { return queue(0, (void *)dst, (void *)src, n, s); }
int cuMemsetD8Async(u64 dst, unsigned char v, size_t n, Stream *s) { return queue(1 + v, (void *)dst, NULL, n, s); }
int cuEventCreate(Event **e, unsigned flags) {
    ENTER;
    if (flags != 2) return 1;
    *e = calloc(1, sizeof(Event));
    events++;
    return 0;
}
int cuEventRecord(Event *e, Stream *s) { ENTER; e->stream = s; e->behind = queued; e->recorded = 1; return 0; }
int cuEventQuery(Event *e) { ENTER; return !e->recorded || done >= e->behind ? 0 : 600; }
int cuEventSynchronize(Event *e) { ENTER; (void)e; drain(); return 0; }
int cuEventDestroy_v2(Event *e) { ENTER; free(e); events--; return 0; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) { ENTER; *free_ = 3ull << 30; *total = 4ull << 30; return 0; }
int cuMemAlloc_v2(u64 *addr, size_t n) { ENTER; *addr = (u64)malloc(n); return 0; }
int cuMemFree_v2(u64 addr) { ENTER; free((void *)addr); return 0; }

#ifndef NO_PIN
static int pin(char *at, size_t n, int owned, int flags) {
    if (pin_fails_in && !--pin_fails_in) return 2;
    for (int i = 0; i < 64; i++)
        if (pins[i].n && at < pins[i].at + pins[i].n && pins[i].at < at + n) return 712;
    for (int i = 0; i < 64; i++) {
        if (pins[i].n) continue;
        pins[i].at = at; pins[i].n = n; pins[i].owned = owned; pins[i].flags = flags;
        pinned++;
        return 0;
    }
    return 2;
}
static int unpin(char *at, int owned) {
    // Work that is still to be done on the memory would find it gone.
    for (u64 i = done; i < queued; i++)
        if (jobs[i % 256].dst == at || jobs[i % 256].src == at) abort();
    for (int i = 0; i < 64; i++) {
        if (!pins[i].n || pins[i].at != at) continue;
        if (pins[i].owned != owned) abort();
        unsigned char there[1];
        if (mincore(at, 1, there)) abort();
        pins[i].n = 0;
        pinned--;
        return 0;
    }
    return 713;
}
int cuMemHostRegister_v2(void *at, size_t n, unsigned flags) {
    ENTER;
    if (!n || flags & ~11u) return 1;
    return pin(at, n, 0, (int)flags);
}
int cuMemHostUnregister(void *at) { ENTER; return unpin(at, 0); }
int cuMemHostAlloc(void **at, size_t n, unsigned flags) {
    ENTER;
    if (!n || flags & ~7u) return 1;
    *at = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    memset(*at, 0, n);
    int code = pin(*at, n, 1, (int)flags);
    if (code) free(*at);
    return code;
}
int cuMemFreeHost(void *at) { ENTER; int code = unpin(at, 1); if (!code) free(at); return code; }
// Not the host's address, so that nobody takes it for granted.
int cuMemHostGetDevicePointer_v2(u64 *device, void *at, unsigned flags) {
    ENTER;
    if (flags) return 1;
    for (int i = 0; i < 64; i++)
        if (pins[i].n && pins[i].at <= (char *)at && (char *)at < pins[i].at + pins[i].n && pins[i].flags & 2) {
            *device = (u64)at + (1ull << 50);
            return 0;
        }
    return 1;
}
#endif

#ifndef NO_VMM
static size_t sizes[64];
int cuMemGetAllocationGranularity(size_t *n, const Prop *p, unsigned which) {
    ENTER;
    if (p->type != 1 || p->location.type != 1 || which > 1) return 1;
    *n = GRANULE;
    return 0;
}
int cuMemAddressReserve(u64 *addr, size_t n, size_t align, u64 hint, u64 flags) {
    ENTER;
    if (!n || n % GRANULE || align % GRANULE || hint || flags) return 1;
    if (n >= 1ull << 46) return 2;
    char *p = mmap(NULL, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return 2;
    *addr = ((u64)p + align - 1) / align * align;
    spans++;
    return 0;
}
int cuMemAddressFree(u64 addr, size_t n) { ENTER; munmap((void *)addr, n); spans--; return 0; }
int cuMemCreate(u64 *handle, size_t n, const Prop *p, u64 flags) {
    ENTER;
    if (!n || n % GRANULE || flags || p->type != 1 || p->location.type != 1 || p->win32) return 1;
    if (n > 3ull << 30) return 2;
    int fd = memfd_create("fake", 0);
    if (fd < 0 || ftruncate(fd, (off_t)n)) return 304;
    sizes[fd % 64] = n;
    last_prop = *p;
    *handle = (u64)fd + 1000;
    handles++;
    return 0;
}
int cuMemRelease(u64 handle) { ENTER; handles--; return close((int)(handle - 1000)) ? 400 : 0; }
int cuMemMap(u64 addr, size_t n, size_t offset, u64 handle, u64 flags) {
    ENTER;
    if (offset || flags) return 801;
    int fd = (int)(handle - 1000);
    maps++;
    return mmap((void *)addr, n, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ? 1 : 0;
}
int cuMemUnmap(u64 addr, size_t n) {
    ENTER;
    mmap((void *)addr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    maps--;
    return 0;
}
int cuMemSetAccess(u64 addr, size_t n, const Access *access, size_t count) {
    ENTER;
    if (count != 1 || access->location.type != 1 || access->location.id != stack[depth - 1]->device) return 1;
    last_access = *access;
    return access->flags == 3 && !mprotect((void *)addr, n, PROT_READ | PROT_WRITE) ? 0 : 1;
}
int cuMemExportToShareableHandle(int *out, u64 handle, unsigned kind, u64 flags) {
    ENTER;
    if (kind != 1 || flags) return 1;
    *out = dup((int)(handle - 1000));
    return 0;
}
int cuMemImportFromShareableHandle(u64 *handle, void *fd, unsigned kind) {
    ENTER;
    if (kind != 1) return 1;
    *handle = (u64)dup((int)(size_t)fd) + 1000;
    handles++;
    return 0;
}
#endif
#endif
