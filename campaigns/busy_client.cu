// A CUDA program for campaigns/busy_ends.py: busy_client WORK ON_ERROR [TABLE NUMBER]
//
// WORK      queue   forty kernels that read and write 1 GiB are launched, then waited for
//           small   a thousand kernels of some microseconds are launched, then waited for
//           graph   ten launches of a CUDA graph of 64 kernels, then waited for; graph640x5: five of one of 640 kernels
//           managed as queue, with 1 GiB of managed memory
//           copy    copies to, from and inside the device, 256 MiB each, then waited for
//           endless a kernel that never ends
//           idle    one kernel, then no more calls
//           step    a small kernel every 10 ms, each waited for, its result checked
// ON_ERROR  exit    leave with status 1 at the first CUDA error
//           stay    make no more calls, and sleep
//           retry   go on with the same calls
// TABLE     a file of doubles: the time of the last step is written into entry NUMBER
//
// With BUSY_BLOCKING in the environment, or a TABLE, it uses no processor while it waits.
// Lines: `T SECONDS ready`, `T SECONDS round SECONDS` (the first), `T SECONDS error NAME`, with seconds since the epoch.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static double now() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

__global__ void stream(float* data, size_t count, int rounds) {
  size_t step = (size_t)gridDim.x * blockDim.x;
  for (int round = 0; round < rounds; round++)
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) data[i] = data[i] * 0.5f + 1.0f;
}

__global__ void add(unsigned* data, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) data[i] += 1;
}

__global__ void forever(volatile unsigned* data) {
  while (data[1024] != 1) data[2048 + threadIdx.x] += 1;
}

static const char* on_error = "exit";

static bool failed(cudaError_t error) {
  static bool said = false;
  if (error == cudaSuccess) return false;
  if (!said) printf("T %.6f error %s\n", now(), cudaGetErrorName(error));
  fflush(stdout);
  said = true;
  if (!strcmp(on_error, "stay"))
    for (;;) pause();
  if (!strcmp(on_error, "retry")) {
    usleep(20000);
    return true;
  }
  exit(1);
}

int main(int count, char** words) {
  if (count < 3) return 99;
  const char* work = words[1];
  on_error = words[2];
  volatile double* table = nullptr;
  if (count > 4) {
    int file = open(words[3], O_RDWR);
    void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0 && memory != MAP_FAILED) table = (double*)memory + atoi(words[4]);
  }
  if (table != nullptr || getenv("BUSY_BLOCKING") != nullptr) cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync);
  const size_t large = 1ul << 30, part = 256ul << 20;
  float* data = nullptr;
  unsigned* little = nullptr;
  char* host = nullptr;
  if (failed(cudaMalloc(&little, 1 << 20)) || failed(cudaMemset(little, 0, 1 << 20))) return 1;
  int nodes = 64, launches = 10;
  bool is_graph = !strncmp(work, "graph", 5), is_managed = !strcmp(work, "managed");
  if (is_graph) sscanf(work, "graph%dx%d", &nodes, &launches);
  if (is_managed && (failed(cudaMallocManaged(&data, large)) || failed(cudaMemset(data, 0, large)))) return 1;
  bool is_large = !strcmp(work, "queue") || !strcmp(work, "copy") || !strcmp(work, "idle");
  if (is_large && (failed(cudaMalloc(&data, large)) || failed(cudaMemset(data, 0, large)))) return 1;
  if (!strcmp(work, "copy") && failed(cudaMallocHost(&host, part))) return 1;
  cudaStream_t queue;
  if (failed(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking))) return 1;
  cudaGraphExec_t graph = nullptr;
  if (is_graph) {
    cudaGraph_t made;
    failed(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < nodes; i++) add<<<1024, 256, 0, queue>>>(little, 1 << 18);
    failed(cudaStreamEndCapture(queue, &made));
    failed(cudaGraphInstantiate(&graph, made, 0));
  }
  if (failed(cudaDeviceSynchronize())) return 1;
  unsigned steps = 0;
  for (bool first = true;; first = false) {
    if (is_managed || !strcmp(work, "queue")) {
      for (int i = 0; i < 40; i++) stream<<<1056, 256, 0, queue>>>(data, large / 4, 4);
    } else if (!strcmp(work, "small")) {
      for (int i = 0; i < 1000; i++) add<<<64, 256, 0, queue>>>(little, 1 << 14);
    } else if (is_graph) {
      for (int i = 0; i < launches; i++) failed(cudaGraphLaunch(graph, queue));
    } else if (!strcmp(work, "copy")) {
      for (int i = 0; i < 4; i++) {
        failed(cudaMemcpyAsync(data, host, part, cudaMemcpyHostToDevice, queue));
        failed(cudaMemcpyAsync((char*)data + part, data, part, cudaMemcpyDeviceToDevice, queue));
        failed(cudaMemcpyAsync(host, (char*)data + part, part, cudaMemcpyDeviceToHost, queue));
      }
    } else if (!strcmp(work, "endless")) {
      forever<<<1, 256, 0, queue>>>(little);
    } else {
      add<<<1, 256, 0, queue>>>(little, 1);
    }
    double begun = now();
    if (first) {  // the first round is on the GPU
      failed(cudaGetLastError());
      printf("T %.6f ready\n", now());
      fflush(stdout);
    }
    if (failed(cudaGetLastError()) || failed(cudaStreamSynchronize(queue))) continue;
    if (first) printf("T %.6f round %.4f\n", now(), now() - begun);
    fflush(stdout);
    if (table != nullptr) *table = now();
    if (!strcmp(work, "idle"))
      for (;;) pause();
    if (!strcmp(work, "step")) {
      unsigned seen = 0;
      if (failed(cudaMemcpy(&seen, little, sizeof seen, cudaMemcpyDeviceToHost))) continue;
      if (seen != ++steps) {
        printf("T %.6f error wrong result %u instead of %u\n", now(), seen, steps);
        fflush(stdout);
        return 2;
      }
      usleep(10000);
    }
  }
}
