// What the parts of the pretended HSA share. `work.c` says what it is for.

#pragma once

#include <hsa/amd_hsa_queue.h>
#include <hsa/amd_hsa_signal.h>
#include <hsa/hsa.h>
#include <hsa/hsa_ext_amd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Agents by their handles: the processor, then the cards.
enum { GPUS = 4, CPU = 1, FIRST_GPU = 2, LAST_GPU = FIRST_GPU + GPUS - 1, AGENTS = LAST_GPU + 1 };
// Memory pools by their handles.
enum { HOST_FINE = 1, HOST_KERNARG, HOST_COARSE, FIRST_VRAM, FIRST_GROUP = FIRST_VRAM + GPUS };

#define PAGE 4096ull
#define VRAM_BYTES (64ull << 30)

static inline bool is_gpu(uint64_t agent) { return agent >= FIRST_GPU && agent <= LAST_GPU; }
static inline bool is_vram(uint64_t pool) { return pool >= FIRST_VRAM && pool < FIRST_GROUP; }
static inline uint64_t vram_agent(uint64_t pool) { return pool - FIRST_VRAM + FIRST_GPU; }

// What a symbol and its code are to this library.
struct kernel {
    char name[128];
};

// Says what was not expected and goes on; shown with FAKE_HSA_TRACE=1.
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Bytes of a card that nothing occupies.
uint64_t vram_free(uint64_t agent);

// What a card does with memory. An access that the card could not do ends the process, as a page fault of a card does.
void gpu_copy(uint64_t agent, uint64_t dst, uint64_t src, size_t bytes);
void gpu_fill(uint64_t agent, uint64_t dst, const void *pattern, size_t pattern_bytes, size_t bytes);
