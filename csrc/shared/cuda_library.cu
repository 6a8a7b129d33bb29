// What zeropp/native/kernels.py asks of the CUDA library as a whole.

#include <cuda_runtime.h>
#include <stdint.h>

namespace zpp {

cudaError_t load_quantize();  // quantize/cuda_quantize.cu
cudaError_t load_reduce();    // quantize/cuda_reduce.cu
cudaError_t load_adam();      // adam/cuda.cu
cudaError_t load_coder();     // messages/cuda.cu

}  // namespace zpp

extern "C" {

// Load all kernels. Returns 0 if they run on this device, else an error.
int64_t zpp_ready(int64_t device) {
    cudaError_t error = cudaSetDevice(int(device));
    if (!error) error = zpp::load_quantize();
    if (!error) error = zpp::load_reduce();
    if (!error) error = zpp::load_adam();
    if (!error) error = zpp::load_coder();
    if (error) cudaGetLastError();
    return int64_t(error);
}

// CUDA's text for an error that one of the functions returned.
const char* zpp_error(int64_t error) { return cudaGetErrorString(cudaError_t(error)); }

}  // extern "C"
