// The memory of the pretended cards: blocks, and virtual memory by ROCr's rules.
//
// A card's memory is a memory file, of which the processor sees nothing through the addresses that the runtime hands
// out for virtual memory: only copies and fills get there, and only where a handle is mapped and access was granted.
// Handles hold no open file, as in ROCm up to 7.2.

#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// A part of a card's file is used once, until nothing of the card is left: 8 TiB of addresses, none of them backed.
#define FILE_BYTES (8ull << 40)

struct card {
    int file;
    char *view;
    uint64_t next, used;
};
struct block {
    char *base;
    size_t bytes;
    uint64_t agent;
    struct block *below;
};
struct memory {
    uint64_t agent, offset;
    size_t bytes;
    unsigned references, mappings;
    struct memory *below;
};
struct span {
    char *base;
    size_t bytes;
    unsigned mappings;
    struct span *below;
};
struct mapping {
    char *base;
    size_t bytes;
    struct memory *memory;
    struct span *span;
    hsa_access_permission_t access[AGENTS];
    struct mapping *below;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct card cards[AGENTS];
static struct block *blocks;
static struct memory *memories;
static struct span *spans;
static struct mapping *mappings;
static unsigned maps_asked, maps_done;

#define COUNT(list, count) \
    unsigned count = 0;    \
    for (__typeof__(list) it = list; it; it = it->below) count++

#define UNLINK(list, what)                                      \
    for (__typeof__(&list) at = &list; *at; at = &(*at)->below) \
        if (*at == (what)) {                                    \
            *at = (what)->below;                                \
            break;                                              \
        }

__attribute__((constructor)) static void make_cards(void) {
    for (int agent = FIRST_GPU; agent <= LAST_GPU; agent++) {
        struct card *card = &cards[agent];
        card->file = memfd_create("fake-vram", MFD_CLOEXEC);
        if (card->file < 0 || ftruncate(card->file, FILE_BYTES)) abort();
        card->view = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, card->file, 0);
        if (card->view == MAP_FAILED) abort();
    }
}

// With FAKE_HSA_REPORT=1: what the runtime had not given back when the process ended.
__attribute__((destructor)) static void report(void) {
    if (!getenv("FAKE_HSA_REPORT")) return;
    COUNT(spans, span_count);
    COUNT(mappings, mapping_count);
    COUNT(memories, memory_count);
    fprintf(stderr, "fake HSA: %u maps done; left at the end: %u spans, %u mappings, %u handles\n", maps_done,
            span_count, mapping_count, memory_count);
}

uint64_t vram_free(uint64_t agent) { return VRAM_BYTES - cards[agent].used; }

static bool take(struct card *card, size_t bytes) {
    if (bytes > VRAM_BYTES - card->used) return false;
    card->used += bytes;
    return true;
}

// Blocks.

hsa_status_t hsa_amd_memory_pool_allocate(hsa_amd_memory_pool_t pool, size_t bytes, uint32_t flags, void **out) {
    (void)flags;
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    uint64_t agent = is_vram(pool.handle) ? vram_agent(pool.handle) : CPU;
    struct block *block = malloc(sizeof *block);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_mutex_lock(&lock);
    bool fits = block && base != MAP_FAILED && (agent == CPU || take(&cards[agent], bytes));
    if (fits) {
        *block = (struct block){base, bytes, agent, blocks};
        blocks = block;
        *out = base;
    }
    pthread_mutex_unlock(&lock);
    if (fits) return HSA_STATUS_SUCCESS;
    if (base != MAP_FAILED) munmap(base, bytes);
    free(block);
    return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
}

static struct block *block_at(const char *address) {
    for (struct block *it = blocks; it; it = it->below)
        if (address >= it->base && address < it->base + it->bytes) return it;
    return NULL;
}

hsa_status_t hsa_amd_memory_pool_free(void *base) {
    if (!base) return HSA_STATUS_SUCCESS;
    pthread_mutex_lock(&lock);
    struct block *block = block_at(base);
    if (block && block->base == base) {
        UNLINK(blocks, block);
        if (block->agent != CPU) cards[block->agent].used -= block->bytes;
    } else {
        block = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (!block) return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    munmap(block->base, block->bytes);
    free(block);
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_pointer_info(const void *pointer, hsa_amd_pointer_info_t *info, void *(*alloc)(size_t),
                                  uint32_t *count, hsa_agent_t **agents) {
    (void)alloc;
    uint32_t size = info->size;
    memset(info, 0, size);
    info->size = size;
    info->type = HSA_EXT_POINTER_TYPE_UNKNOWN;
    if (count) *count = 0;
    if (agents) *agents = NULL;
    pthread_mutex_lock(&lock);
    struct block *block = block_at(pointer);
    if (block) {
        info->type = HSA_EXT_POINTER_TYPE_HSA;
        info->agentBaseAddress = info->hostBaseAddress = block->base;
        info->sizeInBytes = block->bytes;
        info->agentOwner.handle = block->agent;
        info->global_flags = block->agent == CPU ? HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED
                                                 : HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED;
    }
    pthread_mutex_unlock(&lock);
    return HSA_STATUS_SUCCESS;
}

// Virtual memory.

static hsa_status_t reserve(void **out, size_t bytes, uint64_t hint, uint64_t align) {
    // Larger spans come out at multiples of 2 MiB, whatever was asked.
    if (bytes >= 2 << 20 && align < 2 << 20) align = 2 << 20;
    if (align < PAGE) align = PAGE;
    struct span *span = malloc(sizeof *span);
    if (!span || !bytes || bytes % PAGE || align & (align - 1)) {
        free(span);
        return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *base = MAP_FAILED;
    if (hint && hint % align == 0) base = mmap((void *)hint, bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (base == MAP_FAILED) {
        char *room = mmap(NULL, bytes + align, PROT_NONE, flags, -1, 0);
        if (room == MAP_FAILED) {
            free(span);
            return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
        }
        base = (char *)(((uint64_t)room + align - 1) & ~(align - 1));
        if (base > room) munmap(room, base - room);
        if (room + align > base) munmap(base + bytes, room + align - base);
    }
    pthread_mutex_lock(&lock);
    *span = (struct span){base, bytes, 0, spans};
    spans = span;
    pthread_mutex_unlock(&lock);
    *out = base;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_vmem_address_reserve(void **va, size_t size, uint64_t address, uint64_t flags) {
    (void)flags;
    return reserve(va, size, address, 0);
}

hsa_status_t hsa_amd_vmem_address_reserve_align(void **va, size_t size, uint64_t address, uint64_t alignment,
                                                uint64_t flags) {
    (void)flags;
    return reserve(va, size, address, alignment);
}

hsa_status_t hsa_amd_vmem_address_free(void *va, size_t size) {
    hsa_status_t status = HSA_STATUS_SUCCESS;
    pthread_mutex_lock(&lock);
    struct span *span = spans;
    while (span && span->base != va) span = span->below;
    if (!span) {
        status = HSA_STATUS_ERROR_INVALID_ALLOCATION;
    } else if (span->bytes != size) {
        status = HSA_STATUS_ERROR_INVALID_ARGUMENT;
    } else if (span->mappings) {
        status = HSA_STATUS_ERROR_RESOURCE_FREE;
    } else {
        UNLINK(spans, span);
        munmap(va, size);
        free(span);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

// Gives a handle's memory back once nothing holds it.
static void drop_unused(struct memory *memory) {
    if (memory->references || memory->mappings) return;
    struct card *card = &cards[memory->agent];
    fallocate(card->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, memory->bytes);
    card->used -= memory->bytes;
    UNLINK(memories, memory);
    free(memory);
}

hsa_status_t hsa_amd_vmem_handle_create(hsa_amd_memory_pool_t pool, size_t size, hsa_amd_memory_type_t type,
                                        uint64_t flags, hsa_amd_vmem_alloc_handle_t *out) {
    (void)type, (void)flags;
    if (!is_vram(pool.handle) || !size || size % PAGE) return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    struct memory *memory = malloc(sizeof *memory);
    if (!memory) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    hsa_status_t status = HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    pthread_mutex_lock(&lock);
    struct card *card = &cards[vram_agent(pool.handle)];
    if (!card->used) card->next = 0;
    if (size <= FILE_BYTES - card->next && take(card, size)) {
        *memory = (struct memory){vram_agent(pool.handle), card->next, size, 1, 0, memories};
        memories = memory;
        card->next += size;
        out->handle = (uint64_t)memory;
        status = HSA_STATUS_SUCCESS;
    } else {
        free(memory);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static struct memory *memory_of(hsa_amd_vmem_alloc_handle_t handle) {
    for (struct memory *it = memories; it; it = it->below)
        if ((uint64_t)it == handle.handle) return it;
    return NULL;
}

hsa_status_t hsa_amd_vmem_handle_release(hsa_amd_vmem_alloc_handle_t handle) {
    pthread_mutex_lock(&lock);
    struct memory *memory = memory_of(handle);
    bool held = memory && memory->references;
    if (held) {
        memory->references--;
        drop_unused(memory);
    }
    pthread_mutex_unlock(&lock);
    return held ? HSA_STATUS_SUCCESS : HSA_STATUS_ERROR_INVALID_ALLOCATION;
}

static struct mapping *mapping_at(const char *base) {
    struct mapping *it = mappings;
    while (it && it->base != base) it = it->below;
    return it;
}

static struct span *span_round(const char *base, size_t bytes) {
    struct span *it = spans;
    while (it && !(base >= it->base && bytes <= it->bytes && base - it->base <= (ptrdiff_t)(it->bytes - bytes)))
        it = it->below;
    return it;
}

hsa_status_t hsa_amd_vmem_map(void *va, size_t size, size_t offset, hsa_amd_vmem_alloc_handle_t handle,
                              uint64_t flags) {
    (void)flags;
    // FAKE_HSA_FAIL_MAP=3: the third one fails, of which clr up to 7.2 tells nobody.
    const char *failing = getenv("FAKE_HSA_FAIL_MAP");
    hsa_status_t status = HSA_STATUS_ERROR_INVALID_ARGUMENT;
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    pthread_mutex_lock(&lock);
    struct memory *memory = memory_of(handle);
    struct span *span = span_round(va, size);
    bool overlaps = false;
    for (struct mapping *it = mappings; it; it = it->below)
        overlaps |= (char *)va < it->base + it->bytes && it->base < (char *)va + size;
    if (failing && strtoul(failing, NULL, 10) == ++maps_asked) {
        status = HSA_STATUS_ERROR;
    } else if (memory && span && !overlaps && size && !offset && size <= memory->bytes) {
        *mapping = (struct mapping){.base = va, .bytes = size, .memory = memory, .span = span, .below = mappings};
        mappings = mapping;
        span->mappings++;
        memory->mappings++;
        maps_done++;
        status = HSA_STATUS_SUCCESS;
        mapping = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(mapping);
    return status;
}

static void hide(void *va, size_t size) {
    mmap(va, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

hsa_status_t hsa_amd_vmem_unmap(void *va, size_t size) {
    hsa_status_t status = HSA_STATUS_SUCCESS;
    pthread_mutex_lock(&lock);
    struct mapping *mapping = mapping_at(va);
    if (!mapping) {
        status = HSA_STATUS_ERROR_INVALID_ALLOCATION;
    } else if (mapping->bytes != size) {
        status = HSA_STATUS_ERROR_INVALID_ARGUMENT;
    } else {
        if (mapping->access[CPU]) hide(va, size);
        mapping->span->mappings--;
        mapping->memory->mappings--;
        drop_unused(mapping->memory);
        UNLINK(mappings, mapping);
        free(mapping);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

// Lets the processor reach a mapping too, or no more.
static bool show(struct mapping *mapping, hsa_access_permission_t access) {
    if (!access) {
        hide(mapping->base, mapping->bytes);
        return true;
    }
    const int protection =
        (access & HSA_ACCESS_PERMISSION_RO ? PROT_READ : 0) | (access & HSA_ACCESS_PERMISSION_WO ? PROT_WRITE : 0);
    return mmap(mapping->base, mapping->bytes, protection, MAP_SHARED | MAP_FIXED, cards[mapping->memory->agent].file,
                mapping->memory->offset) != MAP_FAILED;
}

hsa_status_t hsa_amd_vmem_set_access(void *va, size_t size, const hsa_amd_memory_access_desc_t *desc, size_t count) {
    for (size_t n = 0; n < count; n++)
        if (desc[n].agent_handle.handle < CPU || desc[n].agent_handle.handle >= AGENTS)
            return HSA_STATUS_ERROR_INVALID_AGENT;
    hsa_status_t status = HSA_STATUS_SUCCESS;
    pthread_mutex_lock(&lock);
    // Whole mappings in a row; the last of them may reach further.
    char *end = (char *)va + size;
    if (!span_round(va, size)) status = HSA_STATUS_ERROR_INVALID_ARGUMENT;
    for (char *at = va; !status && at < end;) {
        struct mapping *mapping = mapping_at(at);
        if (!mapping)
            status = HSA_STATUS_ERROR_INVALID_ALLOCATION;
        else
            at += mapping->bytes;
    }
    for (char *at = va; !status && at < end;) {
        struct mapping *mapping = mapping_at(at);
        for (size_t n = 0; n < count && !status; n++) {
            const uint64_t agent = desc[n].agent_handle.handle;
            if (agent == CPU && !show(mapping, desc[n].permissions))
                status = HSA_STATUS_ERROR;
            else
                mapping->access[agent] = desc[n].permissions;
        }
        at += mapping->bytes;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static struct mapping *mapping_round(const char *address) {
    struct mapping *it = mappings;
    while (it && !(address >= it->base && address < it->base + it->bytes)) it = it->below;
    return it;
}

hsa_status_t hsa_amd_vmem_get_access(void *va, hsa_access_permission_t *access, hsa_agent_t agent) {
    *access = HSA_ACCESS_PERMISSION_NONE;
    if (!is_gpu(agent.handle)) return HSA_STATUS_ERROR_INVALID_AGENT;
    pthread_mutex_lock(&lock);
    struct mapping *mapping = mapping_round(va);
    if (mapping) *access = mapping->access[agent.handle];
    pthread_mutex_unlock(&lock);
    return mapping ? HSA_STATUS_SUCCESS : HSA_STATUS_ERROR_INVALID_ALLOCATION;
}

hsa_status_t hsa_amd_vmem_retain_alloc_handle(hsa_amd_vmem_alloc_handle_t *handle, void *va) {
    pthread_mutex_lock(&lock);
    struct mapping *mapping = mapping_at(va);
    if (mapping) {
        mapping->memory->references++;
        handle->handle = (uint64_t)mapping->memory;
    }
    pthread_mutex_unlock(&lock);
    return mapping ? HSA_STATUS_SUCCESS : HSA_STATUS_ERROR_INVALID_ALLOCATION;
}

// An exported handle is a file with its place in it: enough for this process, which is where it can be imported.
struct exported {
    uint64_t process, memory;
};

hsa_status_t hsa_amd_vmem_export_shareable_handle(int *file, hsa_amd_vmem_alloc_handle_t handle, uint64_t flags) {
    (void)flags;
    *file = -1;
    pthread_mutex_lock(&lock);
    struct memory *memory = memory_of(handle);
    pthread_mutex_unlock(&lock);
    if (!memory) return HSA_STATUS_ERROR_INVALID_ALLOCATION;
    const struct exported exported = {getpid(), handle.handle};
    *file = memfd_create("fake-dmabuf", MFD_CLOEXEC);
    if (*file < 0 || write(*file, &exported, sizeof exported) != sizeof exported)
        return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_vmem_import_shareable_handle(int file, hsa_amd_vmem_alloc_handle_t *handle) {
    struct exported exported;
    if (pread(file, &exported, sizeof exported, 0) != sizeof exported || exported.process != (uint64_t)getpid())
        return HSA_STATUS_ERROR_INCOMPATIBLE_ARGUMENTS;
    handle->handle = exported.memory;
    pthread_mutex_lock(&lock);
    struct memory *memory = memory_of(*handle);
    if (memory) memory->references++;
    pthread_mutex_unlock(&lock);
    return memory ? HSA_STATUS_SUCCESS : HSA_STATUS_ERROR_INVALID_ALLOCATION;
}

// What a card does with memory.

// Where the bytes from an address on are, and how many of them lie in a row there.
static char *reach(uint64_t agent, uint64_t address, size_t *bytes, hsa_access_permission_t access) {
    char *at = (char *)address;
    struct mapping *mapping = mapping_round(at);
    if (!mapping) {
        // Outside of virtual memory the card sees what the processor sees.
        if (!span_round(at, 1)) return at;
        fprintf(stderr, "fake HSA: page fault: agent %lu at %p, where nothing is mapped\n", agent, (void *)at);
        abort();
    }
    if ((mapping->access[agent] & access) != access) {
        fprintf(stderr, "fake HSA: page fault: agent %lu at %p, with access %d of %d\n", agent, (void *)at,
                mapping->access[agent], access);
        abort();
    }
    const size_t left = mapping->base + mapping->bytes - at;
    if (*bytes > left) *bytes = left;
    return cards[mapping->memory->agent].view + mapping->memory->offset + (at - mapping->base);
}

void gpu_copy(uint64_t agent, uint64_t dst, uint64_t src, size_t bytes) {
    pthread_mutex_lock(&lock);
    while (bytes) {
        size_t now = bytes;
        char *to = reach(agent, dst, &now, HSA_ACCESS_PERMISSION_WO);
        char *from = reach(agent, src, &now, HSA_ACCESS_PERMISSION_RO);
        memmove(to, from, now);
        dst += now, src += now, bytes -= now;
    }
    pthread_mutex_unlock(&lock);
}

void gpu_fill(uint64_t agent, uint64_t dst, const void *pattern, size_t pattern_bytes, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (size_t done = 0; done < bytes;) {
        size_t now = bytes - done;
        char *to = reach(agent, dst + done, &now, HSA_ACCESS_PERMISSION_WO);
        for (size_t n = 0; n < now; n++) to[n] = ((const char *)pattern)[(done + n) % pattern_bytes];
        done += now;
    }
    pthread_mutex_unlock(&lock);
}
