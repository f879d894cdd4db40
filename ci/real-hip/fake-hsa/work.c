// A pretended libhsa-runtime64: four MI210 that are not there, for AMD's real HIP runtime to run on.
//
// HIP's runtime (clr) keeps its own books of spans, handles and mappings on top of ROCr's, and has bugs of its own
// there. With this library in place of ROCr all of that code runs on a machine without a card: `ci/real-hip.sh` does so
// with REAL_HIP_STUB=1. Copies and fills are carried out; other kernels are not. What is ROCr's own, the kernel's or
// the card's (when memory really comes back, page tables, time) cannot be seen this way.

#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void trace(const char *format, ...) {
    if (!getenv("FAKE_HSA_TRACE")) return;
    va_list words;
    va_start(words, format);
    fprintf(stderr, "fake HSA: ");
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

// Signals. One lock and one condition for all of them: nothing here has to be fast.

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static amd_signal_t *signal_of(hsa_signal_t signal) { return (amd_signal_t *)signal.handle; }

static int64_t load(hsa_signal_t signal) { return __atomic_load_n(&signal_of(signal)->value, __ATOMIC_ACQUIRE); }

static void store(hsa_signal_t signal, int64_t value) {
    pthread_mutex_lock(&lock);
    __atomic_store_n(&signal_of(signal)->value, value, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void add(hsa_signal_t signal, int64_t value) {
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&signal_of(signal)->value, value, __ATOMIC_ACQ_REL);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static bool holds(int64_t value, hsa_signal_condition_t condition, int64_t than) {
    switch (condition) {
        case HSA_SIGNAL_CONDITION_EQ: return value == than;
        case HSA_SIGNAL_CONDITION_NE: return value != than;
        case HSA_SIGNAL_CONDITION_LT: return value < than;
        default: return value >= than;
    }
}

// Waits for a change, with the lock held. Not for long, since memory is also written without a word.
static void wait_for_change(void) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 2000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &until);
}

static int64_t wait_until(hsa_signal_t signal, int64_t mask, hsa_signal_condition_t condition, int64_t than,
                          uint64_t timeout) {
    const uint64_t begun = now();
    pthread_mutex_lock(&lock);
    while (!holds(load(signal) & mask, condition, than) && now() - begun < timeout) wait_for_change();
    pthread_mutex_unlock(&lock);
    return load(signal);
}

static void begin(hsa_signal_t signal) {
    if (signal.handle) signal_of(signal)->start_ts = now();
}

static void complete(hsa_signal_t signal) {
    if (!signal.handle) return;
    signal_of(signal)->end_ts = now();
    add(signal, -1);
}

hsa_status_t hsa_signal_create(hsa_signal_value_t value, uint32_t count, const hsa_agent_t *consumers,
                               hsa_signal_t *out) {
    (void)count, (void)consumers;
    amd_signal_t *signal = aligned_alloc(AMD_SIGNAL_ALIGN_BYTES, sizeof *signal);
    if (!signal) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    memset(signal, 0, sizeof *signal);
    signal->kind = AMD_SIGNAL_KIND_USER;
    signal->value = value;
    out->handle = (uint64_t)signal;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_signal_create(hsa_signal_value_t value, uint32_t count, const hsa_agent_t *consumers,
                                   uint64_t attributes, hsa_signal_t *out) {
    (void)attributes;
    return hsa_signal_create(value, count, consumers, out);
}

hsa_status_t hsa_signal_destroy(hsa_signal_t signal) {
    free(signal_of(signal));
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_signal_value_pointer(hsa_signal_t signal, volatile hsa_signal_value_t **out) {
    *out = (volatile hsa_signal_value_t *)&signal_of(signal)->value;
    return HSA_STATUS_SUCCESS;
}

hsa_signal_value_t hsa_signal_load_relaxed(hsa_signal_t signal) { return load(signal); }
void hsa_signal_store_relaxed(hsa_signal_t signal, hsa_signal_value_t value) { store(signal, value); }
void hsa_signal_store_screlease(hsa_signal_t signal, hsa_signal_value_t value) { store(signal, value); }
void hsa_signal_silent_store_relaxed(hsa_signal_t signal, hsa_signal_value_t value) { store(signal, value); }
void hsa_signal_add_relaxed(hsa_signal_t signal, hsa_signal_value_t value) { add(signal, value); }
void hsa_signal_subtract_relaxed(hsa_signal_t signal, hsa_signal_value_t value) { add(signal, -value); }

hsa_signal_value_t hsa_signal_wait_scacquire(hsa_signal_t signal, hsa_signal_condition_t condition,
                                             hsa_signal_value_t than, uint64_t timeout, hsa_wait_state_t state) {
    (void)state;
    return wait_until(signal, -1, condition, than, timeout);
}

// Handlers of signals, called by a thread of their own.

struct handler {
    hsa_signal_t signal;
    hsa_signal_condition_t condition;
    hsa_signal_value_t than;
    hsa_amd_signal_handler call;
    void *argument;
    struct handler *below;
};
static struct handler *handlers;

static void *handle_signals(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) {
        struct handler **at = &handlers;
        while (*at && !holds(load((*at)->signal), (*at)->condition, (*at)->than)) at = &(*at)->below;
        struct handler *due = *at;
        if (!due) {
            wait_for_change();
            continue;
        }
        *at = due->below;
        pthread_mutex_unlock(&lock);
        const bool again = due->call(load(due->signal), due->argument);
        pthread_mutex_lock(&lock);
        if (again) {
            due->below = handlers;
            handlers = due;
        } else {
            free(due);
        }
    }
    return unused;
}

hsa_status_t hsa_amd_signal_async_handler(hsa_signal_t signal, hsa_signal_condition_t condition,
                                          hsa_signal_value_t than, hsa_amd_signal_handler call, void *argument) {
    static bool started;
    struct handler *handler = malloc(sizeof *handler);
    if (!handler) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    pthread_mutex_lock(&lock);
    *handler = (struct handler){signal, condition, than, call, argument, handlers};
    handlers = handler;
    pthread_t thread;
    if (!started && !pthread_create(&thread, NULL, handle_signals, NULL)) {
        pthread_detach(thread);
        started = true;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return HSA_STATUS_SUCCESS;
}

// Kernels: those of the runtime's own that copy and fill are known by their names.

static void run_kernel(uint64_t agent, const hsa_kernel_dispatch_packet_t *packet) {
    const struct kernel *kernel = (const struct kernel *)packet->kernel_object;
    if (!strcmp(kernel->name, "__amd_rocclr_fillBufferAligned.kd")) {
        const struct {
            uint64_t to, pattern;
            uint32_t count, element;
            uint64_t end;
        } *said = packet->kernarg_address;
        gpu_fill(agent, said->to, (const void *)said->pattern, (size_t)said->count * said->element,
                 said->end - said->to);
    } else if (!strcmp(kernel->name, "__amd_rocclr_copyBuffer.kd")) {
        const struct {
            uint64_t from, to, bytes;
        } *said = packet->kernarg_address;
        gpu_copy(agent, said->to, said->from, said->bytes);
    } else {
        trace("kernel %s is not run", kernel->name);
    }
}

// Queues: a thread each, which takes packet after packet.

struct queue {
    amd_queue_v2_t amd; // The runtime looks into it: must be first.
    uint64_t agent;
    pthread_t thread;
    bool stopped;
};

static uint16_t type_of(const hsa_kernel_dispatch_packet_t *packet) {
    return __atomic_load_n(&packet->header, __ATOMIC_ACQUIRE) >> HSA_PACKET_HEADER_TYPE &
           ((1 << HSA_PACKET_HEADER_WIDTH_TYPE) - 1);
}

static void run_packet(uint64_t agent, hsa_kernel_dispatch_packet_t *packet) {
    const hsa_signal_t done = packet->completion_signal;
    begin(done);
    switch (type_of(packet)) {
        case HSA_PACKET_TYPE_KERNEL_DISPATCH: run_kernel(agent, packet); break;
        case HSA_PACKET_TYPE_BARRIER_AND: {
            const hsa_barrier_and_packet_t *barrier = (hsa_barrier_and_packet_t *)packet;
            for (int n = 0; n < 5; n++)
                if (barrier->dep_signal[n].handle)
                    wait_until(barrier->dep_signal[n], -1, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX);
            break;
        }
        case HSA_PACKET_TYPE_VENDOR_SPECIFIC: {
            const hsa_amd_barrier_value_packet_t *barrier = (hsa_amd_barrier_value_packet_t *)packet;
            if (barrier->header.AmdFormat == HSA_AMD_PACKET_TYPE_BARRIER_VALUE && barrier->signal.handle)
                wait_until(barrier->signal, barrier->mask, barrier->cond, barrier->value, UINT64_MAX);
            break;
        }
        default: trace("packet of type %d is passed over", type_of(packet));
    }
    complete(done);
}

static void *run_queue(void *argument) {
    struct queue *queue = argument;
    hsa_kernel_dispatch_packet_t *ring = queue->amd.hsa_queue.base_address;
    for (;;) {
        hsa_kernel_dispatch_packet_t *packet = &ring[queue->amd.read_dispatch_id % queue->amd.hsa_queue.size];
        pthread_mutex_lock(&lock);
        while (!queue->stopped && type_of(packet) == HSA_PACKET_TYPE_INVALID) wait_for_change();
        pthread_mutex_unlock(&lock);
        if (queue->stopped) return NULL;
        run_packet(queue->agent, packet);
        __atomic_store_n(&packet->header, HSA_PACKET_TYPE_INVALID << HSA_PACKET_HEADER_TYPE, __ATOMIC_RELEASE);
        __atomic_add_fetch(&queue->amd.read_dispatch_id, 1, __ATOMIC_RELEASE);
    }
}

hsa_status_t hsa_queue_create(hsa_agent_t agent, uint32_t size, hsa_queue_type32_t type,
                              void (*callback)(hsa_status_t, hsa_queue_t *, void *), void *data, uint32_t private_size,
                              uint32_t group_size, hsa_queue_t **out) {
    (void)callback, (void)data, (void)private_size, (void)group_size;
    static uint64_t last_id;
    struct queue *queue = aligned_alloc(AMD_QUEUE_ALIGN_BYTES, (sizeof *queue + 63) / 64 * 64);
    hsa_kernel_dispatch_packet_t *ring = aligned_alloc(64, size * sizeof *ring);
    if (!queue || !ring) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    memset(queue, 0, sizeof *queue);
    memset(ring, 0, size * sizeof *ring);
    for (uint32_t n = 0; n < size; n++) ring[n].header = HSA_PACKET_TYPE_INVALID << HSA_PACKET_HEADER_TYPE;
    queue->agent = agent.handle;
    queue->amd.hsa_queue.type = type;
    queue->amd.hsa_queue.features = HSA_QUEUE_FEATURE_KERNEL_DISPATCH;
    queue->amd.hsa_queue.base_address = ring;
    queue->amd.hsa_queue.size = size;
    queue->amd.hsa_queue.id = ++last_id;
    hsa_signal_create(-1, 0, NULL, &queue->amd.hsa_queue.doorbell_signal);
    if (pthread_create(&queue->thread, NULL, run_queue, queue)) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    *out = &queue->amd.hsa_queue;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_queue_destroy(hsa_queue_t *hsa_queue) {
    struct queue *queue = (struct queue *)hsa_queue;
    pthread_mutex_lock(&lock);
    queue->stopped = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(queue->thread, NULL);
    hsa_signal_destroy(hsa_queue->doorbell_signal);
    free(hsa_queue->base_address);
    free(queue);
    return HSA_STATUS_SUCCESS;
}

static amd_queue_v2_t *amd_queue(const hsa_queue_t *queue) { return (amd_queue_v2_t *)queue; }

uint64_t hsa_queue_load_read_index_relaxed(const hsa_queue_t *queue) {
    return __atomic_load_n(&amd_queue(queue)->read_dispatch_id, __ATOMIC_ACQUIRE);
}
uint64_t hsa_queue_load_read_index_scacquire(const hsa_queue_t *queue) {
    return hsa_queue_load_read_index_relaxed(queue);
}
uint64_t hsa_queue_load_write_index_relaxed(const hsa_queue_t *queue) {
    return __atomic_load_n(&amd_queue(queue)->write_dispatch_id, __ATOMIC_ACQUIRE);
}
uint64_t hsa_queue_add_write_index_screlease(const hsa_queue_t *queue, uint64_t value) {
    return __atomic_fetch_add(&amd_queue(queue)->write_dispatch_id, value, __ATOMIC_ACQ_REL);
}

// Copies by an engine: at once if nothing is to be waited for, else by a thread that waits.

struct copy {
    uint64_t agent, dst, src;
    size_t bytes;
    hsa_signal_t done;
    uint32_t count;
    hsa_signal_t before[];
};

static void *run_copy(void *argument) {
    struct copy *copy = argument;
    for (uint32_t n = 0; n < copy->count; n++) wait_until(copy->before[n], -1, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX);
    begin(copy->done);
    gpu_copy(copy->agent, copy->dst, copy->src, copy->bytes);
    complete(copy->done);
    free(copy);
    return NULL;
}

hsa_status_t hsa_amd_memory_async_copy(void *dst, hsa_agent_t dst_agent, const void *src, hsa_agent_t src_agent,
                                       size_t size, uint32_t count, const hsa_signal_t *before, hsa_signal_t done) {
    struct copy *copy = malloc(sizeof *copy + count * sizeof *before);
    if (!copy) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    const uint64_t agent = is_gpu(dst_agent.handle) ? dst_agent.handle : src_agent.handle;
    *copy = (struct copy){agent, (uint64_t)dst, (uint64_t)src, size, done, count};
    bool waits = false;
    for (uint32_t n = 0; n < count; n++) {
        copy->before[n] = before[n];
        waits |= load(before[n]) >= 1;
    }
    pthread_t thread;
    if (waits && !pthread_create(&thread, NULL, run_copy, copy))
        pthread_detach(thread);
    else
        run_copy(copy);
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_memory_async_copy_on_engine(void *dst, hsa_agent_t dst_agent, const void *src,
                                                 hsa_agent_t src_agent, size_t size, uint32_t count,
                                                 const hsa_signal_t *before, hsa_signal_t done,
                                                 hsa_amd_sdma_engine_id_t engine, bool force) {
    (void)engine, (void)force;
    return hsa_amd_memory_async_copy(dst, dst_agent, src, src_agent, size, count, before, done);
}

hsa_status_t hsa_amd_memory_copy_engine_status(hsa_agent_t dst, hsa_agent_t src, uint32_t *mask) {
    (void)dst, (void)src;
    *mask = HSA_AMD_SDMA_ENGINE_0 | HSA_AMD_SDMA_ENGINE_1;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_memory_get_preferred_copy_engine(hsa_agent_t dst, hsa_agent_t src, uint32_t *mask) {
    return hsa_amd_memory_copy_engine_status(dst, src, mask);
}

static hsa_status_t times(hsa_signal_t signal, uint64_t *start, uint64_t *end) {
    *start = signal_of(signal)->start_ts;
    *end = signal_of(signal)->end_ts;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_profiling_get_dispatch_time(hsa_agent_t agent, hsa_signal_t signal,
                                                 hsa_amd_profiling_dispatch_time_t *time) {
    (void)agent;
    return times(signal, &time->start, &time->end);
}

hsa_status_t hsa_amd_profiling_get_async_copy_time(hsa_signal_t signal, hsa_amd_profiling_async_copy_time_t *time) {
    return times(signal, &time->start, &time->end);
}

hsa_status_t hsa_memory_copy(void *dst, const void *src, size_t size) {
    gpu_copy(FIRST_GPU, (uint64_t)dst, (uint64_t)src, size);
    return HSA_STATUS_SUCCESS;
}
