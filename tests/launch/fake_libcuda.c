/* A libcuda that launches nothing: it lets Triton's own NVIDIA launcher run on a machine without a GPU and notes what it was asked.
   Only what Triton calls to load and launch a kernel is here. Handles are small made-up numbers. */
#include <cuda.h>
#include <string.h>

static int num_launches;
static unsigned last_grid[3];
static unsigned last_block, last_shared;
static unsigned long long last_params[128];

/* How many parameters the next launch has, and the bytes of each: a real driver knows that from the binary. */
static int num_params;
static int param_bytes[128];

void fake_expect(int count, const int *bytes) {
  num_params = count;
  memcpy(param_bytes, bytes, count * sizeof(int));
}
int fake_num_launches(void) { return num_launches; }
void fake_last(unsigned *grid, unsigned *block, unsigned *shared, unsigned long long *params) {
  memcpy(grid, last_grid, sizeof(last_grid));
  *block = last_block;
  *shared = last_shared;
  memcpy(params, last_params, sizeof(last_params));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  num_launches++;
  last_grid[0] = config->gridDimX;
  last_grid[1] = config->gridDimY;
  last_grid[2] = config->gridDimZ;
  last_block = config->blockDimX;
  last_shared = config->sharedMemBytes;
  for (int i = 0; i < num_params; i++) {
    last_params[i] = 0;
    memcpy(&last_params[i], params[i], param_bytes[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "fake";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1024;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)7;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(data, &pointer, sizeof(pointer));
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
