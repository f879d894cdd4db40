// What a HIP runtime itself says about this machine, without growspan: its version, whether it starts, its devices; and
// if there are any, one life of virtual memory with data in it.
//
//     cc -D__HIP_PLATFORM_AMD__ -I "$include" probe.c -ldl -o probe && ./probe libamdhip64.so.6

#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <string.h>

static void *library;
static int broken;

// A function of the runtime, with the type that its header gives it.
#define HIP(name) ((__typeof__(&name))dlsym(library, #name))
#define MUST(call)                                     \
    do {                                               \
        const hipError_t result = (call);              \
        if (result) {                                  \
            printf("broken: %s: %d\n", #call, result); \
            broken = 1;                                \
        }                                              \
    } while (0)

#if HIP_VERSION >= 60100000
static void life_of_virtual_memory(int device) {
    enum { CHUNKS = 3 };
    static char from[CHUNKS << 21], to[CHUNKS << 21];
    const size_t chunk = 2 << 20, all = CHUNKS * chunk;
    const hipMemAllocationProp prop = {.type = hipMemAllocationTypePinned,
                                       .location = {hipMemLocationTypeDevice, device}};
    const hipMemAccessDesc access = {.location = prop.location, .flags = hipMemAccessFlagsProtReadWrite};
    hipMemGenericAllocationHandle_t handles[CHUNKS];
    size_t granularity[2] = {0}, free[3] = {0}, total = 0;
    void *base = NULL;

    MUST(HIP(hipSetDevice)(device));
    MUST(HIP(hipMemGetAllocationGranularity)(&granularity[0], &prop, hipMemAllocationGranularityMinimum));
    MUST(HIP(hipMemGetAllocationGranularity)(&granularity[1], &prop, hipMemAllocationGranularityRecommended));
    // What the runtime makes for itself at the first copy is not to count.
    MUST(HIP(hipMalloc)(&base, 4096));
    MUST(HIP(hipMemcpyHtoD)(base, from, 4096));
    MUST(HIP(hipMemsetD8)(base, 0, 4096));
    MUST(HIP(hipFree)(base));
    MUST(HIP(hipMemGetInfo)(&free[0], &total));

    MUST(HIP(hipMemAddressReserve)(&base, 64 << 20, 0, NULL, 0));
    for (int n = 0; n < CHUNKS; n++) {
        MUST(HIP(hipMemCreate)(&handles[n], chunk, &prop, 0));
        MUST(HIP(hipMemMap)((char *)base + n * chunk, chunk, 0, handles[n], 0));
        MUST(HIP(hipMemSetAccess)((char *)base + n * chunk, chunk, &access, 1));
    }
    MUST(HIP(hipMemGetInfo)(&free[1], &total));
    for (size_t n = 0; n < all; n++) from[n] = (char)(n * 2654435761u >> 24);
    MUST(HIP(hipMemcpyHtoD)(base, from, all));
    MUST(HIP(hipMemsetD8)((char *)base + chunk - 1000, 7, 2000));
    memset(from + chunk - 1000, 7, 2000);
    MUST(HIP(hipMemcpyDtoH)(to, base, all));
    const int differs = memcmp(from, to, all) != 0;
    for (int n = 0; n < CHUNKS; n++) {
        MUST(HIP(hipMemUnmap)((char *)base + n * chunk, chunk));
        MUST(HIP(hipMemRelease)(handles[n]));
    }
    MUST(HIP(hipMemAddressFree)(base, 64 << 20));
    MUST(HIP(hipMemGetInfo)(&free[2], &total));
    printf("device %d: granularity %zu and %zu; %zu bytes mapped, %s; %zu taken, %zu kept\n", device, granularity[0],
           granularity[1], all, differs ? "broken: another content came back" : "filled and read back",
           free[0] - free[1], free[0] - free[2]);
    broken |= differs || free[0] - free[1] != all || free[0] != free[2];
}
#endif

int main(int count, char **words) {
    library = dlopen(count > 1 ? words[1] : "libamdhip64.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("not loaded: %s\n", dlerror());
        return 1;
    }
    int number = -1, devices = -1;
    hipError_t result = HIP(hipRuntimeGetVersion)(&number);
    printf("hipRuntimeGetVersion: %d, version %d\n", result, number);
    printf("hipInit: %d\n", HIP(hipInit)(0));
    result = HIP(hipGetDeviceCount)(&devices);
    printf("hipGetDeviceCount: %d, devices %d\n", result, devices);
#if HIP_VERSION >= 60100000
    for (int device = 0; device < devices; device++) life_of_virtual_memory(device);
#endif
    return broken;
}
