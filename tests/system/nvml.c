/* A stand-in for libnvidia-ml.so.1: one GPU, described by small files beside this library.
 *
 *   hang            every call blocks for ever        slow        milliseconds that each list of processes takes
 *   no_driver       there is no driver                lost        the GPU has fallen off the bus
 *   mig             it has one MIG device             denied      only others may set the compute mode
 *   mode            the compute mode, a number        xid         an Xid event, told once
 *   processes       a line each: PID plain|mps|display BYTES
 *   energy          millijoules; without it the GPU cannot say
 *   samples         its utilisation, a line each: STAMP PERCENT
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9,
       TIMED_OUT = 10, LOST = 15 };
#define UUID "GPU-11111111-2222-3333-4444-555555555555"
#define PART "MIG-66666666-7777-8888-9999-000000000000"
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
static int gpu, part, events;

static FILE *file(const char *name, const char *how) {
    Dl_info info;
    char path[4096];
    if (!dladdr((void *)file, &info)) return NULL;
    snprintf(path, sizeof path, "%s", info.dli_fname);
    snprintf(strrchr(path, '/') + 1, 200, "%s", name);
    if (!strcmp(how, "delete")) { unlink(path); return NULL; }
    return fopen(path, how);
}

static long number(const char *name, long otherwise) {
    FILE *found = file(name, "r");
    if (!found) return otherwise;
    long value = otherwise;
    if (fscanf(found, "%ld", &value) != 1) value = 1;
    fclose(found);
    return value;
}

static int reach(void) {
    while (number("hang", 0)) sleep(3600);
    return number("lost", 0) ? LOST : SUCCESS;
}

const char *nvmlErrorString(int error) {
    switch (error) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NO_DRIVER: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return number("no_driver", 0) ? NO_DRIVER : SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &gpu; return index ? INVALID : reach(); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &gpu;
    return strcmp(uuid, UUID) ? NOT_FOUND : reach();
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "%s", handle == &part ? PART : UUID);
    return SUCCESS;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    (void)handle;
    snprintf(name, size, "NVIDIA Stand-in");
    return SUCCESS;
}
int nvmlDeviceGetArchitecture(void *handle, unsigned *found) { (void)handle; *found = 9; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = handle == &part ? 10ULL << 30 : 80ULL << 30;
    memory[2] = 3ULL << 30;
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}
int nvmlDeviceGetNumGpuCores(void *handle, unsigned *cores) { (void)handle; *cores = 132 * 128; return SUCCESS; }
int nvmlDeviceGetComputeMode(void *handle, unsigned *mode) {
    (void)handle;
    *mode = (unsigned)number("mode", 0);
    return SUCCESS;
}
int nvmlDeviceSetComputeMode(void *handle, unsigned mode) {
    (void)handle;
    if (number("denied", 0)) return NO_PERMISSION;
    FILE *found = file("mode", "w");
    if (!found) return NO_PERMISSION;
    fprintf(found, "%u", mode);
    fclose(found);
    return SUCCESS;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
    (void)handle;
    *now = *later = (unsigned)number("mig", 0);
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **found) {
    (void)handle;
    *found = &part;
    return index ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) { (void)handle; *id = 1; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    (void)handle;
    if (number("mig", 0)) return NOT_SUPPORTED;
    rates[0] = 42;
    rates[1] = 7;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { (void)handle; *milliwatts = 123456; return SUCCESS; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
    (void)handle;
    (void)sensor;
    *degrees = 55;
    return SUCCESS;
}

static int list(const char *kind, unsigned *count, Process *found) {
    if (number("slow", 0)) usleep((useconds_t)number("slow", 0) * 1000);
    FILE *lines = file("processes", "r");
    unsigned room = *count, pid;
    unsigned long long memory;
    char what[20];
    *count = 0;
    while (lines && fscanf(lines, "%u %19s %llu", &pid, what, &memory) == 3) {
        if (strcmp(what, kind)) continue;
        if (found && *count < room) found[*count] = (Process){pid, memory, number("mig", 0) ? 1 : ~0u, ~0u};
        ++*count;
    }
    if (lines) fclose(lines);
    return *count > room ? SMALL : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    (void)handle;
    return list("plain", count, found);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    (void)handle;
    return list("display", count, found);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    (void)handle;
    return list("mps", count, found);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    (void)handle;
    *millijoules = (unsigned long long)number("energy", 0);
    return *millijoules ? SUCCESS : NOT_SUPPORTED;
}
typedef struct { unsigned long long stamp; union { unsigned value; double widest; }; } Sample;
int nvmlDeviceGetSamples(void *handle, int kind, unsigned long long last, int *type, unsigned *count, Sample *found) {
    (void)handle;
    FILE *lines = file("samples", "r");
    unsigned room = *count, percent;
    unsigned long long stamp;
    if (!lines || kind != 1) return NOT_SUPPORTED;
    *count = 0;
    *type = 1;
    while (fscanf(lines, "%llu %u", &stamp, &percent) == 2)
        if (stamp > last) {
            if (found && *count < room) { found[*count].stamp = stamp; found[*count].value = percent; }
            ++*count;
        }
    fclose(lines);
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) { *set = &events; return SUCCESS; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) {
    (void)handle;
    (void)types;
    (void)set;
    return SUCCESS;
}
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    (void)set;
    for (unsigned waited = 0; waited < milliseconds; waited += 20) {
        long xid = number("xid", 0);
        if (xid) {
            file("xid", "delete");
            *event = (Event){&gpu, 8, (unsigned long long)xid, ~0u, ~0u};
            return SUCCESS;
        }
        usleep(20000);
    }
    return TIMED_OUT;
}
