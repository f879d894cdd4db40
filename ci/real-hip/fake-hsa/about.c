// What the pretended HSA says of itself, of its agents and pools; and the functions that have nothing to do.

#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ISA "amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-"

// Writes one value of a type.
#define GIVE(type, ...)                    \
    do {                                   \
        const type given = __VA_ARGS__;    \
        memcpy(out, &given, sizeof given); \
        return HSA_STATUS_SUCCESS;         \
    } while (0)
#define GIVE_TEXT(size, ...)              \
    do {                                  \
        memset(out, 0, size);             \
        snprintf(out, size, __VA_ARGS__); \
        return HSA_STATUS_SUCCESS;        \
    } while (0)

hsa_status_t hsa_system_get_info(hsa_system_info_t what, void *out) {
    switch ((int)what) {
        case HSA_SYSTEM_INFO_VERSION_MAJOR:
        case HSA_SYSTEM_INFO_VERSION_MINOR: GIVE(uint16_t, 1);
        case HSA_SYSTEM_INFO_TIMESTAMP_FREQUENCY: GIVE(uint64_t, 1000000000);
        case HSA_AMD_SYSTEM_INFO_SVM_SUPPORTED:
        case HSA_AMD_SYSTEM_INFO_SVM_ACCESSIBLE_BY_DEFAULT: GIVE(bool, false);
        case HSA_AMD_SYSTEM_INFO_VIRTUAL_MEM_API_SUPPORTED: GIVE(bool, true);
        default: trace("system info %#x is not known", what); return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
}

hsa_status_t hsa_agent_get_info(hsa_agent_t agent, hsa_agent_info_t what, void *out) {
    static uint32_t flush_register;
    const unsigned number = agent.handle - FIRST_GPU;
    switch ((int)what) {
        case HSA_AGENT_INFO_DEVICE:
            GIVE(hsa_device_type_t, is_gpu(agent.handle) ? HSA_DEVICE_TYPE_GPU : HSA_DEVICE_TYPE_CPU);
        case HSA_AGENT_INFO_NAME: GIVE_TEXT(64, "%s", is_gpu(agent.handle) ? "gfx90a" : "a processor");
        case HSA_AGENT_INFO_VENDOR_NAME: GIVE_TEXT(64, "AMD");
        case HSA_AMD_AGENT_INFO_PRODUCT_NAME: GIVE_TEXT(64, "AMD Instinct MI210 (pretended)");
        case HSA_AMD_AGENT_INFO_UUID: GIVE_TEXT(21, "GPU-%016x", 0xfa4e0000u + number);
        case HSA_AGENT_INFO_PROFILE: GIVE(hsa_profile_t, HSA_PROFILE_BASE);
        case HSA_AGENT_INFO_FEATURE: GIVE(uint32_t, HSA_AGENT_FEATURE_KERNEL_DISPATCH);
        case HSA_AGENT_INFO_NODE:
        case HSA_AMD_AGENT_INFO_DRIVER_NODE_ID: GIVE(uint32_t, agent.handle - CPU);
        case HSA_AGENT_INFO_VERSION_MAJOR:
        case HSA_AGENT_INFO_VERSION_MINOR: GIVE(uint16_t, 1);
        case HSA_AGENT_INFO_WAVEFRONT_SIZE: GIVE(uint32_t, 64);
        case HSA_AGENT_INFO_WORKGROUP_MAX_SIZE: GIVE(uint32_t, 1024);
        case HSA_AGENT_INFO_WORKGROUP_MAX_DIM: {
            const uint16_t most[3] = {1024, 1024, 1024};
            memcpy(out, most, sizeof most);
            return HSA_STATUS_SUCCESS;
        }
        case HSA_AGENT_INFO_QUEUE_MAX_SIZE: GIVE(uint32_t, 131072);
        case HSA_AGENT_INFO_QUEUES_MAX: GIVE(uint32_t, 128);
        case HSA_AGENT_INFO_CACHE_SIZE: {
            const uint32_t sizes[4] = {16 << 10, 8 << 20, 0, 0};
            memcpy(out, sizes, sizeof sizes);
            return HSA_STATUS_SUCCESS;
        }
        // None: no images either.
        case HSA_AGENT_INFO_EXTENSIONS: memset(out, 0, 128); return HSA_STATUS_SUCCESS;
        case HSA_AMD_AGENT_INFO_CHIP_ID: GIVE(uint32_t, 0x740f);
        case HSA_AMD_AGENT_INFO_ASIC_REVISION: GIVE(uint32_t, 1);
        case HSA_AMD_AGENT_INFO_CACHELINE_SIZE: GIVE(uint32_t, 128);
        case HSA_AMD_AGENT_INFO_COMPUTE_UNIT_COUNT:
        case HSA_AMD_AGENT_INFO_COOPERATIVE_COMPUTE_UNIT_COUNT: GIVE(uint32_t, 104);
        case HSA_AMD_AGENT_INFO_NUM_SIMDS_PER_CU: GIVE(uint32_t, 4);
        case HSA_AMD_AGENT_INFO_MAX_WAVES_PER_CU: GIVE(uint32_t, 32);
        case HSA_AMD_AGENT_INFO_NUM_SHADER_ENGINES: GIVE(uint32_t, 8);
        case HSA_AMD_AGENT_INFO_NUM_SHADER_ARRAYS_PER_SE: GIVE(uint32_t, 1);
        case HSA_AMD_AGENT_INFO_NUM_XCC: GIVE(uint32_t, 1);
        case HSA_AMD_AGENT_INFO_NUM_SDMA_ENG: GIVE(uint32_t, 2);
        case HSA_AMD_AGENT_INFO_NUM_SDMA_XGMI_ENG: GIVE(uint32_t, 0);
        case HSA_AMD_AGENT_INFO_MAX_CLOCK_FREQUENCY: GIVE(uint32_t, 1700);
        case HSA_AMD_AGENT_INFO_MEMORY_MAX_FREQUENCY: GIVE(uint32_t, 1600);
        case HSA_AMD_AGENT_INFO_MEMORY_WIDTH: GIVE(uint32_t, 4096);
        case HSA_AMD_AGENT_INFO_TIMESTAMP_FREQUENCY: GIVE(uint64_t, 100000000);
        case HSA_AMD_AGENT_INFO_BDFID: GIVE(uint32_t, (number + 3) << 8);
        case HSA_AMD_AGENT_INFO_DOMAIN: GIVE(uint32_t, 0);
        case HSA_AMD_AGENT_INFO_COOPERATIVE_QUEUES: GIVE(bool, false);
        case HSA_AMD_AGENT_INFO_SVM_DIRECT_HOST_ACCESS: GIVE(bool, false);
        case HSA_AMD_AGENT_INFO_HDP_FLUSH: GIVE(hsa_amd_hdp_flush_t, {&flush_register, &flush_register});
        case HSA_AMD_AGENT_INFO_NEAREST_CPU: GIVE(hsa_agent_t, {CPU});
        case HSA_AMD_AGENT_INFO_MEMORY_PROPERTIES:
        case HSA_AMD_AGENT_INFO_AQL_EXTENSIONS: GIVE(uint64_t, 0);
        case HSA_AMD_AGENT_INFO_MEMORY_AVAIL: GIVE(uint64_t, vram_free(agent.handle));
        case HSA_AMD_AGENT_INFO_SCRATCH_LIMIT_MAX:
        case HSA_AMD_AGENT_INFO_SCRATCH_LIMIT_CURRENT: GIVE(uint64_t, 1 << 30);
        default: trace("agent info %#x is not known", what); return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
}

hsa_status_t hsa_iterate_agents(hsa_status_t (*call)(hsa_agent_t, void *), void *data) {
    for (uint64_t agent = CPU; agent < AGENTS; agent++) {
        const hsa_status_t status = call((hsa_agent_t){agent}, data);
        if (status != HSA_STATUS_SUCCESS) return status;
    }
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_agent_iterate_isas(hsa_agent_t agent, hsa_status_t (*call)(hsa_isa_t, void *), void *data) {
    return call((hsa_isa_t){agent.handle}, data);
}

hsa_status_t hsa_isa_get_info_alt(hsa_isa_t isa, hsa_isa_info_t what, void *out) {
    (void)isa;
    if (what == HSA_ISA_INFO_NAME_LENGTH) GIVE(uint32_t, sizeof ISA);
    if (what == HSA_ISA_INFO_NAME) GIVE_TEXT(sizeof ISA, "%s", ISA);
    trace("instruction set info %#x is not known", what);
    return HSA_STATUS_ERROR_INVALID_ARGUMENT;
}

// Pools.

hsa_status_t hsa_amd_agent_iterate_memory_pools(hsa_agent_t agent, hsa_status_t (*call)(hsa_amd_memory_pool_t, void *),
                                                void *data) {
    const uint64_t number = agent.handle - FIRST_GPU;
    const uint64_t of_cpu[] = {HOST_FINE, HOST_KERNARG, HOST_COARSE, 0},
                   of_gpu[] = {FIRST_VRAM + number, FIRST_GROUP + number, 0};
    for (const uint64_t *pool = is_gpu(agent.handle) ? of_gpu : of_cpu; *pool; pool++) {
        const hsa_status_t status = call((hsa_amd_memory_pool_t){*pool}, data);
        if (status != HSA_STATUS_SUCCESS) return status;
    }
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_memory_pool_get_info(hsa_amd_memory_pool_t pool, hsa_amd_memory_pool_info_t what, void *out) {
    const bool group = pool.handle >= FIRST_GROUP;
    switch (what) {
        case HSA_AMD_MEMORY_POOL_INFO_SEGMENT:
            GIVE(hsa_amd_segment_t, group ? HSA_AMD_SEGMENT_GROUP : HSA_AMD_SEGMENT_GLOBAL);
        case HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS:
            GIVE(uint32_t, pool.handle == HOST_FINE      ? HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED
                           : pool.handle == HOST_KERNARG ? HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED |
                                                               HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_KERNARG_INIT
                                                         : HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED);
        case HSA_AMD_MEMORY_POOL_INFO_SIZE:
        case HSA_AMD_MEMORY_POOL_INFO_ALLOC_MAX_SIZE: GIVE(size_t, group ? 64 << 10 : VRAM_BYTES);
        case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED: GIVE(bool, !group);
        case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE:
        case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALIGNMENT: GIVE(size_t, PAGE);
        case HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_REC_GRANULE: GIVE(size_t, 2 << 20);
        case HSA_AMD_MEMORY_POOL_INFO_ACCESSIBLE_BY_ALL: GIVE(bool, pool.handle < FIRST_VRAM);
        default: trace("pool info %#x is not known", what); return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
}

hsa_status_t hsa_amd_agent_memory_pool_get_info(hsa_agent_t agent, hsa_amd_memory_pool_t pool,
                                                hsa_amd_agent_memory_pool_info_t what, void *out) {
    const bool own = is_vram(pool.handle) ? agent.handle == vram_agent(pool.handle) : agent.handle == CPU;
    switch (what) {
        case HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS:
            // The processor cannot see a card's memory: a card without a large BAR.
            GIVE(hsa_amd_memory_pool_access_t, own || !is_vram(pool.handle)
                                                   ? HSA_AMD_MEMORY_POOL_ACCESS_ALLOWED_BY_DEFAULT
                                               : is_gpu(agent.handle) ? HSA_AMD_MEMORY_POOL_ACCESS_DISALLOWED_BY_DEFAULT
                                                                      : HSA_AMD_MEMORY_POOL_ACCESS_NEVER_ALLOWED);
        case HSA_AMD_AGENT_MEMORY_POOL_INFO_NUM_LINK_HOPS: GIVE(uint32_t, own ? 0 : 1);
        case HSA_AMD_AGENT_MEMORY_POOL_INFO_LINK_INFO:
            if (own) return HSA_STATUS_SUCCESS;
            GIVE(hsa_amd_memory_pool_link_info_t, {.atomic_support_32bit = true,
                                                   .atomic_support_64bit = true,
                                                   .coherent_support = true,
                                                   .link_type = HSA_AMD_LINK_INFO_TYPE_PCIE,
                                                   .numa_distance = 20});
        default: trace("pool info %#x of an agent is not known", what); return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
}

// Programs: whatever is loaded has any symbol that is asked for.

hsa_status_t hsa_executable_get_symbol_by_name(hsa_executable_t executable, const char *name, const hsa_agent_t *agent,
                                               hsa_executable_symbol_t *out) {
    (void)executable, (void)agent;
    struct kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return HSA_STATUS_ERROR_OUT_OF_RESOURCES;
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    out->handle = (uint64_t)kernel;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_executable_symbol_get_info(hsa_executable_symbol_t symbol, hsa_executable_symbol_info_t what,
                                            void *out) {
    switch ((int)what) {
        case HSA_EXECUTABLE_SYMBOL_INFO_TYPE: GIVE(hsa_symbol_kind_t, HSA_SYMBOL_KIND_KERNEL);
        case HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_OBJECT: GIVE(uint64_t, symbol.handle);
        case HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_DYNAMIC_CALLSTACK: GIVE(bool, false);
        default: trace("symbol info %#x is not known", what); return HSA_STATUS_ERROR_INVALID_ARGUMENT;
    }
}

hsa_status_t hsa_executable_create_alt(hsa_profile_t profile, hsa_default_float_rounding_mode_t mode,
                                       const char *options, hsa_executable_t *out) {
    (void)profile, (void)mode, (void)options;
    out->handle = 1;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_code_object_reader_create_from_memory(const void *code, size_t size, hsa_code_object_reader_t *out) {
    (void)code, (void)size;
    out->handle = 1;
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_system_get_major_extension_table(uint16_t extension, uint16_t major, size_t size, void *table) {
    (void)extension, (void)major;
    memset(table, 0, size);
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_status_string(hsa_status_t status, const char **out) {
    (void)status;
    *out = "an error of the pretended HSA";
    return HSA_STATUS_SUCCESS;
}

hsa_status_t hsa_amd_memory_lock_to_pool(void *host, size_t size, hsa_agent_t *agents, int count,
                                         hsa_amd_memory_pool_t pool, uint32_t flags, void **out) {
    (void)size, (void)agents, (void)count, (void)pool, (void)flags;
    *out = host;
    return HSA_STATUS_SUCCESS;
}

// The rest, by name alone: what succeeds without doing anything, and what is not to be had.
#define SUCCEEDS(name)                                 \
    hsa_status_t succeeds_##name(void) __asm__(#name); \
    hsa_status_t succeeds_##name(void) { return HSA_STATUS_SUCCESS; }
#define FAILS(name)                                 \
    hsa_status_t fails_##name(void) __asm__(#name); \
    hsa_status_t fails_##name(void) {               \
        trace("%s is not to be had", #name);        \
        return HSA_STATUS_ERROR;                    \
    }

SUCCEEDS(hsa_init)
SUCCEEDS(hsa_shut_down)
SUCCEEDS(hsa_agent_extension_supported)
SUCCEEDS(hsa_system_extension_supported)
SUCCEEDS(hsa_amd_agents_allow_access)
SUCCEEDS(hsa_amd_agent_set_async_scratch_limit)
SUCCEEDS(hsa_amd_coherency_set_type)
SUCCEEDS(hsa_amd_enable_logging)
SUCCEEDS(hsa_amd_memory_unlock)
SUCCEEDS(hsa_amd_profiling_async_copy_enable)
SUCCEEDS(hsa_amd_profiling_set_profiler_enabled)
SUCCEEDS(hsa_amd_queue_cu_set_mask)
SUCCEEDS(hsa_amd_queue_set_priority)
SUCCEEDS(hsa_amd_register_system_event_handler)
SUCCEEDS(hsa_code_object_reader_destroy)
SUCCEEDS(hsa_executable_agent_global_variable_define)
SUCCEEDS(hsa_executable_destroy)
SUCCEEDS(hsa_executable_freeze)
SUCCEEDS(hsa_executable_iterate_symbols)
SUCCEEDS(hsa_executable_load_agent_code_object)
SUCCEEDS(hsa_memory_deregister)
SUCCEEDS(hsa_memory_register)
FAILS(hsa_amd_ais_file_read)
FAILS(hsa_amd_ais_file_write)
FAILS(hsa_amd_image_create)
FAILS(hsa_amd_interop_map_buffer)
FAILS(hsa_amd_interop_unmap_buffer)
FAILS(hsa_amd_ipc_memory_attach)
FAILS(hsa_amd_ipc_memory_create)
FAILS(hsa_amd_ipc_memory_detach)
FAILS(hsa_amd_memory_async_copy_rect)
FAILS(hsa_amd_portable_export_dmabuf)
FAILS(hsa_amd_svm_attributes_get)
FAILS(hsa_amd_svm_attributes_set)
FAILS(hsa_amd_svm_prefetch_async)
FAILS(hsa_ext_image_create)
FAILS(hsa_ext_image_create_with_layout)
FAILS(hsa_ext_image_data_get_info)
FAILS(hsa_ext_image_destroy)
FAILS(hsa_ext_image_export)
FAILS(hsa_ext_image_import)
FAILS(hsa_ext_sampler_create)
FAILS(hsa_ext_sampler_create_v2)
FAILS(hsa_ext_sampler_destroy)
