// What a HIP runtime itself says about this machine, without growspan: its version, whether it starts, its devices.
//
//     cc -D__HIP_PLATFORM_AMD__ -I "$include" probe.c -ldl -o probe && ./probe libamdhip64.so.6

#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <stdio.h>

int main(int count, char **words) {
    void *library = dlopen(count > 1 ? words[1] : "libamdhip64.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("not loaded: %s\n", dlerror());
        return 1;
    }
    __typeof__(&hipRuntimeGetVersion) version = (__typeof__(version))dlsym(library, "hipRuntimeGetVersion");
    __typeof__(&hipInit) init = (__typeof__(init))dlsym(library, "hipInit");
    __typeof__(&hipGetDeviceCount) devices = (__typeof__(devices))dlsym(library, "hipGetDeviceCount");
    if (!version || !init || !devices) {
        printf("a symbol is missing: %s\n", dlerror());
        return 1;
    }
    int number = -1, found = -1;
    hipError_t result = version(&number);
    printf("hipRuntimeGetVersion: %d, version %d\n", result, number);
    printf("hipInit: %d\n", init(0));
    result = devices(&found);
    printf("hipGetDeviceCount: %d, devices %d\n", result, found);
    return 0;
}
