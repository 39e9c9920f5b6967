/* A stand-in for libcuda.so.1: enough of the driver API to see whether the client in Python passes what it should.
   Every function refuses arguments that a wrong ctypes declaration would produce (a pointer cut to 32 bits, ...). */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
static const u64 CONTEXT = 0x7f1234567890ull, MEMORY = 0x7fabcdef0000ull, MODULE = 0x7f0000000111ull;
static const u64 SPIN = 0x7f0000000200ull, OOB = 0x7f0000000201ull;
static u64 spin_ns;
static int faulted;

int cuInit(unsigned flags) { return flags != 0; }
int cuGetErrorName(int error, const char **name)
{
    *name = error == 0 ? "CUDA_SUCCESS" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 101 ? "CUDA_ERROR_INVALID_DEVICE" : NULL;
    return *name ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)CONTEXT; return device; }
int cuCtxSetCurrent(void *context) { return (u64)context - CONTEXT < 2 ? 0 : 201; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = (void *)(CONTEXT + 1); return flags || device; }
int cuCtxDestroy_v2(void *context) { return (u64)context == CONTEXT + 1 ? 0 : 201; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 16 && !device ? 132 : -1; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 142565ull << 20; *total = 143155ull << 20; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 0xa0 + i; return device; }
int cuMemAlloc_v2(u64 *pointer, size_t size) { *pointer = MEMORY; return size > 1ull << 34 ? 2 : 0; }
int cuMemFree_v2(u64 pointer) { return pointer == MEMORY ? 0 : 1; }
int cuMemsetD8_v2(u64 pointer, unsigned char value, size_t size)
{
    return pointer == MEMORY && value == 1 && size == 1 << 20 ? 0 : 1;
}
int cuModuleLoadData(void **module, const char *image)
{
    *module = (void *)MODULE;
    return strstr(image, ".version 7.8") ? 0 : 222; /* takes only the second target that is tried */
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = (void *)(strcmp(name, "oob") ? SPIN : OOB);
    return (u64)module == MODULE ? 0 : 400;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    if (gx != 1 || gy != 1 || gz != 1 || bx != 1 || by != 1 || bz != 1 || shared || stream || extra) return 1;
    u64 argument = *(u64 *)parameters[0];
    if ((u64)function == OOB) { faulted = argument == MEMORY; return !faulted; }
    spin_ns = argument;
    return (u64)function == SPIN ? 0 : 1;
}
int cuCtxSynchronize(void)
{
    if (faulted) return 700;
    usleep(spin_ns / 1000);
    return 0;
}
