/* The functions that the DSL's compiled host code calls, in place of its CUDA runtime library: its calls of f become calls of
 * emu_f, so that no library which the process has loaded already comes between. Loading, finding and launching
 * kernels go to the hooks that Python sets; questions about the device are answered from a table. Without hooks every call
 * fails, so nothing is ever skipped in silence. */
#include <stdint.h>
#include <stddef.h>

#define ATTRIBUTES 192
#define NOT_SUPPORTED 801

typedef struct {
    uint64_t (*load)(const void *image);
    uint64_t (*kernel)(uint64_t library, const char *name);
    int (*launch)(const void *config, uint64_t kernel, void **arguments);
    int attributes[ATTRIBUTES]; /* cudaDeviceAttr -> value; -1: unknown */
    int devices, device;
    void (*raise)(const char *kind, const char *message); /* TVM-FFI's, if it is there */
} emu_hooks;

static emu_hooks *hooks;
static const char *message = "the emulated device refused the call; the Python exception says why";

void emu_set_hooks(emu_hooks *to) { hooks = to; }

int emu__cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    if (!hooks || attribute < 0 || attribute >= ATTRIBUTES || hooks->attributes[attribute] < 0) return NOT_SUPPORTED;
    *value = hooks->attributes[attribute];
    return 0;
}
int emu__cudaGetDevice(int *device) { *device = hooks ? hooks->device : 0; return 0; }
int emu__cudaSetDevice(int device) { if (hooks) hooks->device = device; return 0; }
int emu__cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int emu__cudaGetDeviceCount(int *count) { *count = hooks ? hooks->devices : 1; return 0; }
int emu__cudaFuncSetAttribute(void *f, int attribute, int value) { (void)f; (void)attribute; (void)value; return 0; }
int emu__cudaKernelSetAttributeForDevice(void *k, int attribute, int value, int device) {
    (void)k; (void)attribute; (void)value; (void)device;
    return 0;
}
int emu__cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute; (void)kernel; (void)device;
    *value = 0; /* static shared memory, registers: nothing that the machine lacks */
    return 0;
}

int emu__cudaLibraryLoadData(void **library, const void *code, void *jit, void *jit_values, unsigned n, void *options,
                         void *values, unsigned m) {
    (void)jit; (void)jit_values; (void)n; (void)options; (void)values; (void)m;
    uint64_t handle = hooks ? hooks->load(code) : 0;
    *library = (void *)(uintptr_t)handle;
    return handle ? 0 : 999;
}
int emu__cudaLibraryUnload(void *library) { (void)library; return 0; }
int emu__cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    uint64_t handle = hooks ? hooks->kernel((uint64_t)(uintptr_t)library, name) : 0;
    *kernel = (void *)(uintptr_t)handle;
    return handle ? 0 : 999;
}
int emu__cudaLaunchKernelEx(const void *config, void *kernel, void **arguments) {
    return hooks ? hooks->launch(config, (uint64_t)(uintptr_t)kernel, arguments) : 999;
}

int emu__cudaDeviceSynchronize(void) { return 0; }
int emu__cudaStreamSynchronize(void *stream) { (void)stream; return 0; }

/* TVM-FFI. */
const char *emu_CuteDSLRT_GetErrorName(int e) { return e ? "emulatorError" : "cudaSuccess"; }
const char *emu_CuteDSLRT_GetErrorString(int e) { return e ? message : "no error"; }
const char *emu_cuda_dialect_get_error_name(int e) { return e ? "emulatorError" : "cudaSuccess"; }
void emu_cuda_dialect_print_on_error(int e) { (void)e; }

int emu_CuteDSLRT_TVMFFISetRaisedCudaError(int e) {
    if (e && hooks && hooks->raise) hooks->raise("RuntimeError", message);
    return 0;
}
int emu_CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int e) { return emu_CuteDSLRT_TVMFFISetRaisedCudaError(e); }

int emu_cuda_dialect_init_library_once(void **slot, int (*init)(void **), int (*load)(void **, int), void *on_error) {
    (void)on_error;
    void *library = NULL;
    void **at = &library;
    int e;
    if (*slot) return 0;
    e = init(at);
    if (!e) e = load(at, 0);
    if (!e) *slot = library;
    else emu_CuteDSLRT_TVMFFISetRaisedCudaError(e); /* the caller expects it set */
    return e;
}
int emu_cuda_dialect_unload_library_once(void **slot) { *slot = NULL; return 0; }
